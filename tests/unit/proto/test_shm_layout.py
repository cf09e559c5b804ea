"""Headers in the pool file: what is packed comes back, and no flipped byte passes."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import CorruptionError
from emberkv_proto.shm_layout import (
    ALIGNMENT,
    EXTENT_HEADER_BYTES,
    SLOT_HEADER_BYTES,
    STATE_OFFSET,
    ExtentHeader,
    PoolHeader,
    SlotHeader,
    SlotState,
    align_up,
    pack_slot,
    pack_slots,
    pack_state,
    slots_offset,
    slots_per_extent,
)
from emberkv_proto.types import BlockHash, NamespaceId, SaltId

POOL = PoolHeader(64 << 20, 16, 7, b"b" * 16, b"n" * 16)
EXTENT = ExtentHeader(NamespaceId(b"i" * 16), 3, 100_000, 102_400, 40, 9)
SLOT = SlotHeader(SlotState.STAGED, BlockHash(b"h" * 32), BlockHash(b"p" * 32), 1000, 2**64 - 1, 9)
SALTED = dataclasses.replace(SLOT, salt_id=SaltId(b"s" * 16))
HEADERS = [POOL, EXTENT, SLOT, SALTED]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: type(header).__name__)
def test_header_comes_back_as_it_was_packed_and_fits_its_place(header: PoolHeader) -> None:
    raw = header.pack()
    assert len(raw) <= SLOT_HEADER_BYTES
    assert type(header).unpack(raw) == header
    assert type(header).unpack(memoryview(raw + bytes(500))) == header


def test_slot_without_a_parent_comes_back_without_one() -> None:
    first = SlotHeader(SlotState.COMMITTED, BlockHash(b"h" * 32), None, 1, 0, 0)
    assert SlotHeader.unpack(first.pack()) == first


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: type(header).__name__)
def test_every_flipped_bit_outside_the_state_word_is_found(header: PoolHeader) -> None:
    raw = header.pack()
    is_slot = header in (SLOT, SALTED)
    state_word = range(STATE_OFFSET, STATE_OFFSET + 4) if is_slot else range(0)
    for i in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[i] ^= 1 << bit
            if i in state_word:
                continue
            with pytest.raises(CorruptionError):
                type(header).unpack(bytes(flipped))


def test_a_slot_header_without_a_tenant_has_the_bytes_it_had_before_there_were_tenants() -> None:
    old = struct.pack("<IIQQQII", 0x544F4C53, 0, 1000, 2**64 - 1, 9, 0, 0) + b"h" * 32 + b"p" * 32
    crc = struct.pack("<I", zlib.crc32(old))
    staged = old[:4] + struct.pack("<I", SlotState.STAGED) + old[8:] + crc
    assert SLOT.pack() == staged
    # What a tenant's block left behind it in the slot is not taken for its own.
    assert SlotHeader.unpack(staged + b"s" * 16) == SLOT


def test_a_salt_id_that_is_cut_short_is_refused() -> None:
    with pytest.raises(CorruptionError, match="salt id"):
        SlotHeader.unpack(SALTED.pack()[:-1])


def test_state_word_alone_turns_a_staged_slot_into_a_committed_one() -> None:
    raw = bytearray(SLOT.pack())
    for state in SlotState:
        raw[STATE_OFFSET : STATE_OFFSET + 4] = pack_state(state)
        assert SlotHeader.unpack(bytes(raw)).state is state
    for unknown in (3, 255, 2**31):
        raw[STATE_OFFSET : STATE_OFFSET + 4] = unknown.to_bytes(4, "little")
        with pytest.raises(CorruptionError):
            SlotHeader.unpack(bytes(raw))


@pytest.mark.parametrize("kind", [PoolHeader, ExtentHeader, SlotHeader])
@pytest.mark.parametrize("raw", [b"", bytes(8), bytes(4096), b"\xff" * 4096])
def test_short_empty_and_noisy_memory_is_no_header(kind: type[PoolHeader], raw: bytes) -> None:
    with pytest.raises(CorruptionError):
        kind.unpack(raw)


def test_headers_are_not_taken_for_each_other() -> None:
    for header in HEADERS:
        for kind in (PoolHeader, ExtentHeader, SlotHeader):
            if kind is not type(header):
                with pytest.raises(CorruptionError):
                    kind.unpack(header.pack() + bytes(4096))


@given(st.binary(min_size=SLOT_HEADER_BYTES, max_size=SLOT_HEADER_BYTES))
def test_random_bytes_are_no_slot(raw: bytes) -> None:
    with pytest.raises(CorruptionError):
        SlotHeader.unpack(raw)


@given(st.integers(16, 1 << 15).map(lambda pages: pages * ALIGNMENT), st.integers(1, 1 << 27))
def test_slots_of_an_extent_are_aligned_and_as_many_as_fit(
    extent_bytes: int, payload_bytes: int
) -> None:
    count, slot = slots_per_extent(extent_bytes, payload_bytes), align_up(payload_bytes)
    assert slot % ALIGNMENT == 0
    assert 0 <= slot - payload_bytes < ALIGNMENT
    if count:
        assert slots_offset(count) % ALIGNMENT == 0
        assert slots_offset(count) >= EXTENT_HEADER_BYTES + count * SLOT_HEADER_BYTES
        assert slots_offset(count) + count * slot <= extent_bytes
    assert slots_offset(count + 1) + (count + 1) * slot > extent_bytes


HASH = st.binary(min_size=32, max_size=32).map(BlockHash)
U64 = st.integers(0, 2**64 - 1)


@given(
    st.lists(st.tuples(HASH, st.none() | HASH, U64), min_size=1, max_size=20),
    st.sampled_from(SlotState),
    U64,
    U64,
)
def test_headers_of_neighbours_are_those_that_are_packed_one_by_one(
    blocks: list[tuple[BlockHash, BlockHash | None, int]],
    state: SlotState,
    length: int,
    generation: int,
) -> None:
    hashes, parents, checksums = map(list, zip(*blocks, strict=True))
    packed = pack_slots(state, hashes, parents, length, checksums, generation)
    assert packed == b"".join(
        pack_slot(state, block_hash, parent, length, checksum, generation).ljust(
            SLOT_HEADER_BYTES, b"\0"
        )
        for block_hash, parent, checksum in blocks
    )
