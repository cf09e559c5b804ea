"""The daemon put together: what is opened in which order, and closed in which."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from client_sdk import faults
from client_sdk.index_client import IndexClient
from emberkv_proto.types import NodeId, Tier
from store_daemon.block import StoredNamespace
from store_daemon.config import DaemonSettings
from store_daemon.files import write_durably
from store_daemon.grpc_server import GrpcServer, OperatorCalls
from store_daemon.local_index import LocalIndex
from store_daemon.local_server import LocalServer, remove_stale_socket
from store_daemon.metrics import MetricsServer
from store_daemon.peers import PeerPuller
from store_daemon.preflight import check_machine
from store_daemon.publisher import NodeFacts, Publisher
from store_daemon.servicer import NodeIdentity, Servicer
from store_daemon.store import BlockStore
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.ssd import SsdTier
from store_daemon.transport.tcp import TcpTransport

log = logging.getLogger(__name__)
ENDPOINTS_FILE = "endpoints.json"
POLL_SECONDS = 0.05
SILENCE_CHECK_SECONDS = 1.0
GRPC_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where this life of the daemon can be reached. Kept in `<data_dir>/endpoints.json`."""

    node_id: str
    pid: int
    incarnation: int
    socket: str
    grpc_address: str
    metrics_address: str
    transport_address: str


class Daemon:
    """One store daemon. `run` serves until `stop` is called, or SIGTERM or SIGINT comes.

    Closing happens in the reverse order of opening, whatever failed in between.
    """

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self.is_serving = asyncio.Event()
        self.endpoints: Endpoints | None = None
        self.store: BlockStore | None = None

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Raises PreflightError, AccessDeniedError or UnavailableError when it cannot start."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack)
                await self._stop.wait()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def _open(self, stack: AsyncExitStack) -> None:
        settings, daemon = self._settings, self._settings.daemon
        check_machine(settings)
        remove_stale_socket(daemon.socket_path)
        index = LocalIndex.open(daemon.data_dir, settings.node.id)
        stack.callback(index.close)
        incarnation = index.next_incarnation()
        known = {
            size_class
            for namespace in index.namespaces().values()
            for size_class in StoredNamespace.of(namespace).size_classes
        }
        pool = Pool.open(settings.dram, settings.node.id, incarnation, known.__contains__)
        stack.callback(pool.close)
        ssd = SsdTier.open(settings.ssd, index) if settings.ssd.capacity_bytes else None
        if ssd is not None:
            stack.callback(ssd.close)

        node_id = NodeId(settings.node.id)
        store = BlockStore(settings, pool, index, ssd, time.monotonic)
        publisher = Publisher(
            node_id,
            incarnation,
            store,
            ring_events=daemon.event_ring_events,
            heartbeat_seconds=daemon.heartbeat_seconds,
        )
        store.set_sink(publisher)
        store.recover()
        faults.hit(faults.RECOVERED)
        self.store = store

        view = pool.view()
        stack.callback(view.release)
        transport = TcpTransport(
            incarnation,
            daemon.grpc_host,
            daemon.transport_port,
            advertised_host=daemon.advertised_host,
        )
        transport.register(view)
        stack.callback(transport.shutdown)
        address = transport.serve(store.may_read)
        servicer = Servicer(
            store,
            NodeIdentity(node_id, incarnation),
            daemon,
            lambda: publisher.seq,
            lambda: self._announce(publisher, servicer),
            self.stop,
        )

        async def status() -> object:
            return servicer.status()

        async def check() -> list[str]:
            return store.problems()

        grpc = GrpcServer(daemon, publisher, store, address, OperatorCalls(status, check))  # type: ignore[arg-type]
        stack.push_async_callback(grpc.stop, GRPC_GRACE_SECONDS)
        grpc_address = await grpc.start()
        if daemon.index_address:
            index_client = IndexClient(daemon.index_address)
            stack.push_async_callback(index_client.close)
            puller = PeerPuller(node_id, view, index_client, transport)
            stack.push_async_callback(puller.close)
            store.set_puller(puller)
        metrics = MetricsServer(store, lambda: publisher.seq)
        metrics_address = await metrics.start(daemon.metrics_host, daemon.metrics_port)
        stack.push_async_callback(metrics.close)

        server = LocalServer(daemon, servicer)
        stack.push_async_callback(self._drain, store, server, publisher, servicer)
        store.start()
        # What was recovered lives as long as the process; the collector need not look at it.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        await server.start()
        silence = asyncio.get_running_loop().create_task(_cut_silent(server))
        stack.callback(silence.cancel)
        self.endpoints = Endpoints(
            node_id,
            os.getpid(),
            incarnation,
            str(daemon.socket_path),
            grpc_address,
            metrics_address,
            address.address,
        )
        self._announce(publisher, servicer)
        endpoints_path = daemon.data_dir / ENDPOINTS_FILE
        write_endpoints(endpoints_path, self.endpoints)
        stack.callback(endpoints_path.unlink, missing_ok=True)
        log.info(
            "serving node=%s socket=%s grpc=%s metrics=%s blocks dram=%d ssd=%d",
            node_id,
            daemon.socket_path,
            grpc_address,
            metrics_address,
            store.holdings.blocks_of(Tier.DRAM),
            store.holdings.blocks_of(Tier.SSD),
        )
        self.is_serving.set()

    async def _drain(
        self, store: BlockStore, server: LocalServer, publisher: Publisher, servicer: Servicer
    ) -> None:
        """Refuse new work, let reads finish, write back what is queued; within drain_seconds."""
        began = time.monotonic()
        allowed = self._settings.daemon.drain_seconds
        log.info("draining: sessions=%d leases=%d", len(store.sessions), len(store.lender.leases))
        store.drain()
        self._announce(publisher, servicer)
        server.stop_listening()
        while len(store.lender.leases) and time.monotonic() - began < allowed / 2:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        await server.close()
        await store.close(max(0.0, began + 0.9 * allowed - time.monotonic()))
        log.info("stopped after %.2f s", time.monotonic() - began)

    def _announce(self, publisher: Publisher, servicer: Servicer) -> None:
        engines = tuple(
            session.engine
            for session in servicer.store.sessions.values()
            if session.engine is not None
        )
        grpc_address = self.endpoints.grpc_address if self.endpoints is not None else ""
        publisher.announce(NodeFacts(servicer.state, engines, grpc_address))


async def _cut_silent(server: LocalServer) -> None:
    while True:
        await asyncio.sleep(SILENCE_CHECK_SECONDS)
        server.cut_silent(time.monotonic())


def write_endpoints(path: Path, endpoints: Endpoints) -> None:
    """Replace the file in one step, so that a reader sees the old or the new one."""
    write_durably(path, json.dumps(asdict(endpoints), indent=2).encode() + b"\n")
