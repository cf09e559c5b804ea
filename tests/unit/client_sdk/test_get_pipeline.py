"""A get of many batches: every byte of the longest prefix, and no lease that stays."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_sdk import SyncClient, get_pipeline
from client_sdk.get_pipeline import GetPipeline
from emberkv_proto.errors import EmberError, InvalidRequestError, UnavailableError
from emberkv_proto.types import AcquirePolicy, BlockHash
from emberkv_proto.v1 import common_pb2
from emberkv_proto.wire import HEADER, Method, pack_frame, unpack_header
from tests.helpers.fake_daemon import FakeDaemon, Fault
from tests.unit.client_sdk.test_async_client import NAMESPACE, PART_BYTES

CHAIN = [BlockHash(bytes([i]) * 32) for i in range(1, 10)]


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_pipeline, "BATCH_BLOCKS", 2)


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
def written(client: SyncClient) -> bytes:
    content = random.Random(3).randbytes(len(CHAIN) * PART_BYTES)
    client.put(CHAIN, content)
    return content


def check_nothing_is_held(client: SyncClient, daemon: FakeDaemon) -> None:
    client.heartbeat()  # what was told is done before it is answered
    assert not daemon._leases, "a lease stayed"
    client.check_integrity()


def nth(number: int, fault: Fault) -> Fault:
    seen = iter(range(1, 1000))
    return lambda frame: fault(frame) if next(seen) == number else frame


@pytest.mark.parametrize("blocks", range(len(CHAIN) + 1))
def test_every_block_of_any_number_comes_into_its_place(
    client: SyncClient, daemon: FakeDaemon, written: bytes, blocks: int
) -> None:
    target = bytearray(blocks * PART_BYTES)
    assert client.get(CHAIN[:blocks], target) == blocks
    assert target == written[: blocks * PART_BYTES]
    check_nothing_is_held(client, daemon)


@pytest.mark.parametrize("hole", range(len(CHAIN)))
def test_it_ends_at_the_first_block_that_is_not_there(
    client: SyncClient, daemon: FakeDaemon, written: bytes, hole: int
) -> None:
    chain = list(CHAIN)
    chain[hole] = BlockHash(b"?" * 32)
    target = bytearray(len(written))
    assert client.get(chain, target) == hole
    assert target[: hole * PART_BYTES] == written[: hole * PART_BYTES]
    assert not any(target[hole * PART_BYTES :]), "something was written behind the hit"
    check_nothing_is_held(client, daemon)


def test_blocks_on_their_way_are_waited_for(
    client: SyncClient, daemon: FakeDaemon, written: bytes
) -> None:
    daemon.ready_at_once = 1
    target = bytearray(len(written))
    assert client.get(CHAIN, target) == len(CHAIN)
    assert target == written
    daemon.ready_at_once = 0
    daemon.brings = 0
    assert client.get(CHAIN, target, deadline_seconds=0.1) == 0
    check_nothing_is_held(client, daemon)


def test_buffers_that_do_not_fit_are_refused_before_anything_is_asked(
    client: SyncClient, daemon: FakeDaemon, written: bytes
) -> None:
    for buffer in (bytearray(PART_BYTES), bytes(2 * PART_BYTES), bytearray(3 * PART_BYTES + 1)):
        with pytest.raises(InvalidRequestError):
            client.get(CHAIN[:2], buffer)
    with pytest.raises(InvalidRequestError, match="seconds"):
        client.get(CHAIN[:1], bytearray(PART_BYTES), deadline_seconds=-1)
    check_nothing_is_held(client, daemon)


def test_a_hit_that_needs_a_window_only_is_refused(
    client: SyncClient, daemon: FakeDaemon, written: bytes
) -> None:
    daemon.needed_from = 1
    with pytest.raises(InvalidRequestError, match="from 1 on only; acquire"):
        client.get(CHAIN[:4], bytearray(4 * PART_BYTES))
    check_nothing_is_held(client, daemon)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_daemon_that_dies_is_an_error_and_leaves_nothing(
    client: SyncClient, daemon: FakeDaemon, written: bytes, number: int
) -> None:
    def die(frame: bytes) -> None:
        daemon.hang_up()

    session = client._session()
    daemon.faults[Method.ACQUIRE] = nth(number, die)
    with pytest.raises(EmberError):
        client.get(CHAIN, bytearray(len(written)))
    assert not session.is_alive
    client.check_integrity()


@pytest.mark.parametrize("number", [1, 3])
def test_a_daemon_that_falls_silent_costs_one_timeout(
    daemon: FakeDaemon, written: bytes, number: int
) -> None:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=2.0) as hasty:
        daemon.faults[Method.ACQUIRE] = nth(number, lambda frame: None)
        with pytest.raises(UnavailableError):
            hasty.get(CHAIN, bytearray(len(written)))
        hasty.check_integrity()
        daemon.faults.clear()
        daemon.hang_up()


def test_who_is_interrupted_while_copying_gives_everything_back(
    client: SyncClient, daemon: FakeDaemon, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(GetPipeline, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.get(CHAIN, bytearray(len(written)))
    check_nothing_is_held(client, daemon)


def test_trouble_with_a_batch_that_is_not_needed_any_more_costs_nothing(
    client: SyncClient, daemon: FakeDaemon, written: bytes
) -> None:
    """The first batch ends the hit; the second one was asked for all the same."""
    detail = common_pb2.ErrorDetail(code=1, type="PoolFullError", message="all is leased")

    def refuse(frame: bytes) -> bytes:
        request_id = unpack_header(memoryview(frame)[: HEADER.size]).request_id
        return pack_frame(Method.ACQUIRE, request_id, detail.SerializeToString(), 1)

    daemon.faults[Method.ACQUIRE] = nth(2, refuse)
    target = bytearray(4 * PART_BYTES)
    assert client.get([CHAIN[0], BlockHash(b"?" * 32), *CHAIN[2:4]], target) == 1
    assert target[:PART_BYTES] == written[:PART_BYTES]
    assert client.is_connected


def test_a_get_holds_nothing_when_it_has_ended(client: SyncClient, written: bytes) -> None:
    pipeline = GetPipeline(
        client._connection,
        PART_BYTES,
        CHAIN,
        bytearray(len(written)),
        AcquirePolicy.BEST_EFFORT,
        1.0,
    )
    assert pipeline.run() == len(CHAIN)
    pipeline.check_integrity()


def test_threads_that_share_a_client_get_each_their_own(
    client: SyncClient, daemon: FakeDaemon, written: bytes
) -> None:
    targets = [bytearray(len(written)) for _ in range(4)]
    threads = [threading.Thread(target=client.get, args=(CHAIN, target)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(target == written for target in targets)
    check_nothing_is_held(client, daemon)
