"""Nodes, index and routers as real processes with tiers of a few blocks, for failure scenarios.

    with Cluster(tmp_path, nodes=2, dram_blocks=15) as cluster:
        a, b = cluster.nodes
        with a.client() as client:
            write_chain(client, CHAIN)
        cluster.await_rest()
        a.kill()
        cluster.await_index_state(a, "suspect")
        a.start()
        cluster.await_rest()
        with b.client() as client:
            assert read_chain(client, CHAIN) == len(CHAIN)  # pulled from a

Blocks are those of `tests.helpers.chains`. Every wait has a deadline. What was started is ended by
pid; pools are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

from client_sdk import SyncClient
from client_sdk.index_client import IndexClient, IndexedNode
from emberkv_proto.errors import EmberError
from emberkv_proto.shm_layout import align_up, slots_per_extent
from store_daemon.tiers.segments import PAGE_BYTES
from tests.helpers.agreement import Catalog, await_agreement
from tests.helpers.chains import NAMESPACE, PART_BYTES
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.ports import free_port
from tests.helpers.server_process import ServerProcess

EXTENT_BYTES = 64 * 1024
SEGMENT_BYTES = 64 * 1024
SLOTS_PER_EXTENT = slots_per_extent(EXTENT_BYTES, PART_BYTES)
RECORDS_PER_SEGMENT = (SEGMENT_BYTES - 2 * PAGE_BYTES) // (PAGE_BYTES + align_up(PART_BYTES))
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.02
QUICK = {
    "daemon.heartbeat_seconds": 0.2,
    "daemon.lease_seconds": 6.0,
    "daemon.peer_timeout_seconds": 6.0,
    "dram.high_watermark": 1.0,
    "dram.low_watermark": 0.9,
}
"""Short times, but for what a busy machine must not take for a failure; a pool that may be full."""


class NodeProcess(DaemonProcess):
    """A node whose tiers are counted in blocks of `tests.helpers.chains`, with a port that stays.

    Tiers hold at least so many blocks: extents and segments are whole.
    """

    def __init__(
        self,
        directory: Path,
        node_id: str,
        dram_blocks: int,
        ssd_blocks: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.grpc_address = f"127.0.0.1:{free_port()}"
        segments = -(-ssd_blocks // RECORDS_PER_SEGMENT)
        super().__init__(
            directory,
            node_id,
            capacity_bytes=-(-dram_blocks // SLOTS_PER_EXTENT) * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            # One segment more: the oldest goes when a new one is begun.
            ssd_bytes=(segments + 1) * SEGMENT_BYTES if ssd_blocks else 0,
            settings={
                "ssd.segment_bytes": SEGMENT_BYTES,
                "daemon.grpc_port": self.grpc_address.rpartition(":")[2],
                **QUICK,
                **settings,
            },
        )

    def client(self, timeout_seconds: float = 20.0) -> SyncClient:
        return SyncClient(self.socket_path, NAMESPACE, timeout_seconds=timeout_seconds)

    def gauge(self, name: str) -> float:
        """A metric without its prefix: `leases`, `blocks{tier="dram"}`."""
        return self.metrics()[f"emberkv_store_{name}"]

    def counter(self, name: str) -> float:
        """A counter of its status; 0 when it never happened."""
        with self.operator() as operator:
            return operator.status().counters.get(name, 0.0)

    def tier_state(self, tier: int) -> str:
        with self.operator() as operator:
            return next(t.state for t in operator.status().tiers if t.tier == tier)

    def is_at_rest(self) -> bool:
        """Whether nothing is queued for the SSD or on its way from it."""
        metrics = self.metrics()
        names = ("writeback_queue_blocks", "moves_in_flight")
        return all(metrics[f"emberkv_store_{name}"] == 0 for name in names)

    def check_integrity(self) -> None:
        with self.operator() as operator:
            assert operator.check() == []


class IndexProcess(ServerProcess):
    """The global index as a process of its own, on a port that stays."""

    module = "global_index"

    def __init__(self, directory: Path, nodes: list[str], settings: Mapping[str, Any]) -> None:
        self._set_up(directory, "index")
        self.address = f"127.0.0.1:{free_port()}"
        self.http_address = f"127.0.0.1:{free_port()}"
        self._nodes = nodes
        self._more = settings

    def _is_serving(self) -> bool:
        with contextlib.suppress(EmberError):
            asyncio.run(indexed_nodes(self.address))
            return True
        return False

    def _settings(self) -> Mapping[str, Any]:
        return {
            "index.port": self.address.rpartition(":")[2],
            "index.metrics_port": self.http_address.rpartition(":")[2],
            **index_settings(self._nodes),
            **self._more,
        }


class RouterProcess(ServerProcess):
    """A router with an index of its own inside."""

    module = "router"

    def __init__(
        self, directory: Path, number: int, nodes: list[str], settings: Mapping[str, Any]
    ) -> None:
        self._set_up(directory, f"router-{number}")
        self._endpoint_file = directory / f"router-{number}.json"
        self._nodes = nodes
        self._more = settings

    @property
    def endpoint(self) -> dict[str, Any]:
        """url, index_address and pid of the process that runs."""
        loaded: dict[str, Any] = json.loads(self._endpoint_file.read_text())
        return loaded

    def spawn(self) -> None:
        self._endpoint_file.unlink(missing_ok=True)
        super().spawn()

    def _is_serving(self) -> bool:
        # Not there yet, or not all of it, or it hangs up while it starts.
        with contextlib.suppress(OSError, HTTPException, ValueError):
            url = f"{self.endpoint['url']}/health"
            return bool(urlopen(url, timeout=90).status == 200)  # noqa: S310 - it is ours, http
        return False

    def _settings(self) -> Mapping[str, Any]:
        return {
            "router.port": 0,
            "router.endpoint_file": self._endpoint_file,
            "index.port": 0,
            **index_settings(self._nodes),
            **self._more,
        }


class Cluster:
    """Use it as a context manager; `nodes`, `index` and `routers` may be killed and started.

    Args:
        settings: more of the daemons' settings.
        index_settings: more of the index's, also of those inside routers.
        router_settings: more of the routers'.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        routers: int = 0,
        dram_blocks: int = 60,
        ssd_blocks: int = 120,
        settings: Mapping[str, Any] | None = None,
        index_settings: Mapping[str, Any] | None = None,
        router_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.nodes = [
            NodeProcess(
                directory / f"node-{letter}",
                f"node-{letter}",
                dram_blocks,
                ssd_blocks,
                settings or {},
            )
            for letter in "abcdefgh"[:nodes]
        ]
        addresses = [node.grpc_address for node in self.nodes]
        more = dict(index_settings or {})
        self.index = IndexProcess(directory, addresses, more)
        for node in self.nodes:
            node.settings["daemon.index_address"] = self.index.address
        self.routers = [
            RouterProcess(directory, number, addresses, {**more, **(router_settings or {})})
            for number in range(routers)
        ]

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.index, *self.nodes, *self.routers]

    def await_rest(self, seconds: float = WAIT_SECONDS) -> list[Catalog]:
        """Wait until no running node moves blocks and the index agrees with each."""
        running = [node for node in self.nodes if node.is_running]
        for node in running:
            wait_until(node.is_at_rest, f"{node.name} at rest", seconds)
        return [await_agreement(self.index.address, n.grpc_address, seconds) for n in running]

    def indexed(self, node: NodeProcess) -> IndexedNode | None:
        """What the index says of a node."""
        nodes = asyncio.run(indexed_nodes(self.index.address))
        return next((seen for seen in nodes if seen.node_id == node.node_id), None)

    def await_index_state(self, node: NodeProcess, state: str) -> None:
        """Wait until the index calls the node "ok", "suspect" or "gone"."""

        def holds() -> bool:
            seen = self.indexed(node)
            return seen is not None and seen.state == state

        wait_until(holds, f"the index calls {node.node_id} {state}")

    def check_integrity(self) -> None:
        for node in self.nodes:
            if node.is_running:
                node.check_integrity()

    def __enter__(self) -> Cluster:
        try:
            for server in self.servers:
                server.spawn()
            for server in self.servers:
                server.await_serving()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.check_integrity()
        finally:
            self._clean()

    def _clean(self) -> None:
        for server in self.servers:
            server.clean()


def wait_until(holds: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Raises AssertionError, naming `what`, when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(POLL_SECONDS)


def index_settings(nodes: list[str]) -> dict[str, Any]:
    """An index that needs no compiling, and takes a node on a busy machine for a living one."""
    return {
        "index.nodes": json.dumps(nodes),
        "index.backend": "python",
        "index.capacity_blocks": 100_000,
        "index.suspect_seconds": 4.0,
        "index.gone_seconds": 20.0,
    }


async def indexed_nodes(index_address: str) -> list[IndexedNode]:
    """Raises UnavailableError or DeadlineError."""
    index = IndexClient(index_address, timeout_seconds=20.0)
    try:
        return await index.nodes()
    finally:
        await index.close()
