"""One request on its way to a chosen engine, and the answer's way back, untouched.

No task and no future: the engine's connection calls `answered`, then `ended`, or `failed`; the
client's connection calls `cancel` when the client goes away. Until the first byte of a response has
gone to the client another engine may be tried; after it never. Whatever happens, `_over` is where a
trip ends: by then its charge is released, once, and no engine works on it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass

from router import usage
from router.chunked import UntilCloseBody
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
from router.retry_budget import RetryBudget
from router.scoring import attention_pairs
from router.server_connection import ServerConnection
from router.speeds import SpeedBook
from router.stretches import Watched, Worked
from router.tenants import Visit
from router.upstream import StaleError, UpstreamConnection
from router.upstream_head import (
    GarbledError,
    RefusedError,
    ResponseHead,
    ResponseTimeoutError,
    UpstreamError,
)
from router.upstream_pool import UpstreamPool

log = logging.getLogger(__name__)
MOST_UNEXPLAINED_TOKENS = 64
"""How far a hit may be from the predicted one to be taken for it: engines count in whole blocks."""


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


@dataclass(slots=True, eq=False)
class Road:
    """What all trips of a router share."""

    chooser: Chooser
    ledger: LoadLedger
    speeds: SpeedBook
    pool: UpstreamPool
    metrics: RouterMetrics
    hinter: Hinter
    retries: int
    retry_budget: RetryBudget
    loop: asyncio.AbstractEventLoop


class Trip:
    """Answers one request of a client. All calls on the event loop."""

    __slots__ = (
        "_began",
        "_charge",
        "_decision",
        "_head",
        "_hint",
        "_meter",
        "_prefill",
        "_relay",
        "_road",
        "_task",
        "_tried",
        "_watched",
        "client",
        "connection",
        "held",
        "identity",
        "is_metered",
        "is_over",
        "plan",
        "request",
        "visit",
    )

    def __init__(self, road: Road, request: Request, client: ServerConnection) -> None:
        self._road = road
        self.client = client
        self.request = request
        self.visit: Visit | None = None
        """Of a tenant; left when the trip is over."""
        self.is_metered = False
        """Whether the visit pays for this request's tokens."""
        self.plan: Plan
        """Once there is one."""
        self.identity = b""
        """The request's id, once engines are asked."""
        self.held: AbstractContextManager[object] | None = None
        """Charges of a prefill elsewhere."""
        self._task: asyncio.Task[None] | None = None
        """What goes on before an engine can be asked."""
        self._charge: Charge | None = None
        self._meter: EventMeter | None = None
        self.connection: UpstreamConnection | None = None
        """On which the engine was asked and has not answered to the end."""
        self.is_over = False
        self._head: ResponseHead | None = None
        """Of the answer that is being relayed."""
        self._tried: frozenset[str] = frozenset()
        """Engines asked so far."""

    # ---- before an engine is asked ----

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """The trip goes on in this task, for now."""
        self._task = task

    def refuse(self, response: Response) -> None:
        """Answer with an error of ours, in place of an engine."""
        if self.is_over:
            return
        self._road.metrics.requests.labels("", response.status).inc()
        self.client.respond(response)
        self._over()

    def broke(self, error: Exception) -> None:
        """Something that nobody foresaw: the client is told so, or cut."""
        log.error("%s %s failed", self.request.method, self.request.path, exc_info=error)
        self._leave_engine()
        if self.client.has_started:
            self.client.abort()
            self._over()
        else:
            self.refuse(error_response(500, "internal error of the router"))

    def cancel(self) -> None:
        """The client is gone, or the drain is over: nobody works on it from here on."""
        self._road.metrics.aborts.inc()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._leave_engine()
        self.client.abort()
        self._over()

    def identify(self) -> None:
        """Engines are asked from now on."""
        self._began = self._road.loop.time()
        self.identity = request_id(self.request)
        self._road.retry_budget.requested()

    def let_go(self) -> None:
        """Release what is held for a prefill elsewhere, if anything is."""
        held, self.held = self.held, None
        if held is not None:
            held.__exit__(None, None, None)

    # ---- asking an engine ----

    def send(self, decision: Decision, prefill: str = "local") -> None:
        """Ask the chosen engine. `prefill`: where the prompt is prefilled, as a metric's label."""
        if self.is_over:
            return
        self._task = None
        self._prefill = prefill
        if not self.identity:
            self.identify()
        self._ask(decision)

    def _ask(self, decision: Decision) -> None:
        road, chosen = self._road, decision.chosen
        self._decision = decision
        url = chosen.engine.url
        self._tried |= {url}
        uncached = chosen.estimate.uncached_tokens
        pairs = attention_pairs(uncached, self.plan.prompt_tokens)
        self._watched: Watched = road.speeds.watch(url)
        self._hint: AbstractContextManager[object] | None = None
        self._charge = road.ledger.charge(url, uncached, pairs)
        hint = road.hinter.queued(decision)
        if hint is not None:
            hint.__enter__()
            self._hint = hint  # from here on it has an end
        road.chooser.note_routed(decision)
        self._send_bytes(chosen.engine)

    def _send_bytes(self, engine: Engine) -> None:
        payload = upstream_request(self.request, engine, self.identity)
        self._road.pool.send(engine, payload, self)

    def answered(self, head: ResponseHead) -> None:
        """The engine's head came; its body follows, perhaps in the same bytes."""
        try:
            self._answered(head)
        except Exception as error:
            self.broke(error)

    def failed(self, error: UpstreamError) -> None:
        """The engine, or the way there, gave up; the connection is closed."""
        self.connection = None
        try:
            self._failed(error)
        except Exception as unforeseen:
            self.broke(unforeseen)

    def ended(self) -> None:
        """The engine's answer is complete."""
        self.connection = None
        try:
            self._ended()
        except Exception as error:
            self.broke(error)

    def _answered(self, head: ResponseHead) -> None:
        engine, status = self._decision.chosen.engine, head.status
        if status in FAILED_STATUSES:
            engine.health.request_failed(self._road.loop.time())
            self._road.metrics.upstream_errors.labels(engine.name, str(status)).inc()
            if self._may_retry():
                text = f"engine {engine.name} answered {status}"
                self._leave_engine()
                self._try_another(error_response(status, text), str(status))
                return
        else:
            engine.health.request_succeeded()
        self._relay_to_client(head)

    def _failed(self, error: UpstreamError) -> None:
        engine = self._decision.chosen.engine
        if self._head is not None:
            self._died(error)
        elif isinstance(error, StaleError):
            self._road.pool.close_idle(engine.url)  # no failure: another connection
            self._send_bytes(engine)
        else:
            self._engine_failed(engine, error)
            self._leave_engine()
            if isinstance(error, ResponseTimeoutError):
                self.refuse(error_response(504, f"{engine.name}: {error}"))
            else:
                response = error_response(502, f"engine {engine.name}: {error}")
                self._try_another(response, type(error).__name__)

    def _may_retry(self) -> bool:
        road = self._road
        return len(self._tried) <= road.retries and road.chooser.has_other(self.plan, self._tried)

    def _try_another(self, refusal: Response, why: str) -> None:
        """Ask another engine, or answer with `refusal`."""
        road = self._road
        if not self._may_retry():
            self.refuse(refusal)
        elif not road.retry_budget.take():
            road.metrics.retries_denied.inc()
            self.refuse(refusal)
        else:
            road.metrics.retries.labels(why).inc()
            try:
                decision = road.chooser.choose(self.plan, self._tried)
            except (NoEngineError, UnknownModelError, SaturatedError):
                self.refuse(refusal)
            else:
                self._ask(decision)

    # ---- the answer ----

    def _relay_to_client(self, head: ResponseHead) -> None:
        client, decision, connection = self.client, self._decision, self.connection
        assert connection is not None
        name = decision.chosen.engine.name
        is_http_11 = self.request.http_version == "1.1"
        body = head.body() if is_http_11 else head.payload_body()
        ends_by_close = type(body) is UntilCloseBody or (head.is_chunked and not is_http_11)
        keep_alive = client.wants_keep_alive and not ends_by_close
        preface = client_head(
            head,
            name.encode("latin-1", "replace"),
            decision.predicted_hit_tokens,
            self.identity,
            framing=b"transfer-encoding: chunked\r\n" if head.is_chunked and is_http_11 else b"",
            keep_alive=keep_alive,
        )
        write = client.start(keep_alive)
        if self.is_metered:
            self._meter = EventMeter(write)
            write = self._meter.write
        if not connection.has_early_bytes:
            write(preface)
            preface = b""
        self._head = head
        self._relay = Relay(head, body, write, preface)
        client.attach(connection)
        self._road.metrics.requests.labels(name, head.status).inc()
        connection.follow(head, body, self._first_piece)

    def _first_piece(self, data: bytes) -> None:
        """The body begins; its other pieces go to the client straight."""
        road, connection = self._road, self.connection
        self._relay.begin(data)
        if connection is not None:
            connection.sink = self._relay.piece
        if self._charge is not None:
            self._charge.prefilled()
        self._watched.answered()
        seconds = road.loop.time() - self._began
        road.metrics.first_byte_seconds.labels(self._prefill).observe(seconds)

    def _ended(self) -> None:
        relay, decision, charge = self._relay, self._decision, self._charge
        assert charge is not None
        relay.flush()
        charge.finished()
        if self._head is not None and self._head.status == 200:
            delivered = relay.delivered()
            count_hits(self._road.metrics, decision, delivered)
            worked = work_until_first_byte(decision, delivered, relay.is_stream)
            if worked is not None:
                self._watched.told(worked)
        self._leave_engine()
        self._over()

    def _died(self, error: UpstreamError) -> None:
        """In the middle of its answer; the client of a stream is told, another one is cut."""
        engine, relay, client = self._decision.chosen.engine, self._relay, self.client
        self._engine_failed(engine, error)
        relay.flush()
        message = f"engine {engine.name} ended in the middle of its answer"
        if isinstance(error, GarbledError) or not relay.end_broken(message):
            client.abort()
        client.close_after_response()
        self._leave_engine()
        self._over()

    def _engine_failed(self, engine: Engine, error: UpstreamError) -> None:
        road = self._road
        road.metrics.upstream_errors.labels(engine.name, type(error).__name__).inc()
        now = road.loop.time()
        if isinstance(error, RefusedError):
            engine.health.refused(now)
            road.chooser.forget_routed(engine)
        else:
            engine.health.request_failed(now)

    # ---- the end ----

    def _leave_engine(self) -> None:
        """End what was begun for one engine; nothing where nothing was."""
        if self.connection is not None:
            self.connection.drop()
            self.connection = None
        head, self._head = self._head, None
        if head is not None and head.status == 200 and self._meter is not None and self.visit:
            # Also of an answer that was cut: else whoever hangs up in time pays nothing.
            self.visit.spend_answer(self._relay.answered_tokens() or self._meter.tokens)
        charge, self._charge = self._charge, None
        if charge is not None:
            if self._hint is not None:
                self._hint.__exit__(None, None, None)
            self._watched.leave()
            charge.release()

    def _over(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._task = None
        self.let_go()
        if self.visit is not None:
            self.visit.leave()
        self.client.ended()
