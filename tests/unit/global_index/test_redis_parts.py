"""The pure parts of the index in Redis: leading runs, queued changes, records."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.events import Keys
from emberkv_proto.types import (
    EngineInfo,
    HashScheme,
    Incarnation,
    NamespaceId,
    NodeId,
    Seq,
    Tier,
    TierDigest,
)
from global_index.dict_index import DictIndex
from global_index.index import Holder
from global_index.ingest import Counts, Exactness
from global_index.membership import Liveness
from global_index.naive_index import NaiveIndex
from global_index.redis_mirror import MirroredIndex
from global_index.redis_record import NodeRecord, fixed_part, record_from_json, record_to_json
from global_index.redis_registry import alive_numbers, parse_registry
from global_index.redis_walk import ChainWalk, decode
from global_index.views import NodeView

A, B = Holder(3), Holder(8191)
ENGINE = EngineInfo("e1", "http://127.0.0.1:8000", "m", NamespaceId(b"n" * 16), 64)
VIEW = NodeView(
    node_id=NodeId("n1"),
    incarnation=Incarnation(2),
    seq=Seq(57),
    liveness=Liveness.OK,
    exactness=Exactness.EXACT,
    reported_state="serving",
    grpc_address="127.0.0.1:7300",
    tiers=(TierDigest(Tier.DRAM, 5, 2**64 - 1, 1 << 40, 7),),
    engines=(ENGINE,),
    lag_seconds=0.0,
    counts=Counts(),
    anomalies=0,
    dropped=0,
)
RECORD = NodeRecord(A, "w1", "127.0.0.1:7300", VIEW, 12.5)


def chain(start: int, stop: int) -> Keys:
    return np.arange(start, stop, dtype=np.uint64)


def value_of(index: NaiveIndex, key: int) -> bytes | None:
    words = [
        holding.holder << 3 | sum(1 << (tier - 1) for tier in holding.tiers)
        for holding in index.holdings(key)  # type: ignore[arg-type]
    ]
    return np.array(words, ">u2").tobytes() if words else None


ROWS = st.lists(
    st.tuples(
        st.sampled_from([Holder(0), A, Holder(64), B]),
        st.sampled_from(list(Tier)),
        st.integers(1, 30),
        st.integers(1, 30),
    ),
    max_size=12,
)


@given(stored=ROWS, removed=ROWS, cuts=st.sets(st.integers(1, 39), max_size=4))
def test_runs_over_any_windows_equal_the_oracle(
    stored: list[tuple[Holder, Tier, int, int]],
    removed: list[tuple[Holder, Tier, int, int]],
    cuts: set[int],
) -> None:
    oracle = NaiveIndex(1000)
    for holder, tier, first, count in stored:
        oracle.apply_stored(holder, tier, chain(first, first + count))
    for holder, tier, first, count in removed:
        oracle.apply_removed(holder, tier, chain(first, first + count // 4))
    values = [value_of(oracle, key) for key in range(1, 41)]
    walk = ChainWalk()
    bounds = [0, *sorted(cuts), 40]
    for first, last in pairwise(bounds):
        walk.add(decode(values[first:last]))
        if walk.is_over:
            break
    by_holder = sorted(walk.hits(), key=lambda hit: hit.holder)
    assert by_holder == sorted(oracle.query(chain(1, 41)), key=lambda hit: hit.holder)


def test_numbers_that_are_not_alive_are_walked_no_further() -> None:
    words = np.array([A << 3 | 2, B << 3 | 2], ">u2").tobytes()
    walk = ChainWalk()
    walk.add(decode([words] * 3))
    walk.keep(np.array([B]))
    walk.add(decode([words] * 2))
    assert [(hit.holder, hit.hit_blocks) for hit in walk.hits()] == [(B, 5)]


def test_changes_of_watched_holders_are_taken_in_order_and_once() -> None:
    index = MirroredIndex(DictIndex(1000), 100)
    index.apply_stored(A, Tier.DRAM, chain(1, 11))  # nobody watches yet
    index.watch(A)
    index.apply_stored(A, Tier.SSD, chain(1, 4))
    index.apply_stored(B, Tier.SSD, chain(1, 9))
    index.apply_removed(A, Tier.DRAM, chain(1, 2))
    index.clear_tier(A, Tier.DRAM)
    assert index.queued_rows == 3 + 1 + 9
    taken = [(c.tier, sorted(c.keys.tolist()), c.stores) for c in index.take(A)]
    assert taken == [
        (Tier.SSD, [1, 2, 3], True),
        (Tier.DRAM, [1], False),
        (Tier.DRAM, [*range(2, 11)], False),
    ]
    assert index.take(A) == []
    assert index.is_complete(A)
    index.check_integrity()
    index.remove_holder(A)
    assert not index.is_complete(A)
    assert index.queued_rows == 0


def test_queue_over_its_bound_is_dropped_for_that_holder_alone() -> None:
    index = MirroredIndex(DictIndex(1000), 20)
    index.watch(A)
    index.watch(B)
    index.apply_stored(B, Tier.DRAM, chain(1, 16))
    index.apply_stored(A, Tier.DRAM, chain(1, 7))
    assert not index.is_complete(A)
    assert index.is_complete(B)
    assert (index.overflows, index.queued_rows) == (1, 15)
    index.apply_stored(A, Tier.DRAM, chain(7, 8))
    index.check_integrity()
    index.watch(A)
    index.apply_stored(A, Tier.DRAM, chain(8, 9))
    assert index.is_complete(A)
    index.check_integrity()


def test_record_comes_back_as_it_was() -> None:
    assert record_from_json(record_to_json(RECORD).encode()) == RECORD
    engines = (replace(ENGINE, hash_scheme=HashScheme.SGLANG),)
    other = replace(RECORD, view=replace(VIEW, engines=engines))
    assert record_from_json(record_to_json(other).encode()) == other


def test_only_what_readers_keep_counts_as_news() -> None:
    later = replace(RECORD, view=replace(VIEW, seq=Seq(58)), written_unix_seconds=13.0)
    assert fixed_part(later) == fixed_part(RECORD)
    for view in (
        replace(VIEW, liveness=Liveness.SUSPECT),
        replace(VIEW, engines=()),
        replace(VIEW, grpc_address="x:1"),
    ):
        assert fixed_part(replace(RECORD, view=view)) != fixed_part(RECORD)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 8192),
        ("number", -1),
        ("number", True),
        ("node", ""),
        ("node", "x" * 300),
        ("liveness", "fine"),
        ("tiers", [[9, 0, 0, 0, 0]]),
        ("tiers", 7),
        ("engines", [["e"]]),
        ("writer", None),
        ("seq", 1 << 64),
        ("written", "now"),
    ],
)
def test_record_of_a_wrong_form_is_refused(name: str, value: object) -> None:
    raw = json.loads(record_to_json(RECORD))
    with pytest.raises(ValueError, match=r"."):
        record_from_json(json.dumps({**raw, name: value}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"{", b"\xff", b"[" * 100_000])
def test_record_that_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        record_from_json(text)


def test_registry_leaves_out_what_is_malformed_or_claims_anothers_number() -> None:
    good = record_to_json(RECORD).encode()
    other = record_to_json(replace(RECORD, view=replace(VIEW, node_id=NodeId("n2")))).encode()
    registry = parse_registry(b"v", {b"n1": good, b"n2": other, b"n3": b"{}", b"n4": good})
    assert list(registry.records) == ["n1"]
    assert registry.malformed == 3


def test_a_number_is_alive_only_by_the_word_of_its_own_writer() -> None:
    registry = parse_registry(b"v", {b"n1": record_to_json(RECORD).encode()})
    words = np.array([A, 9], ">u2").tobytes()
    assert alive_numbers(registry, ("w1",), [words]) == {A}
    assert alive_numbers(registry, ("w2",), [words]) == frozenset()
    assert alive_numbers(registry, ("w1",), [None]) == frozenset()
    assert alive_numbers(registry, ("w1",), [b"\x00"]) == frozenset()
