"""What two equal hashes may and may not have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import (
    UNKNOWN_CHECKSUM,
    ExtraKey,
    ExtraKeyTag,
    block_hashes,
    chain_root,
    checksum,
    index_key,
    index_keys,
    lora_key,
    multimodal_key,
    pack_tokens,
)
from emberkv_proto.types import BlockHash, NamespaceId

NS, OTHER_NS = NamespaceId(bytes(16)), NamespaceId(bytes(15) + b"\1")
TOKENS = list(range(100, 164))


def test_a_partial_block_has_no_hash() -> None:
    full = block_hashes(NS, TOKENS, 16)
    assert len(full) == 4
    assert block_hashes(NS, TOKENS[:-1], 16) == full[:3]
    assert block_hashes(NS, TOKENS[:15], 16) == []
    assert block_hashes(NS, [], 16) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(1, 20), st.binary(max_size=9))
def test_lists_and_arrays_hash_alike_and_a_chain_goes_on_from_any_block(
    tokens: list[int], block_tokens: int, salt: bytes
) -> None:
    whole = block_hashes(NS, tokens, block_tokens, salt=salt)
    for dtype in (np.uint32, np.uint64, np.int64):
        assert block_hashes(NS, np.array(tokens, dtype), block_tokens, salt=salt) == whole
    assert len(whole) == len(tokens) // block_tokens
    for cut in range(1, len(whole) + 1):
        rest = tokens[cut * block_tokens :]
        assert block_hashes(NS, rest, block_tokens, parent=whole[cut - 1]) == whole[cut:]


def test_whatever_changes_the_bytes_changes_every_hash_after_it() -> None:
    plain = block_hashes(NS, TOKENS, 16)
    variants = {
        "namespace": block_hashes(OTHER_NS, TOKENS, 16),
        "salt": block_hashes(NS, TOKENS, 16, salt=b"a"),
        "longer salt": block_hashes(NS, TOKENS, 16, salt=b"a\0"),
        "lora": block_hashes(NS, TOKENS, 16, extra_keys=[lora_key("a", "1")]),
        "lora weights": block_hashes(NS, TOKENS, 16, extra_keys=[lora_key("a", "2")]),
        "lora split": block_hashes(NS, TOKENS, 16, extra_keys=[lora_key("a1", "")]),
        "image": block_hashes(NS, TOKENS, 16, extra_keys=[multimodal_key(bytes(32), 0)]),
        "image place": block_hashes(NS, TOKENS, 16, extra_keys=[multimodal_key(bytes(32), 1)]),
        "token": block_hashes(NS, [101, *TOKENS[1:]], 16),
        "lora and salt": block_hashes(NS, TOKENS, 16, salt=b"a", extra_keys=[lora_key("a", "1")]),
    }
    everything = [block_hash for chain in [plain, *variants.values()] for block_hash in chain]
    assert len(set(everything)) == len(everything)
    changed_late = block_hashes(NS, [*TOKENS[:-1], 0], 16)
    assert changed_late[:3] == plain[:3]
    assert changed_late[3] != plain[3]


def test_extra_keys_of_one_block_change_it_and_its_children_only() -> None:
    plain = block_hashes(NS, TOKENS, 16)
    image = block_hashes(NS, TOKENS, 16, extra_keys={2: [multimodal_key(bytes(32), 0)]})
    assert image[:2] == plain[:2]
    assert not set(image[2:]) & set(plain[2:])
    assert block_hashes(NS, TOKENS, 16, extra_keys={}) == plain
    assert block_hashes(NS, TOKENS, 16, extra_keys={9: [lora_key("a", "1")]}) == plain


def test_the_order_in_which_extra_keys_are_given_does_not_matter() -> None:
    keys = [lora_key("a", "1"), multimodal_key(bytes(32), 5), ExtraKey(ExtraKeyTag.OTHER, b"x")]
    chain = block_hashes(NS, TOKENS, 16, extra_keys=keys)
    assert block_hashes(NS, TOKENS, 16, extra_keys=keys[::-1]) == chain
    assert block_hashes(NS, TOKENS, 16, extra_keys=keys[:2]) != chain


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_different_extra_keys_never_run_together(left: list[bytes], right: list[bytes]) -> None:
    def chain(values: list[bytes]) -> list[BlockHash]:
        keys = [ExtraKey(ExtraKeyTag.OTHER, value) for value in values]
        return block_hashes(NS, TOKENS[:16], 16, extra_keys=keys)

    assert (chain(left) == chain(right)) == (sorted(left) == sorted(right))


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**32], [1.5], ["a"], [[1, 2]], np.array([-1]), np.array([2**32]), np.array([1.0])],
)
def test_token_ids_out_of_range_or_of_another_kind_are_refused(tokens: object) -> None:
    with pytest.raises(InvalidRequestError):
        pack_tokens(tokens)  # type: ignore[arg-type]


def test_block_tokens_below_one_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        block_hashes(NS, TOKENS, 0)


def test_root_depends_on_salt_and_namespace_at_full_width() -> None:
    roots = [chain_root(NS), chain_root(OTHER_NS), chain_root(NS, b"s"), chain_root(NS, bytes(1))]
    assert len(set(roots)) == 4
    assert all(len(root) == 32 for root in roots)


def test_index_key_is_the_first_eight_bytes_and_never_zero() -> None:
    some = BlockHash(bytes(range(1, 33)))
    zero = BlockHash(bytes(8) + b"x" * 24)
    assert index_key(some) == int.from_bytes(some[:8], "little")
    assert index_key(zero) == 1
    assert index_keys([some, zero]).tolist() == [index_key(some), 1]
    assert index_keys([]).size == 0


def test_checksum_sees_every_byte_and_takes_any_buffer() -> None:
    payload = bytearray(range(200))
    expected = checksum(bytes(payload))
    assert checksum(payload) == checksum(memoryview(payload)) == expected
    for i in range(len(payload)):
        payload[i] ^= 1
        assert checksum(payload) != expected
        payload[i] ^= 1
    assert 0 <= checksum(b"") < 2**64


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0x2D06800538D394C2),
        (1, 0xC44BDFF4074EECDB),
        (6, 0x27B56A84CD2D7325),
        (12, 0xA713DAF0DFBB77E7),
        (24, 0xA3FE70BF9D3510EB),
        (80, 0xBCDEFBBB2C47C90A),
        (195, 0xCD94217EE362EC3A),
        (512, 0x617E49599013CB6B),
        (2048, 0xDD59E2C3A5F038E0),
        (2367, 0xCB37AEB9E5D361ED),
    ],
)
def test_the_checksum_is_xxh3_64_with_seed_0(length: int, expected: int) -> None:
    """Vectors and bytes of the xxHash project's own sanity check, one for each of its paths."""
    state, content = 2654435761, bytearray()
    for _ in range(length):
        content.append(state >> 56)
        state = state * 11400714785074694797 % 2**64
    assert checksum(content) == expected


def test_a_checksum_of_0_becomes_1_because_0_means_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda payload: 0)
    assert checksum(b"bytes that nobody has found yet") == 1 != UNKNOWN_CHECKSUM
