"""Identity of blocks: every field counts, and nothing malformed gets in."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace, canonical_json

LAYOUT = KvLayout(dtype="bfloat16", layers=4, kv_heads=2, head_dim=8)
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="bfloat16",
    layout_fingerprint=LAYOUT.fingerprint,
    block_tokens=64,
    groups=(Group(GroupKind.FULL, 4, 4096), Group(GroupKind.SLIDING_WINDOW, 2, 1024, 128)),
    shards=2,
)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"layers": 5},
        {"kv_heads": 4},
        {"head_dim": 4},
        {"order": "layer.token.kv.head.dim"},
        {"details": {"page": "16"}},
    ],
)
def test_each_field_of_a_layout_changes_its_fingerprint(change: dict[str, Any]) -> None:
    assert replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint


def test_every_field_of_a_layout_is_covered_above() -> None:
    assert {field.name for field in fields(KvLayout)} == {
        "dtype", "layers", "kv_heads", "head_dim", "order", "details",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights_id": "v"},
        {"kv_dtype": "float16"},
        {"layout_fingerprint": "0"},
        {"block_tokens": 32},
        {"groups": NAMESPACE.groups[:1]},
        {"groups": NAMESPACE.groups[::-1]},
        {"groups": (NAMESPACE.groups[0], replace(NAMESPACE.groups[1], window_tokens=64))},
        {"shards": 1},
        {"engine_family": "vllm"},
        {"layout_version": 2},
        {"isolation_domain": "a"},
    ],
)
def test_each_field_of_a_namespace_changes_its_id(change: dict[str, Any]) -> None:
    assert replace(NAMESPACE, **change).id != NAMESPACE.id


def test_namespace_survives_its_json_and_the_json_is_canonical() -> None:
    text = NAMESPACE.to_json()
    assert Namespace.from_json(text) == NAMESPACE
    assert Namespace.from_json(json.dumps(json.loads(text), indent=2)).id == NAMESPACE.id
    assert text.encode() == canonical_json(json.loads(text))


def test_parts_are_groups_times_shards() -> None:
    assert NAMESPACE.parts == 4
    assert [NAMESPACE.part_bytes(part) for part in range(4)] == [4096, 4096, 1024, 1024]
    for part in (-1, 4):
        with pytest.raises(InvalidRequestError):
            NAMESPACE.part_bytes(part)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"weights_id": ""},
        {"block_tokens": 0},
        {"block_tokens": 65537},
        {"block_tokens": True},
        {"block_tokens": "64"},
        {"block_tokens": 64.0},
        {"shards": 0},
        {"shards": 1025},
        {"groups": []},
        {"groups": [asdict(NAMESPACE.groups[0])] * 33},
        {"groups": None},
        {"groups": [{"kind": "full"}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "kind": "other"}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "part_bytes": 0}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "part_bytes": -4096}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "part_bytes": 2**31}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "part_bytes": 1.5}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "layers": "4"}]},
        {"groups": [{**asdict(NAMESPACE.groups[0]), "extra": 1}]},
        {"model": 7},
        {"isolation_domain": None},
        {"unknown": 1},
    ],
)
def test_json_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Namespace.from_json(json.dumps({**json.loads(NAMESPACE.to_json()), **change}))


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)][:6])
def test_json_without_a_needed_field_is_refused(name: str) -> None:
    loaded = json.loads(NAMESPACE.to_json())
    del loaded[name]
    with pytest.raises(InvalidRequestError):
        Namespace.from_json(json.dumps(loaded))


@pytest.mark.parametrize("text", ["", "null", "[]", "1", '"a"', "{}", "{", "NaN", " " * 70000])
def test_text_that_is_no_namespace_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Namespace.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from([field.name for field in fields(Namespace)]), json_values)
def test_any_value_in_any_field_gives_a_namespace_or_a_clear_refusal(
    name: str, value: object
) -> None:
    text = json.dumps({**json.loads(NAMESPACE.to_json()), name: value})
    try:
        namespace = Namespace.from_json(text)
    except InvalidRequestError:
        return
    assert Namespace.from_json(namespace.to_json()) == namespace


@given(st.text(max_size=60) | json_values.map(lambda value: json.dumps(value)))
def test_noise_is_refused_clearly(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Namespace.from_json(text)


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Namespace.from_json("[" * 50000)


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL])
def test_a_windowed_group_has_a_window(kind: GroupKind) -> None:
    with pytest.raises(InvalidRequestError, match="window_tokens"):
        replace(NAMESPACE, groups=(Group(kind, 1, 4096),))
