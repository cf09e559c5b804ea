"""Prefill on one engine, decode on another: the prompt's blocks go over while they are computed.

The prefill engine gets the request for one token. Meanwhile the decode engine's daemon is told to
take the prompt's blocks from the prefill engine's node, block by block as they are committed there.
Then the decode engine gets the request and finds them at home. Nothing here can fail a request:
whatever goes wrong, the decode engine computes what has not come.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from client_sdk.prefetch import HintedSource
from emberkv_proto.types import NodeId
from router import usage
from router.candidates import estimate_of
from router.chains import ChainKind
from router.decision import Chooser, Decision, Plan, Scored
from router.engine_client import EngineClient
from router.engines import Engine
from router.forwarding import upstream_request
from router.health import FAILED_STATUSES
from router.hints import Hint, Hinter
from router.http_message import Request
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.scoring import attention_pairs
from router.speeds import SpeedBook
from router.splitting import Split, SplitRules, judge
from router.stretches import Worked
from router.upstream_head import RefusedError, UpstreamError

log = logging.getLogger(__name__)
MAX_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Seconds: for the whole prefill; how long the decode node waits for the prefill node's next
    block; how long the decode engine is kept waiting for the last blocks, or, when these are there,
    for the prefill engine's answer."""

    prefill_seconds: float
    patience_seconds: float
    handover_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """A prompt that is prefilled elsewhere first."""

    prefill: Scored
    kind: ChainKind


class RemotePrefill:
    """Runs before a request goes to a decode engine. On the router's event loop."""

    def __init__(
        self,
        chooser: Chooser,
        ledger: LoadLedger,
        speeds: SpeedBook,
        client: EngineClient,
        hinter: Hinter,
        rules: SplitRules,
        limits: RemoteLimits,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._chooser = chooser
        self._ledger = ledger
        self._speeds = speeds
        self._client = client
        self._hinter = hinter
        self._rules = rules
        self._limits = limits
        self._metrics = metrics
        self._clock = clock

    def planned(self, plan: Plan, decision: Decision) -> Handover | None:
        """The handover for a request, or None where its engine prefills itself."""
        decode = decision.chosen.engine
        if decode.role != "decode" or not decode.daemon_address or decision.kind is None:
            return None
        prefill = self._chooser.choose_prefill(plan, decision)
        split = judge(decision.chosen.estimate, prefill.estimate if prefill else None, self._rules)
        self._metrics.splits.labels(split.value).inc()
        if split is not Split.REMOTE or prefill is None:
            return None
        return Handover(prefill, decision.kind)

    def charge(self, handover: Handover, plan: Plan, decision: Decision) -> ExitStack:
        """Charge both engines until the value is closed."""
        prefill = handover.prefill
        uncached = prefill.estimate.uncached_tokens
        held = ExitStack()
        held.enter_context(self._ledger.charge(decision.chosen.engine.url, 0))
        pairs = attention_pairs(uncached, plan.prompt_tokens)
        held.enter_context(self._ledger.charge(prefill.engine.url, uncached, pairs))
        return held

    async def run(
        self, handover: Handover, request: Request, identity: bytes, plan: Plan, decision: Decision
    ) -> Decision:
        """Prefill and hand over; return the decision with what its engine finds at home now.

        Both engines are to be charged meanwhile. Raises nothing but CancelledError.
        """
        engine, decode = handover.prefill.engine, decision.chosen.engine
        began = self._clock()
        estimate = handover.prefill.estimate
        # The first block comes only when those that are ahead of this prompt are prefilled.
        patience = min(self._limits.patience_seconds + estimate.total_seconds, MAX_PATIENCE_SECONDS)
        source = HintedSource(NodeId(engine.node_id), patience)
        if engine.node_id == decode.node_id:  # they share a daemon: nothing has to travel
            is_done = await self._prefill(handover, request, identity)
            blocks = len(decision.hashes) if is_done else 0
        else:
            with self._hinter.bring(
                decode, handover.kind.namespace_id, decision.hashes, source
            ) as hint:
                await self._handed_over(handover, request, identity, hint, decision)
                blocks = hint.readable_blocks
        self._metrics.remote_prefill_seconds.observe(self._clock() - began)
        return _with_blocks(decision, blocks, plan.prompt_tokens)

    async def _handed_over(
        self, handover: Handover, request: Request, identity: bytes, hint: Hint, decision: Decision
    ) -> None:
        """Return when all blocks are at the decode node, or no more is worth waiting for."""
        loop = asyncio.get_running_loop()
        prefilling = loop.create_task(self._prefill(handover, request, identity))
        coming = loop.create_task(hint.over())
        try:
            await asyncio.wait({prefilling, coming}, return_when=asyncio.FIRST_COMPLETED)
            during = hint.readable_blocks
            if not prefilling.done() and during < len(decision.hashes):
                # The way to the decode node is cut: what is computed now comes too late for it.
                self._metrics.remote_prefills.labels("cut").inc()
                return
            if not prefilling.done() and hint.is_over:
                # All is there: the answer tells only how long the prefill took.
                await asyncio.wait({prefilling}, timeout=self._limits.handover_seconds)
                if not prefilling.done():
                    self._metrics.remote_prefills.labels("unanswered").inc()
                    self._metrics.handover_blocks.labels("during").inc(during)
                    return
            if await prefilling:
                self._metrics.handover_blocks.labels("during").inc(during)
                waiting = self._clock()
                await asyncio.wait({coming}, timeout=self._limits.handover_seconds)
                self._metrics.handover_seconds.observe(self._clock() - waiting)
                after = max(0, hint.readable_blocks - during)  # fewer: some have left again
                self._metrics.handover_blocks.labels("after").inc(after)
        finally:
            for task in (prefilling, coming):
                task.cancel()
            await asyncio.wait({prefilling, coming})

    async def _prefill(self, handover: Handover, request: Request, identity: bytes) -> bool:
        """Whether the prefill engine has computed the prompt."""
        engine = handover.prefill.engine
        body = json.dumps(one_token(json.loads(request.body)), separators=(",", ":")).encode()
        raw = upstream_request(replace(request, body=body), engine, identity)
        with self._speeds.watch(engine.url) as watched:
            try:
                answer = await self._client.send(
                    engine, raw, request.path, self._limits.prefill_seconds
                )
            except UpstreamError as error:
                self._failed(engine, error)
                return False
            watched.answered()
            if answer.status != 200:
                self._metrics.remote_prefills.labels("refused").inc()
                log.info("prefill on %s: status %d", engine.name, answer.status)
                if answer.status in FAILED_STATUSES:
                    self._metrics.upstream_errors.labels(engine.name, str(answer.status)).inc()
                    engine.health.request_failed(self._clock())
                return False
            engine.health.request_succeeded()
            self._metrics.remote_prefills.labels("done").inc()
            worked = _worked(usage.from_json(answer.body))
            if worked is not None:
                watched.told(worked)
        return True

    def _failed(self, engine: Engine, error: UpstreamError) -> None:
        self._metrics.remote_prefills.labels("failed").inc()
        self._metrics.upstream_errors.labels(engine.name, type(error).__name__).inc()
        log.info("prefill on %s: %s", engine.name, error)
        now = self._clock()
        if isinstance(error, RefusedError):
            engine.health.refused(now)
            self._chooser.forget_routed(engine)
        else:
            engine.health.request_failed(now)


def one_token(body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill engine: the same prompt, one token, not streamed."""
    kept = {
        key: value
        for key, value in body.items()
        if key not in ("stream_options", "n", "best_of", "min_tokens")
    }
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return {**kept, "max_tokens": 1, "stream": False}


def _with_blocks(decision: Decision, blocks: int, prompt_tokens: int) -> Decision:
    """The decision once so many leading blocks of the chain are in its node's DRAM."""
    candidate, kind = decision.chosen.candidate, decision.kind
    assert kind is not None
    holding = candidate.holding
    if blocks * kind.block_tokens <= holding.hbm_tokens + holding.dram_tokens:
        return decision
    dram = blocks * kind.block_tokens - holding.hbm_tokens
    found = replace(holding, dram_tokens=dram, ssd_tokens=0, peer_tokens=0)
    handed = replace(candidate, holding=found)
    estimate = estimate_of(handed, prompt_tokens)
    return replace(decision, chosen=Scored(decision.chosen.engine, handed, estimate))


def _worked(delivered: usage.Delivered | None) -> Worked | None:
    """What the prefill engine did for its one token; None where it does not tell."""
    if delivered is None or not delivered.prompt_tokens:
        return None
    cached = min(delivered.cached_tokens, delivered.prompt_tokens)
    if cached and not delivered.by_source:
        return None
    computed = delivered.prompt_tokens - cached
    source = delivered.by_source.get
    return Worked(
        computed,
        attention_pairs(computed, delivered.prompt_tokens),
        source("dram", 0),
        source("ssd", 0),
        source("peer", 0),
    )
