"""Forwards one request to a chosen engine and its response back, untouched.

Until the first byte of a response has gone to the client another engine may be tried; after it
never. The client's going away cancels the task, which closes the upstream connection and releases
the charge on the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router import usage
from router.admission import Admission
from router.chunked import UntilCloseBody
from router.counts import Distribution
from router.decision import (
    Chooser,
    Decision,
    NoEngineError,
    Plan,
    SaturatedError,
    UnknownModelError,
)
from router.engines import Engine
from router.forwarding import client_head, request_id, upstream_request
from router.health import FAILED_STATUSES
from router.hints import Hinter
from router.hit_counts import count_hits
from router.http_message import Request, Response, error_response
from router.load import Charge, LoadLedger
from router.metrics import RouterMetrics
from router.relay import EventMeter, Relay
from router.remote_prefill import RemotePrefill
from router.request_body import BadBodyError, RequestBody, parse_body
from router.retry_budget import RetryBudget
from router.scoring import attention_pairs
from router.server_connection import ServerConnection
from router.sessions import session_of
from router.speeds import SpeedBook
from router.stretches import Watched, Worked
from router.tenants import TenantRefusedError, Tenants, Visit
from router.upstream_head import (
    DiedError,
    GarbledError,
    RefusedError,
    ResponseTimeoutError,
    UpstreamError,
)
from router.upstream_pool import Exchange, UpstreamPool
from router.waiting import BadPriorityError, read_priority

RETRY_BURST = 100
"""Retries that may be made at once, however few requests came before."""
MOST_UNEXPLAINED_TOKENS = 64
"""How far a hit may be from the predicted one to be taken for it: engines count in whole blocks."""
PRIORITY_HEADER = b"x-emberkv-priority"


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """`retries`: further engines tried; `retry_after_seconds`: said with 503."""

    retries: int
    retry_after_seconds: int
    retry_share: float = 0.2
    """Of all requests, how many may be retries."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What to tell the client if no other engine can answer; `why`: label of a counter."""

    response: Response
    why: str


@dataclass(slots=True, eq=False)
class _Attempt:
    """One try of one request."""

    request: Request
    request_id: bytes
    client: ServerConnection
    plan: Plan
    decision: Decision
    tried: frozenset[str]
    """Engines asked so far, this one included."""
    visit: Visit | None
    began: float
    first_byte: Distribution

    @property
    def engine(self) -> Engine:
        return self.decision.chosen.engine


def work_until_first_byte(
    decision: Decision, delivered: usage.Delivered | None, is_stream: bool
) -> Worked | None:
    """What an engine did before its first byte, by its own word; None where that is not known.

    A whole answer's first byte comes after its last token, so only one of one token tells. Where
    tokens came from is the engine's word, or else what was predicted if as many were cached.
    """
    if delivered is None or not delivered.prompt_tokens:
        return None
    if not is_stream and delivered.completion_tokens != 1:
        return None
    cached = min(delivered.cached_tokens, delivered.prompt_tokens)
    computed = delivered.prompt_tokens - cached
    pairs = attention_pairs(computed, delivered.prompt_tokens)
    if delivered.by_source or not cached:
        source = delivered.by_source.get
        return Worked(computed, pairs, source("dram", 0), source("ssd", 0), source("peer", 0))
    used = decision.chosen.estimate.used
    if abs(decision.predicted_hit_tokens - cached) > MOST_UNEXPLAINED_TOKENS:
        return None
    return Worked(computed, pairs, used.dram_tokens, used.ssd_tokens, used.peer_tokens)


class Proxy:
    """The hot path. On the event loop; one call per request."""

    def __init__(
        self,
        chooser: Chooser,
        admission: Admission,
        ledger: LoadLedger,
        speeds: SpeedBook,
        pool: UpstreamPool,
        metrics: RouterMetrics,
        limits: ProxyLimits,
        hinter: Hinter,
        remote_prefill: RemotePrefill,
        tenants: Tenants | None = None,
    ) -> None:
        self._hinter = hinter
        self._remote_prefill = remote_prefill
        self._tenants = tenants
        self._chooser = chooser
        self._admission = admission
        self._ledger = ledger
        self._speeds = speeds
        self._pool = pool
        self._metrics = metrics
        self._retries = limits.retries
        self.retry_budget = RetryBudget(limits.retry_share, RETRY_BURST)
        self._retry_after = ((b"retry-after", b"%d" % limits.retry_after_seconds),)
        self._loop = asyncio.get_running_loop()

    async def complete(self, request: Request, client: ServerConnection) -> None:
        """Answer a completion: choose an engine and forward."""
        await self._answering(client, self._complete(request, client))

    async def complete_unread(self, request: Request, client: ServerConnection) -> None:
        """The same for an endpoint whose prompt is not read: by load, and soft by session."""
        await self._answering(client, self._complete_unread(request, client))

    async def pass_on(self, request: Request, client: ServerConnection) -> None:
        """Forward a request that computes nothing to any engine of its model."""
        await self._answering(client, self._pass_on(request, client))

    async def _answering(self, client: ServerConnection, work: Awaitable[None]) -> None:
        """Do `work`; what nobody could answer becomes an error of ours."""
        try:
            await work
        except asyncio.CancelledError:
            self._metrics.aborts.inc()
            raise
        except BadBodyError as error:
            self._refuse(client, error_response(400, str(error), code="invalid_json"))
        except UnknownModelError as error:
            self._metrics.refused.labels("unknown_model").inc()
            self._refuse(client, error_response(404, str(error), code="model_not_found"))
        except TenantRefusedError as refused:
            self._metrics.refused.labels(refused.why).inc()
            self._refuse(client, refused.response)
        except BadPriorityError as error:
            self._refuse(client, error_response(400, str(error), code="invalid_priority"))
        except NoEngineError as error:
            self._metrics.refused.labels("no_engine").inc()
            self._refuse(client, error_response(503, str(error), self._retry_after))

    async def _complete(self, request: Request, client: ServerConnection) -> None:
        body = parse_body(request.body)
        if self._tenants is None:
            await self._serve(request, body, client, None, self._plan_read)
            return
        with self._tenants.visit(request.tenant) as visit:
            sealed = self._tenants.sealed(request, body)
            await self._serve(sealed, body, client, visit, self._plan_read)

    async def _complete_unread(self, request: Request, client: ServerConnection) -> None:
        body = parse_body(request.body)
        if self._tenants is None:
            await self._serve(request, body, client, None, self._plan_unread)
            return
        with self._tenants.visit(request.tenant) as visit:
            sealed = self._tenants.sealed(request, body)
            await self._serve(sealed, body, client, visit, self._plan_unread)

    async def _plan_read(self, request: Request, body: RequestBody) -> Plan:
        return await self._chooser.plan(body, len(request.body))

    async def _plan_unread(self, request: Request, body: RequestBody) -> Plan:
        return self._chooser.plan_unread(body, len(request.body), session_of(request, body))

    async def _serve(
        self,
        request: Request,
        body: RequestBody,
        client: ServerConnection,
        visit: Visit | None,
        make_plan: Callable[[Request, RequestBody], Awaitable[Plan]],
    ) -> None:
        began = self._loop.time()
        priority = read_priority(request.header(PRIORITY_HEADER), body.get("priority"))
        if visit is not None:
            visit.check_model(body.text("model"))
            priority = visit.allowed(priority)
        plan = await make_plan(request, body)
        if visit is not None:
            visit.spend_prompt(plan.prompt_tokens)
        try:
            decision = self._admission.try_now(plan, priority)
            self._metrics.decision_seconds.observe(self._loop.time() - began)
            if decision is None:
                decision = await self._admission.wait(plan, priority)
        except SaturatedError as error:
            if visit is not None:
                visit.return_prompt(plan.prompt_tokens)
            self._refuse_saturated(client, plan, error)
            return
        if decision.is_exploring:
            self._metrics.explored.inc()
        await self._forward(request, client, plan, decision, visit)

    async def _pass_on(self, request: Request, client: ServerConnection) -> None:
        body = parse_body(request.body)
        if self._tenants is None:
            await self._pass_body_on(request, body, client)
            return
        with self._tenants.visit(request.tenant) as visit:
            visit.check_model(body.text("model"))
            await self._pass_body_on(request, body, client)

    async def _pass_body_on(
        self, request: Request, body: RequestBody, client: ServerConnection
    ) -> None:
        plan = Plan(body.text("model"), 1, None)
        try:
            decision = self._chooser.choose(plan, ())
        except SaturatedError as error:
            self._refuse_saturated(client, plan, error)
            return
        await self._forward(request, client, plan, decision, None)

    async def _forward(
        self,
        request: Request,
        client: ServerConnection,
        plan: Plan,
        decision: Decision,
        visit: Visit | None,
    ) -> None:
        identity, began = request_id(request), self._loop.time()
        self.retry_budget.requested()
        tried: frozenset[str] = frozenset()
        handover = self._remote_prefill.planned(plan, decision)
        if handover is not None:
            remote = self._remote_prefill.run(handover, request, identity, plan, decision)
            decision = await remote
        first_byte = self._metrics.first_byte_seconds.labels("remote" if handover else "local")
        while True:
            tried |= {decision.chosen.engine.url}
            attempt = _Attempt(
                request, identity, client, plan, decision, tried, visit, began, first_byte
            )
            failure = await self._try(attempt)
            if failure is None:
                return
            if not self._may_retry(attempt):
                self._refuse(client, failure.response)
                return
            if not self.retry_budget.take():
                self._metrics.retries_denied.inc()
                self._refuse(client, failure.response)
                return
            self._metrics.retries.labels(failure.why).inc()
            decision = self._chooser.choose(plan, tried)

    def _may_retry(self, attempt: _Attempt) -> bool:
        return len(attempt.tried) <= self._retries and self._chooser.has_other(
            attempt.plan, attempt.tried
        )

    async def _try(self, attempt: _Attempt) -> _Failure | None:
        """Return None when the client was answered, else what to tell it if no other engine can."""
        engine = attempt.engine
        uncached = attempt.decision.chosen.estimate.uncached_tokens
        pairs = attention_pairs(uncached, attempt.plan.prompt_tokens)
        with (
            self._ledger.charge(engine.url, uncached, pairs) as charge,
            self._speeds.watch(engine.url) as watched,
            self._hinter.queued(attempt.decision),
        ):
            self._chooser.note_routed(attempt.decision)
            try:
                exchange = await self._pool.begin(
                    engine, upstream_request(attempt.request, engine, attempt.request_id)
                )
            except ResponseTimeoutError as error:
                self._engine_failed(engine, error)
                self._refuse(attempt.client, error_response(504, str(error)))
                return None
            except UpstreamError as error:
                self._engine_failed(engine, error)
                text = f"engine {engine.name}: {error}"
                return _Failure(error_response(502, text), type(error).__name__)
            status = exchange.head.status
            if status in FAILED_STATUSES:
                engine.health.request_failed(self._loop.time())
                self._metrics.upstream_errors.labels(engine.name, str(status)).inc()
                if self._may_retry(attempt):
                    exchange.connection.abort()
                    text = f"engine {engine.name} answered {status}"
                    return _Failure(error_response(status, text), str(status))
            else:
                engine.health.request_succeeded()
            await self._relay(attempt, exchange, charge, watched)
            return None

    async def _relay(
        self, attempt: _Attempt, exchange: Exchange, charge: Charge, watched: Watched
    ) -> None:
        head, client = exchange.head, attempt.client
        is_http_11 = attempt.request.http_version == "1.1"
        body = head.body() if is_http_11 else head.payload_body()
        ends_by_close = isinstance(body, UntilCloseBody) or (head.is_chunked and not is_http_11)
        keep_alive = client.wants_keep_alive and not ends_by_close
        added = [
            (b"x-emberkv-engine", attempt.engine.name.encode("latin-1", "replace")),
            (b"x-emberkv-hit-tokens", b"%d" % attempt.decision.predicted_hit_tokens),
            (b"x-request-id", attempt.request_id),
        ]
        framing = b"transfer-encoding: chunked\r\n" if head.is_chunked and is_http_11 else b""
        preface = client_head(head, added, framing=framing, keep_alive=keep_alive)
        write = client.start(keep_alive)
        meter = EventMeter(write)
        if attempt.visit is not None:
            write = meter.write
        if not exchange.connection.has_early_bytes:
            write(preface)
            preface = b""

        def begun() -> None:
            charge.prefilled()
            watched.answered()
            attempt.first_byte.observe(self._loop.time() - attempt.began)

        relay = Relay(head, body, write, begun, preface)
        client.attach(exchange.connection)
        self._metrics.requests.labels(attempt.engine.name, head.status).inc()
        try:
            await exchange.connection.relay(head, body, relay.piece)
            relay.flush()
        except DiedError as error:
            self._engine_failed(attempt.engine, error)
            relay.flush()
            message = f"engine {attempt.engine.name} ended in the middle of its answer"
            if isinstance(error, GarbledError) or not relay.end_broken(message):
                client.abort()
            client.close_after_response()
            return
        finally:
            client.detach()
            if attempt.visit is not None and head.status == 200:
                # Also of an answer that was cut: else whoever hangs up in time pays nothing.
                attempt.visit.spend_answer(relay.answered_tokens() or meter.tokens)
        charge.finished()
        if head.status == 200:
            delivered = relay.delivered()
            count_hits(self._metrics, attempt.decision, delivered)
            worked = work_until_first_byte(attempt.decision, delivered, relay.is_stream)
            if worked is not None:
                watched.told(worked)

    def _engine_failed(self, engine: Engine, error: UpstreamError) -> None:
        self._metrics.upstream_errors.labels(engine.name, type(error).__name__).inc()
        now = self._loop.time()
        if isinstance(error, RefusedError):
            engine.health.refused(now)
            self._chooser.forget_routed(engine)
        else:
            engine.health.request_failed(now)

    def _refuse_saturated(
        self, client: ServerConnection, plan: Plan, error: SaturatedError
    ) -> None:
        self._metrics.refused.labels(error.why).inc()
        seconds = self._admission.retry_after_seconds(plan.model)
        after = ((b"retry-after", b"%d" % seconds),)
        self._refuse(client, error_response(429, str(error), after))

    def _refuse(self, client: ServerConnection, response: Response) -> None:
        self._metrics.requests.labels("", response.status).inc()
        client.respond(response)
