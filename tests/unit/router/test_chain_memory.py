"""Keys made from where a prompt leaves those before it are the keys of the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv_proto.chains import chain_hashes
from emberkv_proto.hashing import index_key, index_keys
from emberkv_proto.types import HashScheme, NamespaceId
from router.chains import STRETCH_BLOCKS, ChainKind, ChainMemory

KINDS = [
    ChainKind(NamespaceId(b"a" * 16), 2),
    ChainKind(NamespaceId(b"a" * 16), 3),
    ChainKind(NamespaceId(b"b" * 16), 2, HashScheme.SGLANG),
    ChainKind(NamespaceId(b"b" * 16), 2, HashScheme.UNKNOWN),
]


def plain(kind: ChainKind, ids: np.ndarray, salt: bytes) -> list[int]:
    hashes = chain_hashes(kind.scheme, kind.namespace_id, ids, kind.block_tokens, salt=salt)
    return index_keys(hashes).tolist() if hashes else []


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 300), st.sampled_from(KINDS), st.sampled_from("xy")
        ),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_keys_are_those_of_the_whole_prompt(prompts, stretches: int) -> None:  # type: ignore[no-untyped-def]
    memory = ChainMemory(stretches * STRETCH_BLOCKS)
    for branch, length, kind, salt in prompts:
        ids = np.arange(length, dtype=np.uint32)
        ids[100:] += 1000 * branch
        found = memory.keys(kind, ids, salt.encode())
        assert [index_key(block) for block in found.hashes] == found.numbers
        assert found.numbers == found.array.tolist() == plain(kind, ids, salt.encode())
        memory.check_integrity()


def test_only_what_is_new_of_a_growing_prompt_is_hashed() -> None:
    memory, kind = ChainMemory(1000), KINDS[0]
    ids = np.arange(10_000, dtype=np.uint32)[: 2 * STRETCH_BLOCKS * 5]
    assert memory.begin(kind, ids, b"").known_blocks == 0
    memory.keys(kind, ids, b"")
    grown = np.concatenate([ids, np.full(20, 7, np.uint32)])
    beginning = memory.begin(kind, grown, b"")
    assert beginning.known_blocks == 5 * STRETCH_BLOCKS
    assert beginning.missing_blocks == 10
    assert memory.begin(kind, grown, b"other salt").known_blocks == 0
