"""Back-off, forks, and the asyncio client on uvloop: what the clients stand on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvloop
from hypothesis import given
from hypothesis import strategies as st

from client_sdk import AsyncClient, SyncClient
from client_sdk.session import Backoff
from tests.helpers.fake_daemon import FakeDaemon
from tests.unit.client_sdk.test_async_client import HASHES, NAMESPACE, PART_BYTES, store

# libuv keeps one pipe for signals for the whole process once it was used.
uvloop.new_event_loop().close()


def test_first_attempt_is_free_and_a_failure_holds_the_next_one_back() -> None:
    backoff = Backoff(interval_seconds=0.5)
    assert backoff.wait_seconds(now=100.0) == 0
    backoff.failed(now=100.0, cost_seconds=0.0)
    assert backoff.wait_seconds(now=100.0) == 0.5
    assert backoff.wait_seconds(now=100.4) > 0
    assert backoff.wait_seconds(now=100.5) == 0
    backoff.failed(now=101.0, cost_seconds=1.0)
    assert backoff.wait_seconds(now=101.0) == 4.0
    backoff.succeeded()
    assert backoff.wait_seconds(now=101.0) == 0


@given(st.lists(st.floats(0, 5), min_size=1, max_size=30))
def test_a_hanging_daemon_takes_at_most_a_fifth_of_the_time(costs: list[float]) -> None:
    backoff, now, spent = Backoff(), 0.0, 0.0
    for cost in costs:
        now += backoff.wait_seconds(now) + cost
        spent += cost
        backoff.failed(now, cost)
    now += backoff.wait_seconds(now)
    assert spent <= now / 5 + 1e-6


def test_asyncio_client_runs_on_uvloop(tmp_path: Path) -> None:
    async def use(path: Path) -> None:
        async with AsyncClient(path, NAMESPACE) as client:
            await store(client, HASHES)
            async with await client.acquire(HASHES) as lease:
                assert bytes(lease.view(7)) == HASHES[7][:1] * PART_BYTES
            results = await asyncio.gather(*(client.probe(HASHES) for _ in range(20)))
            assert {result.hit_blocks for result in results} == {8}

    with FakeDaemon(tmp_path / "d.sock") as daemon:
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(use(daemon.socket_path))
        finally:
            loop.close()
        assert len(daemon.released) == 1


FORK = """
import os, sys, traceback
from client_sdk import SyncClient
from emberkv_proto.errors import StaleIncarnationError
from tests.unit.client_sdk.test_async_client import HASHES, NAMESPACE
with SyncClient(sys.argv[1], NAMESPACE) as client:
    lease = client.acquire(HASHES)
    child = os.fork()
    if child == 0:
        try:
            assert not client.is_connected and not lease.is_valid
            lease.release()
            assert client.probe(HASHES).hit_blocks == 1 and client.counters.reconnects == 1
            client.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    assert lease.is_valid and client.is_connected, "the parent's session is its own"
    lease.verify(0)
    lease.release()
    assert client.probe(HASHES).hit_blocks == 1 and client.counters.reconnects == 0
"""


def test_forked_child_opens_a_session_of_its_own_and_leaves_the_parents_alone(
    tmp_path: Path,
) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        with (
            SyncClient(daemon.socket_path, NAMESPACE) as client,
            client.stage(HASHES[:1]) as staged,
        ):
            staged.view(0)[:] = bytes(PART_BYTES)
            staged.commit()
        done = subprocess.run(
            [sys.executable, "-c", FORK, os.fspath(daemon.socket_path)],
            cwd=Path(__file__).parent.parent.parent.parent,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        assert len(daemon.released) == 1
