"""The daemon put together: what is opened in which order, and closed in which."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from client_sdk import faults, logs
from client_sdk.index_client import IndexClient
from client_sdk.operator_gate import OperatorGate, open_token
from client_sdk.tls import Tls
from emberkv_proto.errors import EmberError
from emberkv_proto.types import NodeId, Tier
from store_daemon.block import StoredNamespace
from store_daemon.config import DaemonSection, DaemonSettings
from store_daemon.files import write_durably
from store_daemon.grpc_server import GrpcParts, GrpcServer
from store_daemon.http_server import HttpServer
from store_daemon.lease_desk import LeaseDesk
from store_daemon.life import Life
from store_daemon.live_settings import Changes
from store_daemon.local_index import LocalIndex
from store_daemon.local_server import LocalServer, remove_stale_socket
from store_daemon.metric_families import MetricSources
from store_daemon.metrics import StoreCollector
from store_daemon.notify import ServiceManager
from store_daemon.operators import operator_calls
from store_daemon.peers import PeerPuller
from store_daemon.preflight import check_machine
from store_daemon.publisher import NodeFacts, Publisher
from store_daemon.pull_limits import PullLimits
from store_daemon.reload import Reloader
from store_daemon.resp.door import DoorAddress, RespDoor, is_wanted
from store_daemon.servicer import NodeIdentity, Servicer
from store_daemon.store import BlockStore
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.populate import PopulateStoppedError, Progress, Watch
from store_daemon.tiers.ssd import SsdTier
from store_daemon.transport.choice import make_transport

log = logging.getLogger(__name__)
ENDPOINTS_FILE = "endpoints.json"
POLL_SECONDS = 0.05
SILENCE_CHECK_SECONDS = 1.0
GRPC_GRACE_SECONDS = 1.0
COLLECTOR_THRESHOLDS = (5_000, 20, 100)
"""See `gc.set_threshold`. The default visits each new block again and again."""


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


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
    resp_socket: str = ""
    resp_address: str = ""
    """Where Redis clients connect; empty: they do not."""


class Daemon:
    """One store daemon. `run` serves until `stop` is called, or SIGTERM or SIGINT comes.

    Closing happens in the reverse order of opening, whatever failed in between. While it recovers,
    gRPC and HTTP already answer, with nothing but that it does.
    """

    def __init__(
        self, settings: DaemonSettings, load: Callable[[], DaemonSettings] | None = None
    ) -> None:
        """`load` reads the settings anew, for `reload`."""
        self._settings = settings
        self._load = load
        self._reload: Callable[[], object] | None = None
        self._stop = asyncio.Event()
        self.is_serving = asyncio.Event()
        self.endpoints: Endpoints | None = None
        self.store: BlockStore | None = None
        self.life = Life(NodeId(settings.node.id))
        self._manager = ServiceManager.of_environment(os.environ, os.getpid())

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Raises PreflightError, AccessDeniedError or UnavailableError when it cannot start."""
        loop = asyncio.get_running_loop()
        signals = {
            signal.SIGTERM: self.stop,
            signal.SIGINT: self.stop,
            signal.SIGHUP: self._hang_up,
        }
        for number, act in signals.items():
            loop.add_signal_handler(number, act)
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self._manager.close)
                try:
                    await self._open(stack)
                except PopulateStoppedError:
                    log.info("stopped while populating the pool")
                await self._stop.wait()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _hang_up(self) -> None:
        """SIGHUP: take over a changed configuration. What is wrong with it stands in the log."""
        if self._reload is None:
            log.warning("SIGHUP while recovering: the configuration is not reloaded")
            return
        with contextlib.suppress(EmberError):  # the reloader has logged and counted it
            self._reload()

    async def _open(self, stack: AsyncExitStack) -> None:
        """Open everything, then serve. Returns early when it is told to stop meanwhile."""
        settings, daemon = self._settings, self._settings.daemon
        check_machine(settings)
        remove_stale_socket(daemon.socket_path)
        tls_files = daemon.tls_files()
        tls = Tls.read(tls_files) if tls_files is not None else None
        gate = OperatorGate(_token(daemon))
        http = HttpServer(self.life)
        metrics_address = await http.start(daemon.metrics_host, daemon.metrics_port)
        stack.push_async_callback(http.close)
        grpc = GrpcServer(daemon, self.life, gate, tls)
        stack.push_async_callback(grpc.stop, GRPC_GRACE_SECONDS)
        grpc_address = await grpc.start()

        # What comes now is much and stays: looking for garbage meanwhile costs and finds none.
        gc.disable()
        stack.callback(gc.enable)
        opener = stack.enter_context(ThreadPoolExecutor(2, "ember-open"))
        index = await self._opened(
            "reading the local index", _begin(stack, opener, partial(_open_index, settings))
        )
        incarnation = index.next_incarnation()
        logs.describe_process(node=settings.node.id, incarnation=incarnation)
        known = {
            size_class
            for namespace in index.namespaces().values()
            for size_class in StoredNamespace.of(namespace).size_classes
        }
        opening_pool = _begin(
            stack,
            opener,
            partial(
                Pool.open,
                settings.dram,
                settings.node.id,
                incarnation,
                known.__contains__,
                watch=self._watch(),
            ),
        )
        opening_ssd: Future[SsdTier] | None = None
        if settings.ssd.capacity_bytes:
            opening_ssd = _begin(stack, opener, partial(SsdTier.open, settings.ssd, index))
        pool = await self._opened("opening the pool", opening_pool)
        ssd: SsdTier | None = None
        if opening_ssd is not None and not self._stop.is_set():
            ssd = await self._opened("reading the SSD", opening_ssd)
        if self._stop.is_set():
            return

        node_id = self.life.node_id
        self._recovering("taking over the blocks")
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
        pool_descriptor = pool.open_for_agents()
        stack.callback(os.close, pool_descriptor)
        transport = make_transport(settings, incarnation, pool_descriptor, store.placements.begin)
        stack.callback(transport.shutdown)
        # Over TLS, leases are asked for by gRPC alone: who has no certificate sees no ticket.
        desk = LeaseDesk(store) if tls is None else None
        if desk is not None:
            stack.callback(desk.close)
        self._recovering(f"opening the {transport.name} transport")
        await asyncio.get_running_loop().run_in_executor(opener, transport.register, view)
        address = await asyncio.get_running_loop().run_in_executor(
            opener, transport.serve, store.may_read, desk.lend if desk is not None else None
        )
        takes_engines = bool(settings.transport.engine_agents)
        servicer = Servicer(
            store,
            NodeIdentity(node_id, incarnation, address if takes_engines else None),
            daemon,
            lambda: publisher.seq,
            lambda: self._announce(publisher, servicer),
            self.stop,
        )
        # Whatever calls are left end before what they read is closed.
        stack.push_async_callback(grpc.stop, GRPC_GRACE_SECONDS)
        puller: PeerPuller | None = None
        if daemon.index_address:
            index_client = IndexClient(daemon.index_address, tls=tls)
            stack.push_async_callback(index_client.close)
            limits = PullLimits(index_seconds=daemon.index_timeout_seconds)
            puller = PeerPuller(node_id, view, index_client, transport, limits=limits, tls=tls)
            stack.push_async_callback(puller.close)
            store.set_puller(puller)
        sources = MetricSources(store, publisher, self.life, index, puller, transport)
        http.open_to(store, StoreCollector(sources))

        if settings.events.zmq_endpoint:
            await self._publish_over_zmq(stack, store)
        server = LocalServer(daemon, servicer)
        stack.push_async_callback(self._drain, store, server, publisher, servicer)
        store.start()
        # What was recovered lives as long as the process; the collector need not look at it.
        # Blocks that come later die without it too: it looks at them seldom.
        stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        gc.freeze()
        gc.enable()
        stack.callback(gc.unfreeze)
        await server.start()
        resp = await self._open_to_redis(stack, store)
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
            resp.socket,
            resp.tcp,
        )

        def apply(changed: DaemonSettings) -> None:
            gate.token = _token(changed.daemon)
            store.reconfigure(changed)
            servicer.reconfigure(changed.daemon)
            server.reconfigure(changed.daemon)
            if changed.daemon.log_style != self._settings.daemon.log_style:
                logs.configure(changed.daemon.log_style)
            self._settings = changed

        reloader = Reloader(settings, self._load, apply, store.holdings.counters)

        def reload() -> Changes:
            self._manager.reloading()
            try:
                return reloader.reload()
            finally:
                self._manager.ready("serving")

        operators = operator_calls(servicer, self.stop, reload)
        sessions = server if takes_engines else None
        ticket = desk.ticket if desk is not None else b""
        grpc.open_to(GrpcParts(publisher, store, store, address, operators, sessions, ticket))
        self._reload = reload
        self.life.state = "serving"
        self._announce(publisher, servicer)
        endpoints_path = daemon.data_dir / ENDPOINTS_FILE
        write_endpoints(endpoints_path, self.endpoints)
        stack.callback(endpoints_path.unlink, missing_ok=True)
        watchdog = asyncio.get_running_loop().create_task(
            self._manager.keep_watchdog(lambda: http.is_healthy)
        )
        stack.callback(watchdog.cancel)
        dram, on_ssd = store.holdings.blocks_of(Tier.DRAM), store.holdings.blocks_of(Tier.SSD)
        log.info(
            "serving node=%s socket=%s grpc=%s metrics=%s blocks dram=%d ssd=%d",
            node_id,
            daemon.socket_path,
            grpc_address,
            metrics_address,
            dram,
            on_ssd,
        )
        self._manager.ready(f"serving {dram} blocks in DRAM, {on_ssd} on SSD")
        self.is_serving.set()

    async def _publish_over_zmq(self, stack: AsyncExitStack, store: BlockStore) -> None:
        """Tell routers of others too. Its libraries are loaded only for this."""
        from store_daemon.kv_outlet import KvEventOutlet

        holdings = store.holdings
        outlet = KvEventOutlet(self._settings.events, holdings.catalog, holdings.counters)
        outlet.start()
        stack.push_async_callback(outlet.close)
        holdings.teller = outlet.tell

    async def _open_to_redis(self, stack: AsyncExitStack, store: BlockStore) -> DoorAddress:
        """Let Redis clients in, where the settings name an address for them."""
        if not is_wanted(self._settings.resp):
            return DoorAddress()
        door = RespDoor(self._settings, store)
        await door.start()
        stack.push_async_callback(door.close)
        return door.address

    async def _opened(self, doing: str, opening: Future[C]) -> C:
        self._recovering(doing)
        return await asyncio.shield(asyncio.wrap_future(opening))

    def _watch(self) -> Watch:
        """How the thread that populates the pool tells how far it is, and learns to stop."""
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            log.info("%s", progress)
            loop.call_soon_threadsafe(self._recovering, str(progress))

        return Watch(self._stop.is_set, report)

    def _recovering(self, doing: str) -> None:
        self.life.doing = doing
        self._manager.starting(doing)

    async def _drain(
        self, store: BlockStore, server: LocalServer, publisher: Publisher, servicer: Servicer
    ) -> None:
        """Refuse new work, let reads finish, write back what is queued; within drain_seconds."""
        began = time.monotonic()
        self.life.state = "draining"
        self._manager.stopping()
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


def _token(daemon: DaemonSection) -> bytes | None:
    is_private = daemon.tls_files() is not None
    return open_token(daemon.operator_token_file, is_private, "daemon.operator_token_file")


def _begin(stack: AsyncExitStack, opener: Executor, opening: Callable[[], C]) -> Future[C]:
    """Open a thing apart from the loop, which goes on answering; `stack` closes it."""
    future = opener.submit(opening)
    stack.push_async_callback(_close_opened, future)
    return future


async def _close_opened(opening: Future[C]) -> None:
    """Waits for it, since it may use what was opened before and is closed after it."""
    opened = asyncio.wrap_future(opening)
    await asyncio.wait([opened])
    if opened.exception() is None:
        opened.result().close()


def _open_index(settings: DaemonSettings) -> LocalIndex:
    return LocalIndex.open(settings.daemon.data_dir, settings.node.id)


async def _cut_silent(server: LocalServer) -> None:
    while True:
        await asyncio.sleep(SILENCE_CHECK_SECONDS)
        server.cut_silent(time.monotonic())


def write_endpoints(path: Path, endpoints: Endpoints) -> None:
    """Replace the file in one step, so that a reader sees the old or the new one."""
    write_durably(path, json.dumps(asdict(endpoints), indent=2).encode() + b"\n")
