"""From a client's request to an engine: read, plan, choose, send. The hot path.

Whatever is here at once (the tokens of a known prompt, the index in this process, room on an
engine) is used at once: the request has left for its engine before the bytes that brought it have
been let go of, without a task. What has to be waited for goes on in a task and comes back to the
same steps. From there on trip.py tells the story.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router.admission import Admission
from router.decision import (
    Chooser,
    Decision,
    NoEngineError,
    Plan,
    SaturatedError,
    UnknownModelError,
)
from router.hints import Hinter
from router.http_message import Request, error_response
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.remote_prefill import Handover, RemotePrefill
from router.request_body import BadBodyError, RequestBody, parse_body
from router.retry_budget import RetryBudget
from router.server_connection import ServerConnection
from router.sessions import session_of
from router.speeds import SpeedBook
from router.tenants import TenantRefusedError, Tenants
from router.trip import Road, Trip
from router.upstream_pool import UpstreamPool
from router.waiting import BadPriorityError, Priority, read_priority

RETRY_BURST = 100
"""Retries that may be made at once, however few requests came before."""
PRIORITY_HEADER = b"x-emberkv-priority"


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """`retries`: other engines tried; `retry_after_seconds`: said with 503."""

    retries: int
    retry_after_seconds: int
    retry_share: float = 0.2
    """Of all requests, how many may be retries."""


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
        self._remote_prefill = remote_prefill
        self._tenants = tenants
        self._chooser = chooser
        self._admission = admission
        self._metrics = metrics
        self.retry_budget = RetryBudget(limits.retry_share, RETRY_BURST)
        self._retry_after = ((b"retry-after", b"%d" % limits.retry_after_seconds),)
        self._loop = asyncio.get_running_loop()
        self._road = Road(
            chooser,
            ledger,
            speeds,
            pool,
            metrics,
            hinter,
            limits.retries,
            self.retry_budget,
            self._loop,
        )

    # ---- what routes call ----

    def complete(self, request: Request, client: ServerConnection) -> None:
        """Answer a completion: choose an engine and forward."""
        self._start(Trip(self._road, request, client), self._complete)

    def complete_unread(self, request: Request, client: ServerConnection) -> None:
        """The same for an endpoint whose prompt is not read: by load, and soft by session."""
        self._start(Trip(self._road, request, client), self._complete_unread)

    def pass_on(self, request: Request, client: ServerConnection) -> None:
        """Forward a request that computes nothing to any engine of its model."""
        self._start(Trip(self._road, request, client), self._pass_on)

    # ---- the steps ----

    def _complete(self, trip: Trip) -> None:
        began = self._loop.time()
        body = parse_body(trip.request.body)
        priority = self._admitted(trip, body)
        plan = self._chooser.plan_now(body, len(trip.request.body))
        if plan is None:
            self._wait(trip, lambda: self._plan_later(trip, body, priority, began))
        else:
            self._choose(trip, plan, priority, began)

    def _complete_unread(self, trip: Trip) -> None:
        began = self._loop.time()
        body = parse_body(trip.request.body)
        priority = self._admitted(trip, body)
        session = session_of(trip.request, body)
        plan = self._chooser.plan_unread(body, len(trip.request.body), session)
        self._choose(trip, plan, priority, began)

    def _pass_on(self, trip: Trip) -> None:
        model = parse_body(trip.request.body).text("model")
        if self._tenants is not None:
            trip.visit = self._tenants.enter(trip.request.tenant)
            trip.visit.check_model(model)
        plan = trip.plan = Plan(model, 1, None)
        trip.send(self._chooser.choose(plan, ()))

    def _admitted(self, trip: Trip, body: RequestBody) -> Priority:
        """The request's class; with tenants its visit has begun, and its body has their salt."""
        tenants = self._tenants
        if tenants is None:
            return read_priority(trip.request.header(PRIORITY_HEADER), body.get("priority"))
        visit = trip.visit = tenants.enter(trip.request.tenant)
        trip.request = tenants.sealed(trip.request, body)
        priority = read_priority(trip.request.header(PRIORITY_HEADER), body.get("priority"))
        visit.check_model(body.text("model"))
        return visit.allowed(priority)

    def _choose(self, trip: Trip, plan: Plan, priority: Priority, began: float) -> None:
        decision = self._chosen_now(trip, plan, priority, began)
        if decision is None:
            self._wait(trip, lambda: self._stand_in_line(trip, plan, priority))
            return
        handover = self._remote_prefill.planned(plan, decision)
        if handover is None:
            trip.send(decision)
        else:
            # Charged here: who comes next must not find its engines idle.
            trip.held = self._remote_prefill.charge(handover, plan, decision)
            self._wait(trip, lambda: self._hand_over(trip, handover, decision))

    def _chosen_now(
        self, trip: Trip, plan: Plan, priority: Priority, began: float
    ) -> Decision | None:
        """The engine, or None where the request has to wait in line for one."""
        if trip.visit is not None:
            trip.visit.spend_prompt(plan.prompt_tokens)
            trip.is_metered = True
        trip.plan = plan
        decision = self._admission.try_now(plan, priority)
        self._metrics.decision_seconds.observe(self._loop.time() - began)
        if decision is not None and decision.is_exploring:
            self._metrics.explored.inc()
        return decision

    # ---- the same, where something has to be waited for ----

    async def _plan_later(
        self, trip: Trip, body: RequestBody, priority: Priority, began: float
    ) -> None:
        plan = await self._chooser.plan(body, len(trip.request.body))
        decision = self._chosen_now(trip, plan, priority, began)
        if decision is None:
            await self._stand_in_line(trip, plan, priority)
        else:
            await self._send(trip, decision)

    async def _stand_in_line(self, trip: Trip, plan: Plan, priority: Priority) -> None:
        decision = await self._admission.wait(plan, priority)
        if decision.is_exploring:
            self._metrics.explored.inc()
        await self._send(trip, decision)

    async def _send(self, trip: Trip, decision: Decision) -> None:
        """What `wait` of admission chose is charged here before anything else is waited for."""
        handover = self._remote_prefill.planned(trip.plan, decision)
        if handover is None:
            trip.send(decision)
        else:
            trip.held = self._remote_prefill.charge(handover, trip.plan, decision)
            await self._hand_over(trip, handover, decision)

    async def _hand_over(self, trip: Trip, handover: Handover, decision: Decision) -> None:
        """Have the prompt prefilled elsewhere first."""
        trip.identify()
        decision = await self._remote_prefill.run(
            handover, trip.request, trip.identity, trip.plan, decision
        )
        trip.let_go()
        trip.send(decision, prefill="remote")

    # ---- how steps are taken ----

    def _start(self, trip: Trip, step: Callable[[Trip], None]) -> None:
        trip.client.answer_by(trip)
        try:
            step(trip)
        except Exception as error:
            self._answer_error(trip, error)

    def _wait(self, trip: Trip, work: Callable[[], Awaitable[None]]) -> None:
        trip.wait_for(self._loop.create_task(self._waiting(trip, work)))

    async def _waiting(self, trip: Trip, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._answer_error(trip, error)

    def _answer_error(self, trip: Trip, error: Exception) -> None:
        """What nobody could answer becomes an error of ours."""
        refused = self._metrics.refused.labels
        if isinstance(error, BadBodyError):
            trip.refuse(error_response(400, str(error), code="invalid_json"))
        elif isinstance(error, UnknownModelError):
            refused("unknown_model").inc()
            trip.refuse(error_response(404, str(error), code="model_not_found"))
        elif isinstance(error, TenantRefusedError):
            refused(error.why).inc()
            trip.refuse(error.response)
        elif isinstance(error, BadPriorityError):
            trip.refuse(error_response(400, str(error), code="invalid_priority"))
        elif isinstance(error, NoEngineError):
            refused("no_engine").inc()
            trip.refuse(error_response(503, str(error), self._retry_after))
        elif isinstance(error, SaturatedError):
            refused(error.why).inc()
            if trip.visit is not None and trip.is_metered:
                trip.visit.return_prompt(trip.plan.prompt_tokens)
            seconds = self._admission.retry_after_seconds(trip.plan.model)
            after = ((b"retry-after", b"%d" % seconds),)
            trip.refuse(error_response(429, str(error), after))
        else:
            trip.broke(error)
