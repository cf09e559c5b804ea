"""A put of many batches: every byte in its block, and whatever fails, nothing half-written."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_sdk import SyncClient, put_pipeline
from emberkv_proto.errors import (
    ChecksumUnknownError,
    CorruptionError,
    DrainingError,
    EmberError,
    InvalidRequestError,
    UnavailableError,
    UnknownStageError,
)
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, checksum
from emberkv_proto.types import BlockHash, SaltId, StageState
from emberkv_proto.wire import Method
from tests.helpers.fake_daemon import FakeDaemon, Fault
from tests.unit.client_sdk.test_async_client import NAMESPACE, PART_BYTES

BATCH = 2
CHAIN = [BlockHash(bytes([i]) * 32) for i in range(1, 10)]
PARENT = BlockHash(b"p" * 32)


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_pipeline, "BATCH_BLOCKS", BATCH)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock", heartbeat_seconds=60.0) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[SyncClient]:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        yield client
        client.check_integrity()
    client.check_integrity()


@pytest.fixture
def hasty(daemon: FakeDaemon) -> Iterator[SyncClient]:
    """Gives up on an answer soon."""
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=2.0) as client:
        yield client


def content(blocks: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(blocks * PART_BYTES)


def check_read_back(client: SyncClient, chain: list[BlockHash], written: bytes) -> None:
    with client.acquire(chain) as lease:
        assert lease.usable_blocks == len(chain)
        target = bytearray(len(written))
        lease.read_into(target)
        assert target == written
        for i in range(len(chain)):
            lease.verify(i)


def check_nothing_is_held(client: SyncClient, daemon: FakeDaemon) -> None:
    client.heartbeat()  # what was told is done before it is answered
    assert not any(daemon._stages.values()), "slots stayed staged"
    client.check_integrity()


def nth(number: int, fault: Fault) -> Fault:
    """The fault at one answer only, from 1 on."""
    seen = iter(range(1, 1000))
    return lambda frame: fault(frame) if next(seen) == number else frame


def refusing_commit(daemon: FakeDaemon, number: int) -> None:
    plain, seen = daemon._commit, iter(range(1, 1000))

    def commit(request: Any) -> Any:
        if next(seen) == number:
            raise UnknownStageError("too late")
        return plain(request)

    daemon._commit = commit  # type: ignore[method-assign]


@pytest.mark.parametrize("count", range(len(CHAIN) + 1))
def test_every_block_of_any_number_comes_back(
    client: SyncClient, daemon: FakeDaemon, count: int
) -> None:
    written = content(count)
    put = client.put(CHAIN[:count], np.frombuffer(written, np.uint8))
    assert put == put_pipeline.PutResult(count, (StageState.GRANTED,) * count)
    if count:
        check_read_back(client, CHAIN[:count], written)
        check_nothing_is_held(client, daemon)


def test_the_next_stage_goes_before_a_batch_and_commits_are_not_waited_for(
    client: SyncClient, daemon: FakeDaemon
) -> None:
    client.put(CHAIN[:8], content(8))
    s, c = Method.STAGE, Method.COMMIT
    assert [m for m in daemon.seen if m in (s, c)] == [s, s, c, s, c, s, c, c]


def test_a_batch_is_copied_while_the_daemon_keeps_its_answer_to_the_last_commit(
    client: SyncClient, daemon: FakeDaemon
) -> None:
    """Were it waited for, the put would end with the session."""
    held: list[bytes] = []

    def hold(frame: bytes) -> bytes | None:
        held.append(frame)
        return None

    daemon.faults[Method.COMMIT] = nth(1, hold)
    daemon.faults[Method.STAGE] = nth(3, lambda frame: held.pop() + frame)
    assert client.put(CHAIN[:6], content(6)).committed_blocks == 6
    assert not held


def test_parents_and_salts_are_told_with_each_batch(
    client: SyncClient, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents: list[bytes] = []
    plain = daemon._stage

    def stage(request: Any, stages: list[int]) -> Any:
        parents.append(request.parent)
        return plain(request, stages)

    monkeypatch.setattr(daemon, "_stage", stage)
    client.put(CHAIN[:5], content(5), PARENT, SaltId(b"s" * 16))
    assert parents == [PARENT, CHAIN[1], CHAIN[3]]
    assert daemon.salt_ids == [b"s" * 16] * 3


def test_what_is_there_already_is_left_as_it_is(client: SyncClient) -> None:
    old, new = content(9, 1), content(9, 2)
    client.put(CHAIN[:3], old[: 3 * PART_BYTES])
    put = client.put(CHAIN, new)
    assert put.committed_blocks == 6
    assert put.states == (StageState.PRESENT,) * 3 + (StageState.GRANTED,) * 6
    check_read_back(client, CHAIN, old[: 3 * PART_BYTES] + new[3 * PART_BYTES :])
    assert client.put(CHAIN, new).committed_blocks == 0


def test_checksums_are_the_callers_or_left_to_the_daemon(client: SyncClient) -> None:
    written = content(4)
    sums = [checksum(written[i : i + PART_BYTES]) for i in range(0, len(written), PART_BYTES)]
    client.put(CHAIN[:4], written, checksums=[sums[0], sums[1] ^ 1, UNKNOWN_CHECKSUM, sums[3]])
    with client.acquire(CHAIN[:4]) as lease:
        lease.verify(0)
        with pytest.raises(CorruptionError):
            lease.verify(1)
        with pytest.raises(ChecksumUnknownError):
            lease.verify(2)
        lease.verify(3)


def test_buffers_and_checksums_that_do_not_fit_are_refused_before_anything_is_asked(
    client: SyncClient, daemon: FakeDaemon
) -> None:
    written = content(4)
    for buffer in (written[:-1], written + b"x", written[:PART_BYTES], content(5), b""):
        with pytest.raises(InvalidRequestError):
            client.put(CHAIN[:4], buffer)
    with pytest.raises(InvalidRequestError, match="3 checksums for 4 blocks"):
        client.put(CHAIN[:4], written, checksums=[1, 2, 3])
    assert not {Method.STAGE, Method.COMMIT} & set(daemon.seen)


@pytest.mark.parametrize("slots", [0, 1, 4, 5, 8])
def test_a_full_pool_takes_what_fits_and_is_not_asked_again(tmp_path: Path, slots: int) -> None:
    written = content(9)
    with (
        FakeDaemon(tmp_path / "d.sock", slots=slots + 1, heartbeat_seconds=60.0) as daemon,
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
    ):
        client.put([PARENT], content(1, 7))  # a pool has at least one slot
        put = client.put(CHAIN, written, PARENT)
        assert put.committed_blocks == slots
        assert put.states == (StageState.GRANTED,) * slots + (StageState.NO_SPACE,) * (9 - slots)
        assert daemon.seen.count(Method.STAGE) <= 2 + min(5, slots // BATCH + 2)
        if slots:
            check_read_back(client, CHAIN[:slots], written[: slots * PART_BYTES])
        check_nothing_is_held(client, daemon)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_who_may_hold_few_slots_goes_on_with_one_batch_at_a_time(
    client: SyncClient, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    plain = daemon._stage

    def stage(request: Any, stages: list[int]) -> Any:
        free, left = daemon._free, most - sum(map(len, daemon._stages.values()))
        daemon._free = free[:left]
        answer = plain(request, stages)
        daemon._free += free[left:]
        return answer

    monkeypatch.setattr(daemon, "_stage", stage)
    written = content(9)
    put = client.put(CHAIN, written)
    assert put == put_pipeline.PutResult(9, (StageState.GRANTED,) * 9)
    check_read_back(client, CHAIN, written)
    check_nothing_is_held(client, daemon)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_refused_commit_gives_its_slots_back_and_says_what_is_in(
    client: SyncClient, daemon: FakeDaemon, number: int
) -> None:
    refusing_commit(daemon, number)
    with pytest.raises(UnknownStageError, match=r"too late; (\d) of 8 blocks") as caught:
        client.put(CHAIN[:8], content(8))
    check_nothing_is_held(client, daemon)
    said = int(str(caught.value).partition("; ")[2][0])
    there = [client.probe([block]).hit_blocks for block in CHAIN[:8]]
    assert sum(there) == said
    refused = range(BATCH * (number - 1), BATCH * number)
    assert not any(there[i] for i in refused)
    assert client.is_connected


def test_a_daemon_that_takes_no_new_work_is_told_with_what_it_took(
    client: SyncClient, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = daemon._stage, iter(range(1, 100))

    def stage(request: Any, stages: list[int]) -> Any:
        if next(seen) >= 3:
            raise DrainingError("drains")
        return plain(request, stages)

    monkeypatch.setattr(daemon, "_stage", stage)
    with pytest.raises(DrainingError, match="drains; 4 of 8 blocks"):
        client.put(CHAIN[:8], content(8))
    check_nothing_is_held(client, daemon)


@pytest.mark.parametrize("method", [Method.STAGE, Method.COMMIT])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_daemon_that_falls_silent_costs_one_timeout(
    hasty: SyncClient, daemon: FakeDaemon, method: Method, number: int
) -> None:
    daemon.faults[method] = nth(number, lambda frame: None)
    with pytest.raises(UnavailableError, match="of 8 blocks are known to be committed"):
        hasty.put(CHAIN[:8], content(8))
    hasty.check_integrity()
    daemon.faults.clear()
    daemon.hang_up()


@pytest.mark.parametrize("method", [Method.STAGE, Method.COMMIT])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_daemon_that_dies_leaves_no_slot_borrowed(
    client: SyncClient, daemon: FakeDaemon, method: Method, number: int
) -> None:
    def die(frame: bytes) -> None:
        daemon.hang_up()

    client.connect()
    session = client._session()
    daemon.faults[method] = nth(number, die)
    with pytest.raises(EmberError, match="of 8 blocks are known to be committed"):
        client.put(CHAIN[:8], content(8))
    assert not session.is_alive
    client.check_integrity()


@pytest.mark.parametrize("number", [1, 4])
def test_answers_that_were_not_asked_for_end_the_session(
    client: SyncClient, daemon: FakeDaemon, number: int
) -> None:
    daemon.faults[Method.COMMIT] = nth(number, lambda frame: frame + frame)

    def put() -> None:
        client.put(CHAIN[:8], content(8))
        client.heartbeat()  # the second frame may come after the put

    client.connect()
    session = client._session()
    with pytest.raises(UnavailableError):
        put()
    assert not session.is_alive


@pytest.mark.parametrize("block", [1, 2, 5, 8])
def test_who_is_interrupted_while_copying_has_committed_whole_batches_only(
    client: SyncClient, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    written, seen = content(8), iter(range(1, 100))

    def interrupted(payload: memoryview) -> int:
        if next(seen) == block:
            raise KeyboardInterrupt
        return checksum(payload)

    monkeypatch.setattr(put_pipeline, "checksum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.put(CHAIN[:8], written)
    check_nothing_is_held(client, daemon)
    whole = (block - 1) // BATCH * BATCH
    assert client.probe(CHAIN[:8]).hit_blocks == whole
    if whole:
        check_read_back(client, CHAIN[:whole], written[: whole * PART_BYTES])
    assert client.put(CHAIN[:8], written).committed_blocks == 8 - whole


def test_threads_that_share_a_client_put_each_their_own(
    client: SyncClient, daemon: FakeDaemon
) -> None:
    chains = [[BlockHash(bytes([t, i]) * 16) for i in range(9)] for t in range(4)]
    written = [content(9, t) for t in range(4)]
    threads = [
        threading.Thread(target=client.put, args=pair) for pair in zip(chains, written, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for chain, expected in zip(chains, written, strict=True):
        check_read_back(client, chain, expected)
    check_nothing_is_held(client, daemon)
