"""The asyncio client: what differs from the blocking one, and that the rest does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from client_sdk import AsyncClient
from emberkv_proto.errors import (
    AccessDeniedError,
    InvalidRequestError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLeaseError,
)
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, SaltId, Source, StageState
from emberkv_proto.wire import HEADER, Method
from tests.helpers.fake_daemon import FakeDaemon
from tests.helpers.waiting import until

PART_BYTES = 1000
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="float32",
    layout_fingerprint="f",
    block_tokens=16,
    groups=(Group(GroupKind.FULL, 2, PART_BYTES),),
)
HASHES = [BlockHash(bytes([i]) * 32) for i in range(1, 9)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        yield client
        client.check_integrity()
    client.check_integrity()


async def store(client: AsyncClient, hashes: list[BlockHash]) -> None:
    async with await client.stage(hashes) as staged:
        for i in staged.granted:
            staged.view(i)[:] = hashes[i][:1] * PART_BYTES
        await staged.commit()
        staged.check_integrity()


async def test_committed_blocks_are_leased_and_read_back(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    await store(client, HASHES)
    daemon.ready_at_once = 3
    async with await client.acquire(HASHES) as lease:
        assert await lease.wait(99, 1.0) == 8
        assert lease.sources[2:4] == [Source.DRAM, Source.SSD]
        for i, block_hash in enumerate(HASHES):
            assert bytes(lease.view(i)) == block_hash[:1] * PART_BYTES
            lease.verify(i)
    assert len(daemon.released) == 1
    with pytest.raises(UnknownLeaseError):
        await lease.release()


async def test_calls_run_at_once_on_one_session(daemon: FakeDaemon, client: AsyncClient) -> None:
    await store(client, HASHES[:4])
    results = await asyncio.gather(*(client.probe(HASHES) for _ in range(50)))
    assert {result.hit_blocks for result in results} == {4}
    assert daemon.seen.count(Method.HELLO) == 1


async def test_leaving_a_stage_without_commit_aborts_it(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    async with await client.stage(HASHES) as staged:
        assert staged.states == [StageState.GRANTED] * 8
        await staged.commit([0])
    assert len(daemon.aborted) == 1
    assert (await client.probe(HASHES)).hit_blocks == 1


async def test_a_stage_says_whose_quota_its_blocks_count_against(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    async with await client.stage(HASHES[:1], salt_id=SaltId(b"t" * 16)):
        pass
    assert daemon.salt_ids == [b"t" * 16]


async def test_cancelled_calls_leave_nothing_granted(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    await store(client, HASHES[:4])

    may_come = threading.Event()

    def late(frame: bytes) -> bytes:
        assert may_come.wait(60)
        return frame

    daemon.faults = {Method.ACQUIRE: late, Method.STAGE: late, Method.PREFETCH: late}
    calls = (client.acquire(HASHES), client.stage(HASHES), client.prefetch(HASHES, 1.0))
    for call in calls:
        may_come.clear()
        seen = len(daemon.seen)
        task = asyncio.ensure_future(call)
        await until(lambda seen=seen: len(daemon.seen) > seen)  # type: ignore[misc]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_come.set()
    await client.heartbeat()  # answers come in order: the late ones are in,
    await client.heartbeat()  # and what was given back for them has been served
    assert (len(daemon.released), len(daemon.aborted)) == (1, 1)
    assert daemon.cancelled == daemon.prefetches
    assert len(daemon.cancelled) == 1
    assert client.is_connected, "a cancelled call costs no session"
    assert (await client.probe(HASHES)).hit_blocks == 4


async def test_lost_session_fails_all_calls_in_flight_and_the_next_reconnects(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    await store(client, HASHES)
    lease = await client.acquire(HASHES)
    daemon.incarnation = 2

    def hang_up_at_the_fifth(frame: bytes) -> None:
        if daemon.seen.count(Method.PROBE) == 5:
            daemon.faults.clear()
            daemon.hang_up()

    daemon.faults[Method.PROBE] = hang_up_at_the_fifth
    results = await asyncio.gather(
        *(client.probe(HASHES) for _ in range(5)), return_exceptions=True
    )
    assert all(isinstance(result, UnavailableError) for result in results), results
    assert (await client.probe(HASHES)).hit_blocks == 8
    assert (client.incarnation, client.node_id, client.counters.reconnects) == (2, "fake", 1)
    with pytest.raises(StaleIncarnationError):
        lease.view(0)
    await lease.release()
    assert not daemon.released


async def test_silent_daemon_costs_the_timeout(daemon: FakeDaemon) -> None:
    async with AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        await client.connect()
        client._timeout_seconds = 0.5  # only now: the handshake has all the time it needs
        daemon.faults[Method.PROBE] = lambda frame: None
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="did not answer PROBE"):
            await client.probe(HASHES)
        assert 0.4 < time.monotonic() - began < 20.0
        assert not client.is_connected


async def test_absent_and_silent_daemons_are_named_and_held_back(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    async with AsyncClient(tmp_path / "none", NAMESPACE, timeout_seconds=0.3) as client:
        with pytest.raises(UnavailableError, match="start the store daemon"):
            await client.connect()
        said = []
        for _ in range(20):
            with pytest.raises(UnavailableError) as caught:
                await client.probe(HASHES)
            said.append(str(caught.value))
        assert any("next attempt in" in words for words in said)
    daemon.faults[Method.HELLO] = lambda frame: None
    async with AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=0.3) as client:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="did not answer within"):
            await client.connect()
        assert time.monotonic() - began < 20.0
    with pytest.raises(UnavailableError, match="closed"):
        await client.probe(HASHES)
    with pytest.raises(InvalidRequestError):
        AsyncClient(tmp_path / ("x" * 120), NAMESPACE)


async def test_a_client_closed_in_mid_write_keeps_its_slots_until_the_write_is_left(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    writer = AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0)
    staged = await writer.stage(HASHES)
    session = staged._session
    await writer.close()
    assert not staged.is_valid
    async with await client.stage(HASHES) as held:
        assert set(held.states) == {StageState.IN_PROGRESS}
    await staged.abort()
    await until(lambda: session._sock.fileno() == -1)


async def test_refused_handshake_is_loud_in_connect(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    daemon.refuse[Method.HELLO] = AccessDeniedError("uid 7 is not allowed")
    with pytest.raises(AccessDeniedError, match="uid 7"):
        await client.connect()


@pytest.mark.parametrize(
    "fault",
    [
        lambda frame: b"\xff" * 64,
        lambda frame: HEADER.pack(0, Method.STAGE, 0, 1),
        lambda frame: HEADER.pack(3, *HEADER.unpack(frame[:12])[1:]) + b"\xff\xff\xff",
    ],
    ids=["noise", "other method", "no message"],
)
async def test_malformed_answer_ends_the_session_and_nothing_else(
    daemon: FakeDaemon, client: AsyncClient, fault: object
) -> None:
    await client.connect()
    daemon.faults[Method.PROBE] = fault  # type: ignore[assignment]
    with pytest.raises(UnavailableError):
        await client.probe(HASHES)
    assert not client.is_connected
    daemon.faults.clear()
    assert (await client.probe(HASHES)).hit_blocks == 0


async def test_heartbeats_keep_a_lease_alive(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.lease_seconds = 3.0
    await store(client, HASHES)
    async with await client.acquire(HASHES) as lease:
        await asyncio.sleep(3.5)
        assert lease.is_valid
    prefetch = await client.start_prefetch(HASHES, 1.0)
    await prefetch.cancel()
    await prefetch.cancel()
    assert daemon.cancelled == daemon.prefetches != []
    assert (await client.prefetch(HASHES, 1.0), (await client.status()).state) == (8, "serving")
