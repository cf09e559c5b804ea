"""Asks every engine for its health, once an interval, and healthy ones for their models."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from router.engine_client import EngineClient
from router.engines import Engine, EngineTable
from router.health import HealthState
from router.metrics import RouterMetrics
from router.predicted import PredictedChains
from router.upstream_head import RefusedError, UpstreamError
from router.upstream_pool import UpstreamPool

log = logging.getLogger(__name__)

MODELS_EVERY_PROBES = 10


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    interval_seconds: float
    timeout_seconds: float


class Prober:
    """One round probes all engines at once, so a dead one delays no other."""

    def __init__(
        self,
        engines: EngineTable,
        pool: UpstreamPool,
        predicted: PredictedChains,
        metrics: RouterMetrics,
        times: ProbeTimes,
    ) -> None:
        self._engines = engines
        self._pool = pool
        self._client = EngineClient(pool)
        self._predicted = predicted
        self._metrics = metrics
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._rounds = 0

    async def run(self) -> None:
        """Probe until cancelled. One task; a round never takes longer than two deadlines."""
        while True:
            try:
                await self.probe_all()
            except Exception:
                log.exception("a round of health probes failed; the next one comes")
            await asyncio.sleep(self._times.interval_seconds)

    async def probe_all(self) -> None:
        """One round. Returns when every engine has answered or missed its deadline."""
        self._pool.sweep()
        await asyncio.gather(*(self._probe(engine) for engine in self._engines))
        self._rounds += 1

    async def _probe(self, engine: Engine) -> None:
        now = self._loop.time()
        if not engine.health.may_probe(now):
            return
        before = engine.health.state
        try:
            fetched = await self._client.fetch(
                engine, "GET", b"/health", b"", self._times.timeout_seconds
            )
        except RefusedError:
            engine.health.refused(self._loop.time())
        except UpstreamError:
            engine.health.probe_failed(self._loop.time())
        else:
            if fetched.status == 200:
                engine.health.probe_succeeded(self._loop.time())
            else:
                engine.health.probe_failed(self._loop.time())
        if before is not engine.health.state:
            self._changed(engine)
        is_due = not engine.model_cards or self._rounds % MODELS_EVERY_PROBES == 0
        if engine.health.is_healthy and is_due:
            await self._read_models(engine)

    def _changed(self, engine: Engine) -> None:
        log.info("engine %s is %s", engine.name, engine.health.state.value)
        if engine.health.state is HealthState.HEALTHY:
            # What a former life of it held in HBM is gone.
            self._predicted.forget(engine.url)

    async def _read_models(self, engine: Engine) -> None:
        try:
            fetched = await self._client.fetch(
                engine, "GET", b"/v1/models", b"", self._times.timeout_seconds
            )
            cards = _cards(fetched.body) if fetched.status == 200 else None
        except UpstreamError as error:
            log.debug("models of %s: %s", engine.name, error)
            cards = None
        if cards is None:
            self._metrics.models_unread.inc()
        else:
            engine.model_cards = cards
            self._engines.changed()


def _cards(body: bytes) -> tuple[dict[str, Any], ...] | None:
    """The entries of a /v1/models answer that name a model; None when it is not one."""
    try:
        listed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
        return None
    cards = (card for card in listed["data"] if isinstance(card, dict))
    return tuple(card for card in cards if isinstance(card.get("id"), str))
