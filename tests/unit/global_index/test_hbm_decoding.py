"""What engines publish, and what it is understood as."""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NamespaceId
from global_index.hbm.decoding import MAX_EVENTS, decode_message
from global_index.hbm.events import (
    EngineCleared,
    EngineMessage,
    EngineRemoved,
    EngineStored,
    MediaAt,
)
from global_index.hbm.places import ChainForm
from global_index.hbm.rows import EngineRows

SAMPLE = Path(__file__).parents[2] / "data" / "vllm_kv_events.jsonl"
BIG = 2**64 - 3


def packed(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def only(*events: Any) -> Any:
    """What one event is decoded to."""
    message = decode_message(packed(*events))
    (event,) = message.events
    return event


def stored(**changes: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1, BIG],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        **changes,
    }


def seen(event: EngineStored) -> tuple[object, ...]:
    return (event.hashes, event.parent, event.tokens.tolist(), event.block_tokens, event.group)


def sample() -> list[tuple[str, str, EngineMessage]]:
    lines = []
    for line in SAMPLE.read_text().splitlines():
        row = json.loads(line)
        frames = [base64.b64decode(frame) for frame in row["frames"]]
        if int.from_bytes(frames[-2], "big", signed=True) >= 0:
            lines.append((row["run"], row["source"], decode_message(frames[-1])))
    return lines


def test_every_message_of_a_real_engine_is_understood() -> None:
    messages = sample()
    assert len(messages) == 53 - 2, "two are the ends of replays"
    kinds: Counter[tuple[str, str]] = Counter()
    other_media: Counter[str] = Counter()
    for run, _, message in messages:
        assert (message.unknown, message.malformed) == (0, 0)
        assert message.dp_rank == 0
        other_media[run] += message.other_media
        for event in message.events:
            kinds[run, type(event).__name__] += 1
            if isinstance(event, EngineStored):
                assert event.is_full
                assert event.understood_blocks == len(event.hashes)
                assert event.tokens.size == len(event.hashes) * event.block_tokens
    assert all(kinds[run, "EngineStored"] for run in {run for run, _, _ in messages})
    assert kinds["int_hashes", "EngineRemoved"] > 10
    assert kinds["int_hashes", "EngineCleared"] > 0
    assert +other_media == Counter(
        {"offloading_spec_cpu_tier": other_media["offloading_spec_cpu_tier"]}
        | {"connector_take_events": other_media["connector_take_events"]}
    ), "CPU tiers only where there are connectors with one"
    salts = {e.salt for _, _, m in messages for e in m.events if isinstance(e, EngineStored)}
    assert salts == {"", "tenantA"}


@pytest.mark.parametrize(
    "event",
    [
        stored(),
        ["BlockStored", [1, BIG], None, [5, 6, 7, 8], 2, None, "GPU"],
        ["BlockStored", [1, BIG], None, [5, 6, 7, 8], 2, None],
        ["BlockStored", [1, BIG], None, [5, 6, 7, 8], 2, None, "GPU", None, None, 0],
        ["BlockStored", [1, BIG], None, [5, 6, 7, 8], 2, None, "GPU", None, [None, None], None],
        stored(lookahead_token_ids=[9], session_id="s", ownership="x", locality="LOCAL"),
        stored(token_ids=[[5, 6], [6, 7], [7, 8], [8, 9]]),
    ],
)
def test_maps_arrays_and_pairs_say_the_same(event: Any) -> None:
    assert seen(only(event)) == ((1, BIG), None, [5, 6, 7, 8], 2, 0)


def test_hashes_keep_their_form_and_sign() -> None:
    assert only(stored(block_hashes=[-(2**63), b"x" * 32])).hashes == (-(2**63), b"x" * 32)
    assert only({"type": "BlockRemoved", "block_hashes": [-1]}) == EngineRemoved((-1,), 0)
    assert only(["BlockRemoved", [7], "GPU", 3]) == EngineRemoved((7,), 3)
    assert only(["AllBlocksCleared"]) == only({"type": "AllBlocksCleared"}) == EngineCleared()


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL", "NEW"])
def test_only_hbm_counts(medium: str) -> None:
    message = decode_message(
        packed(
            stored(medium=medium),
            {"type": "BlockRemoved", "block_hashes": [1], "medium": medium},
            ["BlockRemoved", [1], medium],
            stored(locality="REMOTE"),
        )
    )
    assert (message.events, message.other_media) == ((), 4)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local", "mamba", "new_kind"])
def test_groups_that_do_not_need_every_block_are_told_apart(kind: str) -> None:
    assert not only(stored(kv_cache_spec_kind=kind, group_idx=1)).is_full
    assert not only(stored(kv_cache_spec_sliding_window=128)).is_full
    assert only(stored(kv_cache_spec_kind="mla_attention", group_idx=2)).is_full


def test_extra_keys_of_vllm_are_read_in_their_order() -> None:
    event = only(
        stored(lora_name="bot", lora_id=1, extra_keys=[["bot", ["img", -3], "tenant"], ["bot"]])
    )
    assert (event.adapter, event.salt, event.understood_blocks) == ("bot", "tenant", 2)
    assert event.media == ((MediaAt("img", -3),), ())


def test_sglang_says_its_salt_beside_the_keys() -> None:
    metadata = {"cache_salt": "t1"}
    array = ["BlockStored", [1, 2], 9, [5, 6, 7, 8], 2, None, "GPU", metadata]
    for event in (array, stored(cache_salt="t1", parent_block_hash=9)):
        assert only(event).salt == "t1"
        assert only(event).parent == 9


@pytest.mark.parametrize(
    ("changes", "understood"),
    [
        ({"extra_keys": [None, [b"digest of embeddings"]]}, 1),
        ({"extra_keys": [None, ["a salt in the middle"]]}, 1),
        ({"extra_keys": [["t"], None], "parent_block_hash": 4}, 0),
        ({"extra_keys": [[{"new": 1}], None]}, 0),
        ({"lora_id": 3}, 0),
    ],
)
def test_keys_that_are_not_understood_are_said_to_be(
    changes: dict[str, Any], understood: int
) -> None:
    event = only(stored(**changes))
    assert event.understood_blocks == understood
    assert len(event.hashes) == 2


@pytest.mark.parametrize(
    "broken",
    [
        5,
        [],
        [7, 1],
        {},
        stored(block_hashes=[]),
        stored(block_hashes=["x"]),
        stored(block_hashes=[True]),
        stored(block_hashes=[b""]),
        stored(block_size=0),
        stored(block_size=None),
        stored(token_ids=[1, -1]),
        stored(token_ids=[2**32]),
        stored(token_ids=[2**64 - 1, -1]),
        stored(token_ids=[1, [2, 3]]),
        stored(token_ids=[1.5]),
        stored(token_ids="abcd"),
        stored(extra_keys=[None]),
        stored(extra_keys=[1, 2]),
        stored(medium=4),
        stored(group_idx=-1),
        stored(parent_block_hash="p"),
        stored(cache_salt=5),
        ["BlockRemoved"],
    ],
)
def test_a_broken_event_costs_itself_only(broken: Any) -> None:
    message = decode_message(packed(broken, {"type": "BlockRemoved", "block_hashes": [1]}))
    assert message.malformed == 1
    assert message.events == (EngineRemoved((1,), 0),)


def test_kinds_of_later_versions_are_counted() -> None:
    message = decode_message(packed({"type": "BlockMoved", "x": 1}, ["BlockMoved"], stored()))
    assert (message.unknown, len(message.events)) == (2, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode([1.0, [0] * (MAX_EVENTS + 1)]),
        b"\x93\xc0\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_message(payload)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.binary(max_size=8),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "x"]),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6), max_leaves=12)
MAPS = st.fixed_dictionaries({}, optional=dict.fromkeys(stored(), VALUES)).map(
    lambda fields: {**stored(), **fields}
)


@given(st.binary(max_size=80))
@example(b"\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x91\xa1\xff")
def test_any_bytes_are_a_message_or_refused(payload: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        decode_message(payload)


@given(st.lists(st.one_of(VALUES, MAPS), max_size=4), VALUES)
def test_events_of_any_shape_never_crash(events: list[Any], rank: Any) -> None:
    message = decode_message(packed(*events, rank=rank))
    total = message.unknown + message.malformed + message.other_media + len(message.events)
    assert total == len(events)


@given(st.lists(st.one_of(VALUES, MAPS, st.just(stored())), max_size=6))
def test_rows_take_whatever_is_decoded(events: list[Any]) -> None:
    engine = EngineRows(ChainForm(NamespaceId(bytes(16)), 4))
    for event in decode_message(packed(*events)).events:
        engine.apply([event])
        engine.check_integrity()
