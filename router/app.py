"""Puts the router together: wiring, start and shutdown order only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from client_sdk.aio import TaskGroup
from client_sdk.hint_client import HintClient
from client_sdk.operator_gate import OperatorGate, read_token
from client_sdk.tls import Tls
from router.admin import Admin
from router.admission import Admission, AdmissionLimits
from router.chains import ChainMemory
from router.config import RouterSection
from router.decision import Chooser, EngineLimits
from router.discovery.static import add_static_engines, drop_static_engines
from router.engine_client import EngineClient
from router.engines import Engine, EngineTable
from router.ext_proc.addresses import Addresses
from router.ext_proc.picking import Picker
from router.ext_proc.server import ExtProcServer
from router.health import BreakerLimits
from router.hints import Hinter, HintLimits
from router.http_server import HttpServer
from router.live import Changes, compare, with_live_changes
from router.load import LoadLedger
from router.local_tokens import LocalTokens
from router.metrics import RouterMetrics
from router.predicted import PredictedChains
from router.preferences import first_speeds, preferences_of
from router.prober import Prober, ProbeTimes
from router.proxy import Proxy, ProxyLimits
from router.remote_prefill import RemoteLimits, RemotePrefill
from router.routes import Route, Routes
from router.server_connection import ServerLimits
from router.speeds import LearningLimits, SpeedBook
from router.splitting import SplitRules
from router.surface import Work
from router.tenants import Tenants
from router.tokenize import TokenCache, Tokenizer
from router.ui.pages import UiPages
from router.ui.recent import RecentDecisions
from router.ui.state import UiState
from router.upstream_pool import UpstreamLimits, UpstreamPool
from router.view import IndexView

if TYPE_CHECKING:
    from router.board import BoardMaker

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0


class Router:
    """All parts of one router. `running` starts and ends them in the right order."""

    def __init__(
        self,
        cfg: RouterSection,
        index: IndexView,
        rng: random.Random,
        tls: Tls | None = None,
        make_board: BoardMaker | None = None,
    ) -> None:
        """`tls`: towards the daemons, if they want it. With `make_board` `cost` is compiled."""
        loop = asyncio.get_running_loop()
        self._cfg = cfg
        self._index = index
        self._loop = loop
        self.speeds = SpeedBook(
            first_speeds(cfg), LearningLimits(max_age_seconds=cfg.learned_seconds), loop.time
        )
        self.engines = EngineTable(
            BreakerLimits(cfg.breaker_failures, cfg.breaker_open_seconds), cfg.forget_seconds
        )
        self.ledger = LoadLedger(loop.time)
        self.metrics = RouterMetrics()
        self.metrics.watch(self.engines, self.ledger, self.speeds)
        self.predicted = PredictedChains(cfg.predicted_seconds)
        self.pool = UpstreamPool(
            UpstreamLimits(
                cfg.connect_seconds,
                cfg.response_seconds,
                cfg.idle_seconds,
                cfg.pooled_connections,
                cfg.pooled_seconds,
            )
        )
        self.engines.on_removed.append(self._engine_removed)
        add_static_engines(self.engines, cfg.engines, loop.time())
        self.tokens = TokenCache(cfg.tokenize_cache_tokens)
        self.local_tokens = LocalTokens(cfg.tokenizers, self.metrics)
        self.chains = ChainMemory(cfg.hash_cache_blocks)
        preferences = preferences_of(cfg)
        chooser = self._chooser = Chooser(
            self.engines,
            self.ledger,
            index,
            self.predicted,
            Tokenizer(
                EngineClient(self.pool), self.tokens, cfg.tokenize_seconds, self.local_tokens
            ),
            cfg.policy,
            preferences,
            self.speeds,
            self.metrics,
            _engine_limits(cfg),
            self.chains,
            make_board,
            rng=rng,
            clock=loop.time,
        )
        self.recent = RecentDecisions(lambda: chooser.policy_name, loop.time)
        self.admission = Admission(chooser, _admission_limits(cfg), self.metrics)
        self.ledger.on_freed = self.admission.notice
        self.metrics.watch_line(self.admission.waiting)
        self.tenants = _tenants(cfg, loop.time)
        self.hinter = Hinter(
            HintClient(tls),
            HintLimits(cfg.prefetch_hints, cfg.prefetch_queue_seconds, cfg.response_seconds),
            self.metrics,
            loop.time,
        )
        remote_prefill = RemotePrefill(
            chooser,
            self.ledger,
            self.speeds,
            EngineClient(self.pool),
            self.hinter,
            SplitRules(cfg.remote_prefill_tokens, cfg.remote_prefill_factor),
            RemoteLimits(cfg.response_seconds, cfg.handover_patience_seconds, cfg.handover_seconds),
            self.metrics,
            loop.time,
        )
        proxy = self._proxy = Proxy(
            chooser,
            self.admission,
            self.ledger,
            self.speeds,
            self.pool,
            self.metrics,
            ProxyLimits(cfg.retries, cfg.retry_after_seconds, cfg.retry_share),
            self.hinter,
            remote_prefill,
            self.tenants,
        )
        gate = _gate(cfg.operator_token_file)
        self.admin = Admin(chooser, gate)
        routes = Routes(
            proxy,
            self.admin,
            chooser,
            self.engines,
            self.ledger,
            self.speeds,
            self.metrics,
            self.tenants,
            self._pages(gate) if cfg.ui else {},
        )
        limits = ServerLimits(cfg.max_body_bytes, cfg.max_header_bytes, cfg.client_idle_seconds)
        self.server = HttpServer(routes.handle, limits)
        self.addresses = Addresses(self.engines, loop.time)
        self.ext_proc = ExtProcServer(
            Picker(
                chooser,
                self.admission,
                self.engines,
                self.ledger,
                self.speeds,
                self.metrics,
                self.tenants,
                self.addresses,
                cfg.ext_proc_fallbacks,
                cfg.retry_after_seconds,
                loop.time,
            ),
            self.metrics,
            lambda: self.engines.has_healthy,
            cfg.max_body_bytes,
            loop.time,
        )
        self.metrics.watch_streams(lambda: self.ext_proc.streams)
        self.ext_proc_port: int | None = None
        """Where Envoys ask, while it runs and is set to."""
        self.prober = Prober(
            self.engines,
            self.pool,
            self.predicted,
            self.metrics,
            ProbeTimes(cfg.health_interval_seconds, cfg.health_timeout_seconds),
        )

    def _pages(self, gate: OperatorGate) -> Mapping[Work, Route]:
        chooser, clock = self._chooser, self._loop.time
        chooser.on_routed = self.recent.note
        state = UiState(
            self.engines,
            self.ledger,
            self.speeds,
            self._index,
            self.admission,
            self.metrics,
            self.recent,
            lambda: chooser.policy_name,
            clock,
        )
        return UiPages(state, gate, clock).routes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Serve inside the block; the value is the port. Leaving it drains.

        Engines are probed before the first request is taken, so a healthy one is known by then.
        """
        try:
            self._sync_engines()
            await self.prober.probe_all()
            if self._cfg.ext_proc_port is not None:
                await self.addresses.refresh()
                self.ext_proc_port = await self.ext_proc.start(
                    self._cfg.host, self._cfg.ext_proc_port
                )
            port = await self.server.start(self._cfg.host, self._cfg.port)
            async with TaskGroup() as tasks:
                background = [
                    tasks.create_task(self.prober.run()),
                    tasks.create_task(self._every(self._cfg.sync_seconds, self._sync_engines)),
                    tasks.create_task(self._every(IDLE_CHECK_SECONDS, self.server.check_idle)),
                ]
                if self.ext_proc_port is not None:
                    background.append(tasks.create_task(self.addresses.run()))
                try:
                    yield port
                finally:
                    cut, _ = await asyncio.gather(
                        self.server.drain(self._cfg.drain_seconds),
                        self.ext_proc.drain(self._cfg.drain_seconds),
                    )
                    if cut:
                        log.warning("%d requests were cut after the drain time", cut)
                    for task in background:
                        task.cancel()
        finally:
            await self.ext_proc.drain(0)
            await self.hinter.close()
            await self.pool.close()

    def reconfigure(self, wanted: RouterSection) -> Changes:
        """Take over what may change while serving; return that, and what waits for a restart."""
        changes = compare(self._cfg, wanted)
        before = self._cfg.engines
        cfg = self._cfg = with_live_changes(self._cfg, wanted)
        if "engines" in changes.live:
            kept = {entry.url for entry in cfg.engines}
            drop_static_engines(self.engines, [e for e in before if e.url not in kept])
            add_static_engines(self.engines, cfg.engines, self._loop.time())
        if "policy" in changes.live:
            self._chooser.set_policy(cfg.policy)
        self._chooser.limits = _engine_limits(cfg)
        self.admission.set_limits(_admission_limits(cfg))
        self.admission.notice()
        for key in changes.live:
            log.info("reloaded router.%s: %s", key, getattr(cfg, key))
        for key in changes.needs_restart:
            log.warning("waits for a restart: router.%s", key)
        return changes

    def check_integrity(self) -> None:
        parts = (
            self.engines,
            self.ledger,
            self.admission,
            self.speeds,
            self.predicted,
            self.pool,
            self.tokens,
            self.addresses,
            self.ext_proc,
            self.recent,
            self.chains,
            self.local_tokens,
            self._chooser,
            self._proxy.retry_budget,
        )
        for part in parts:
            part.check_integrity()
        if self.tenants is not None:
            self.tenants.check_integrity()

    def _sync_engines(self) -> None:
        configured = self._index.configured_engines()
        found = self._index.discovered_engines()
        self.engines.sync(self._index.nodes(), self._loop.time(), configured, found)
        self.hinter.keep({engine.daemon_address for engine in self.engines})
        self.predicted.expire(self._loop.time())
        self.speeds.refresh()
        if self.tenants is not None:
            self.tenants.refresh()
        self.admission.notice()  # an engine that came or recovered has room

    def _engine_removed(self, engine: Engine) -> None:
        log.info("engine %s is forgotten", engine.name)
        self.pool.close_idle(engine.url)
        self.predicted.forget(engine.url)
        self.ledger.forget(engine.url)
        self.speeds.forget(engine.url)

    async def _every(self, seconds: float, action: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                action()
            except Exception:
                log.exception("periodic work of the router failed; it goes on")


def _tenants(cfg: RouterSection, clock: Callable[[], float]) -> Tenants | None:
    if cfg.key_file is None or cfg.tenant_secret_file is None:
        return None
    secret = read_token(cfg.tenant_secret_file, "router.tenant_secret_file")
    return Tenants(cfg.key_file, secret, clock)


def _gate(path: Path | None) -> OperatorGate:
    setting = "router.operator_token_file"
    return OperatorGate(read_token(path, setting) if path else None, setting)


def _engine_limits(cfg: RouterSection) -> EngineLimits:
    return EngineLimits(cfg.max_inflight_per_engine, cfg.max_queued_tokens_per_engine)


def _admission_limits(cfg: RouterSection) -> AdmissionLimits:
    return AdmissionLimits(
        cfg.queue_requests,
        cfg.queue_seconds,
        cfg.retry_after_seconds,
        cfg.max_retry_after_seconds,
    )
