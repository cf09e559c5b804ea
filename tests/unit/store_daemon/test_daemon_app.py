"""The whole daemon in this process: what it serves, and that it stops in order."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from client_sdk.aio import timeout
from client_sdk.async_client import AsyncClient
from client_sdk.cli.remote import daemon_status
from client_sdk.index_client import IndexClient
from emberkv_proto.errors import PreflightError, UnavailableError
from emberkv_proto.types import NodeHit
from store_daemon.app import ENDPOINTS_FILE, Daemon
from store_daemon.config import DaemonSettings
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.ssd import SsdTier
from tests.helpers.ports import free_port
from tests.helpers.store import chain, payload, small_namespace

NAMESPACE = small_namespace()


def settings_in(directory: Path, **daemon: object) -> DaemonSettings:
    return DaemonSettings.model_validate(
        {
            "node": {"id": "node-1"},
            "daemon": {
                "socket_path": directory / "s",
                "data_dir": directory / "data",
                "grpc_port": 0,
                "metrics_port": 0,
                "drain_seconds": 3.0,
                **daemon,
            },
            "dram": {
                "path": directory / "pool",
                "capacity_bytes": 1 << 20,
                "extent_bytes": 1 << 16,
            },
            "ssd": {
                "path": directory / "ssd",
                "capacity_bytes": 1 << 20,
                "segment_bytes": 1 << 16,
                "direct_io": False,
            },
        }
    )


@asynccontextmanager
async def running(settings: DaemonSettings) -> AsyncIterator[Daemon]:
    daemon = Daemon(settings)
    task = asyncio.ensure_future(daemon.run())
    serving = asyncio.ensure_future(daemon.is_serving.wait())
    await asyncio.wait({task, serving}, timeout=90, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    if task.done():
        task.result()
    try:
        yield daemon
    finally:
        daemon.stop()
        async with timeout(30):
            await task


async def http(address: str, path: str) -> tuple[str, str]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 30)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def test_blocks_outlive_the_daemon_and_its_numbers_add_up(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    hashes = chain(NAMESPACE, 10)
    async with running(settings) as daemon:
        client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        staged = await client.stage(hashes)
        for number in staged.granted:
            staged.view(number)[:] = payload(hashes[number], 0, 5000)
        assert await staged.commit() == 10
        assert (await client.probe(hashes)).hit_blocks == 10
        await client.close()
        endpoints = json.loads((tmp_path / "data" / ENDPOINTS_FILE).read_text())
        assert daemon.endpoints is not None
        assert endpoints["metrics_address"] == daemon.endpoints.metrics_address
        status, text = await http(endpoints["metrics_address"], "/metrics")
        assert status.endswith("200 OK")
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["emberkv_store_blocks", "dram"] == 10
        assert values["emberkv_store_staged_blocks_total", "granted"] == 10
        assert values["emberkv_store_unconserved_blocks", "dram"] == 0
        assert (await http(endpoints["metrics_address"], "/ready"))[0].endswith("200 OK")
        assert (await http(endpoints["metrics_address"], "/no"))[0].endswith("404 Not Found")
        assert daemon.store is not None
        daemon.store.check_integrity()
    assert not (tmp_path / "data" / ENDPOINTS_FILE).exists()
    assert not (tmp_path / "s").exists()
    async with running(settings) as daemon:
        client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        lease = await client.acquire(hashes, deadline_seconds=60.0)
        await lease.wait(10, 5.0)
        assert lease.ready_blocks == 10
        assert all(bytes(lease.view(n)) == payload(hashes[n], 0, 5000) for n in range(10))
        await lease.release()
        await client.close()
        assert daemon.endpoints is not None
        assert daemon.endpoints.incarnation > endpoints["incarnation"]


async def test_a_second_daemon_on_the_same_files_is_refused(tmp_path: Path) -> None:
    async with running(settings_in(tmp_path)):
        with pytest.raises(PreflightError, match="listens on"):
            await Daemon(settings_in(tmp_path)).run()
        with pytest.raises(PreflightError, match=r"daemon\.data_dir|in use by"):
            await Daemon(settings_in(tmp_path, socket_path=tmp_path / "other")).run()


async def test_a_dead_index_costs_a_miss_and_no_more(tmp_path: Path) -> None:
    hashes = chain(NAMESPACE, 6)
    async with running(settings_in(tmp_path, index_address="127.0.0.1:9")) as daemon:
        client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        staged = await client.stage(hashes[:3])
        for number in staged.granted:
            staged.view(number)[:] = payload(hashes[number], 0, 5000)
        await staged.commit()
        lease = await client.acquire(hashes, deadline_seconds=60.0)
        async with timeout(30):
            assert await lease.wait(6, 60.0) == 3
        assert lease.usable_blocks == 3
        await lease.release()
        await client.close()
        assert daemon.store is not None
        daemon.store.check_integrity()


async def test_a_pull_waits_for_the_index_as_long_as_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    async def query(
        _self: IndexClient, _keys: object, *, timeout_seconds: float | None = None
    ) -> list[NodeHit]:
        waits.append(timeout_seconds)
        raise UnavailableError("away")

    monkeypatch.setattr(IndexClient, "query", query)
    settings = settings_in(tmp_path, index_address="127.0.0.1:9", index_timeout_seconds=7.5)
    async with running(settings):
        client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        lease = await client.acquire(chain(NAMESPACE, 2), deadline_seconds=60.0)
        await lease.wait(2, 60.0)
        await client.close()
    assert waits == [7.5]


async def test_it_is_ready_only_when_it_has_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    settings = settings_in(tmp_path, grpc_port=ports[0], metrics_port=ports[1])
    reading, may_go_on = threading.Event(), threading.Event()

    def open_slowly(*arguments: Any) -> SsdTier:
        reading.set()
        assert may_go_on.wait(60)
        return open_at_once(*arguments)

    open_at_once = SsdTier.open
    monkeypatch.setattr(SsdTier, "open", open_slowly)
    daemon = Daemon(settings)
    task = asyncio.ensure_future(daemon.run())
    try:
        assert await asyncio.to_thread(reading.wait, 20)
        address = f"127.0.0.1:{ports[1]}"
        async with timeout(60):
            body = "recovering: opening the pool\n"
            while "the pool" in body:  # opened meanwhile
                status, body = await http(address, "/ready")
                assert status.split()[1] == "503"
        assert body == "recovering: reading the SSD\n"
        assert (await http(address, "/health"))[0].endswith("200 OK")
        assert (await daemon_status(f"127.0.0.1:{ports[0]}")).state == "recovering"
        may_go_on.set()
        async with timeout(60):
            await daemon.is_serving.wait()
        assert (await http(address, "/ready"))[1] == "serving\n"
        assert (await daemon_status(f"127.0.0.1:{ports[0]}")).state == "serving"
    finally:
        may_go_on.set()
        daemon.stop()
        async with timeout(60):
            await task


async def test_a_stop_while_it_recovers_ends_it_without_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(settings_in(tmp_path))

    def told_to_stop(*arguments: Any) -> SsdTier:
        daemon.stop()
        return open_at_once(*arguments)

    open_at_once = SsdTier.open
    monkeypatch.setattr(SsdTier, "open", told_to_stop)
    async with timeout(60):
        await daemon.run()
    assert not daemon.is_serving.is_set()
    assert not (tmp_path / "s").exists()
    monkeypatch.undo()
    async with running(settings_in(tmp_path)) as again:
        assert again.is_serving.is_set()


async def test_a_pool_that_cannot_be_opened_leaves_no_open_ssd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are opened side by side."""
    pool_has_failed, closed = threading.Event(), threading.Event()

    def open_late(*arguments: Any) -> SsdTier:
        assert pool_has_failed.wait(60)
        return open_at_once(*arguments)

    def fail(*arguments: Any, **named: Any) -> Pool:
        pool_has_failed.set()
        raise PreflightError("no room")

    def close(ssd: SsdTier) -> None:
        closed.set()
        close_at_once(ssd)

    open_at_once, close_at_once = SsdTier.open, SsdTier.close
    monkeypatch.setattr(SsdTier, "open", open_late)
    monkeypatch.setattr(SsdTier, "close", close)
    monkeypatch.setattr(Pool, "open", fail)
    with pytest.raises(PreflightError, match="no room"):
        async with timeout(60):
            await Daemon(settings_in(tmp_path)).run()
    assert closed.is_set()
