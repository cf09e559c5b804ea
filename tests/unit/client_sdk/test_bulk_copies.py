"""Many blocks between a buffer and the pool at once, byte for byte as one by one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_sdk import SyncClient, attached_pool
from client_sdk.attached_pool import AttachedPool, PartPlace, PartPlaces
from emberkv_proto.errors import InvalidRequestError, UnknownLeaseError, UnknownStageError
from emberkv_proto.types import StageState
from tests.helpers.fake_daemon import FakeDaemon
from tests.unit.client_sdk.test_async_client import HASHES, NAMESPACE, PART_BYTES

PAGE = 4096


def fresh_pool() -> AttachedPool:
    descriptor = os.memfd_create("bulk")
    try:
        os.truncate(descriptor, 64 * PAGE)
        return AttachedPool(descriptor, 64 * PAGE, PAGE)
    finally:
        os.close(descriptor)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[SyncClient]:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        yield client


def content(blocks: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(blocks * PART_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_any_places_are_written_and_read_like_one_by_one(seed: int) -> None:
    pool = fresh_pool()
    chance = random.Random(seed)
    count = chance.randrange(1, 20)
    first = chance.randrange(0, 20)
    numbers: Sequence[int] = sorted(chance.sample(range(24), count))
    slots = range(first, first + count) if seed % 2 else chance.sample(range(64), count)
    if seed % 4 == 1:
        numbers = range(seed % 3, seed % 3 + count)
    places = PartPlaces(numbers, [slot * PAGE for slot in slots])
    source = np.frombuffer(chance.randbytes(24 * PAGE), np.uint8)
    pool.write_places(places, source)
    expected = np.zeros(64 * PAGE, np.uint8)
    target, wanted = np.zeros_like(source), np.zeros_like(source)
    for number, offset in zip(places.numbers, places.offsets, strict=True):
        part = source[number * PAGE : (number + 1) * PAGE]
        expected[offset : offset + PAGE] = part
        wanted[number * PAGE : (number + 1) * PAGE] = part
    for slot in range(64):
        assert pool.readable(slot * PAGE) == expected[slot * PAGE : (slot + 1) * PAGE].data
    pool.read_places(places, target)
    assert np.array_equal(target, wanted)
    parts = [*map(PartPlace, places.numbers, places.offsets)]
    pool.write_parts(parts, np.zeros_like(source))
    pool.read_parts(parts, target)
    assert not target.any()


def test_neighbours_on_both_sides_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = fresh_pool()
    lengths: list[int] = []
    plain = np.copyto

    def counted(target: Any, source: Any) -> None:
        lengths.append(len(source) // PAGE)
        plain(target, source)

    monkeypatch.setattr(attached_pool.np, "copyto", counted)
    slots = [5, 6, 7, 20, 21, 9]
    places = PartPlaces(range(len(slots)), [slot * PAGE for slot in slots])
    pool.read_places(places, np.zeros(len(slots) * PAGE, np.uint8))
    assert lengths == [3, 2, 1]


@pytest.mark.parametrize("numbers", [range(3), range(5), range(0)], ids=str)
def test_places_without_a_number_and_numbers_without_a_place_are_refused(numbers: range) -> None:
    places = PartPlaces(numbers, [slot * PAGE for slot in range(4)])
    with pytest.raises(ValueError, match="zip"):
        fresh_pool().read_places(places, np.zeros(5 * PAGE, np.uint8))


def test_numbers_with_gaps_are_no_single_run() -> None:
    pool = fresh_pool()
    source = np.frombuffer(random.Random(1).randbytes(4 * PAGE), np.uint8)
    pool.write_places(PartPlaces(range(0, 4, 2), [0, PAGE]), source)
    assert pool.readable(0) == source[:PAGE].data
    assert pool.readable(PAGE) == source[2 * PAGE : 3 * PAGE].data


def test_blocks_go_in_and_come_out_through_one_buffer(client: SyncClient) -> None:
    written = content(len(HASHES))
    with client.stage(HASHES) as staged:
        staged.write_from(written)
        staged.commit()
    with client.acquire(HASHES) as lease:
        target = np.zeros(len(HASHES) * PART_BYTES, np.uint8)
        lease.read_into(target)
        assert target.tobytes() == written
        middle = bytearray(2 * PART_BYTES)
        lease.read_into(middle, first_block=3)
        assert middle == written[3 * PART_BYTES : 5 * PART_BYTES]
        lease.read_into(bytearray())


def test_blocks_that_were_not_granted_are_passed_over(client: SyncClient) -> None:
    old, new = content(len(HASHES), 1), content(len(HASHES), 2)
    with client.stage(HASHES[:2]) as staged:
        staged.write_from(old[: 2 * PART_BYTES])
        staged.commit()
    with client.stage(HASHES) as staged:
        assert staged.states[:3] == [StageState.PRESENT] * 2 + [StageState.GRANTED]
        staged.write_from(new)
        staged.commit()
    with client.acquire(HASHES) as lease:
        target = bytearray(len(HASHES) * PART_BYTES)
        lease.read_into(target)
    assert target == old[: 2 * PART_BYTES] + new[2 * PART_BYTES :]


def test_what_does_not_fit_is_refused_before_a_byte_moves(client: SyncClient) -> None:
    written = content(len(HASHES))
    with client.stage(HASHES) as staged:
        for buffer, first in ((written + b"x", 0), (written, 1), (written[:PART_BYTES], -1)):
            with pytest.raises(InvalidRequestError):
                staged.write_from(buffer, first)
        with pytest.raises(InvalidRequestError, match="contiguous"):
            staged.write_from(np.zeros((PART_BYTES, 2), np.uint8)[:, 0])
        staged.write_from(written)
        staged.commit()
    with pytest.raises(UnknownStageError):
        staged.write_from(written)
    with client.acquire(HASHES) as lease:
        with pytest.raises(InvalidRequestError, match="read-only"):
            lease.read_into(bytes(PART_BYTES))
        with pytest.raises(InvalidRequestError):
            lease.read_into(bytearray(2 * PART_BYTES), first_block=len(HASHES) - 1)
        with pytest.raises(InvalidRequestError):
            lease.read_into(bytearray(PART_BYTES), first_block=-1)
    with pytest.raises(UnknownLeaseError):
        lease.read_into(bytearray(PART_BYTES))
