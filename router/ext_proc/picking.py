"""Where Envoy shall send a request: the router's own plan, line and choice, its limits and keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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
from router.engines import Engine, EngineTable
from router.ext_proc.addresses import Addresses
from router.ext_proc.messages import HeadChange
from router.ext_proc.passage import Passage
from router.http_message import Request, Response, error_response
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.proxy import PRIORITY_HEADER
from router.request_body import BadBodyError, RequestBody, parse_body
from router.speeds import SpeedBook
from router.tenants import SECRET_HEADERS, TenantRefusedError, Tenants, Visit
from router.waiting import BadPriorityError, read_priority

MODEL_HEADER = b"x-gateway-model-name"
"""The gateways' own name for the model, for requests whose body is not shown."""
UNCOMPUTED_PATHS = frozenset({"/tokenize", "/detokenize"})


class RefusedError(Exception):
    """What Envoy shall answer instead of sending the request on."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as Envoy shows it."""

    request: Request
    has_whole_body: bool
    """False: there is one, but `request.body` is not all of it."""
    subset: frozenset[str] | None = None
    """Endpoints that may be chosen; None: all."""


@dataclass(frozen=True, slots=True)
class Picked:
    """What Envoy is told, and the passage that is open while it is on its way."""

    change: HeadChange
    body: bytes | None
    """In place of the client's, where it differs."""
    passage: Passage


class Picker:
    """Chooses for Envoy as the proxy does for itself. On the event loop."""

    def __init__(
        self,
        chooser: Chooser,
        admission: Admission,
        engines: EngineTable,
        ledger: LoadLedger,
        speeds: SpeedBook,
        metrics: RouterMetrics,
        tenants: Tenants | None,
        addresses: Addresses,
        fallbacks: int,
        retry_after_seconds: int,
        clock: Callable[[], float],
    ) -> None:
        self._chooser = chooser
        self._admission = admission
        self._engines = engines
        self._ledger = ledger
        self._speeds = speeds
        self._metrics = metrics
        self._tenants = tenants
        self._addresses = addresses
        self._fallbacks = fallbacks
        self._retry_after = ((b"retry-after", b"%d" % retry_after_seconds),)
        self._clock = clock

    async def pick(self, asked: Asked, held: ExitStack) -> Picked:
        """Choose, waiting in line if need be; the passage is open until `held` is closed.

        Raises RefusedError: nobody may or can answer.
        """
        try:
            return await self._pick(asked, held)
        except BadBodyError as error:
            refused = error_response(400, str(error), code="invalid_json")
        except BadPriorityError as error:
            refused = error_response(400, str(error), code="invalid_priority")
        except UnknownModelError as error:
            self._metrics.refused.labels("unknown_model").inc()
            refused = error_response(404, str(error), code="model_not_found")
        except TenantRefusedError as error:
            self._metrics.refused.labels(error.why).inc()
            refused = error.response
        except NoEngineError as error:
            self._metrics.refused.labels("no_engine").inc()
            refused = error_response(503, str(error), self._retry_after)
        raise RefusedError(refused)

    def engine_at(self, endpoint: str) -> Engine | None:
        """The engine with this ip:port."""
        return next((e for e in self._engines if self._addresses.of(e) == endpoint), None)

    async def _pick(self, asked: Asked, held: ExitStack) -> Picked:
        request, tenants = asked.request, self._tenants
        visit: Visit | None = None
        if tenants is not None:
            request = tenants.identified(request)
            visit = held.enter_context(tenants.visit(request.tenant))
        body = _body_of(request, is_whole=asked.has_whole_body)
        if tenants is not None and visit is not None:
            if not asked.has_whole_body:
                raise TenantRefusedError("unsealed", error_response(501, _NEEDS_BODY))
            visit.check_model(_model_of(body))
            if request.body:
                request = tenants.sealed(request, body)
        decision, plan = await self._decide(request, body, asked.subset, visit)
        engines = [decision.chosen.engine, *self._others(plan, decision)]
        passage = held.enter_context(
            Passage(
                self._chooser,
                self._ledger,
                self._speeds,
                self._metrics,
                plan,
                decision,
                engines,
                visit,
            )
        )
        return Picked(self._change(asked, request, engines), _new_body(asked, request), passage)

    async def _decide(
        self,
        request: Request,
        body: RequestBody,
        subset: frozenset[str] | None,
        visit: Visit | None,
    ) -> tuple[Decision, Plan]:
        began = self._clock()
        if request.method == "GET" or request.path in UNCOMPUTED_PATHS:
            plan = Plan(_model_of(body), 1, None, excluded=self._excluded(subset))
            try:
                return self._chooser.choose(plan, ()), plan
            except SaturatedError as error:
                raise self._saturated(plan, error) from None
        priority = read_priority(request.header(PRIORITY_HEADER), body.get("priority"))
        if visit is not None:
            priority = visit.allowed(priority)
        plan = await self._chooser.plan(body, _body_bytes(request))
        plan.excluded = self._excluded(subset)
        if visit is not None:
            visit.spend_prompt(plan.prompt_tokens)
        try:
            decision = self._admission.try_now(plan, priority)
            self._metrics.decision_seconds.observe(self._clock() - began)
            if decision is None:
                decision = await self._admission.wait(plan, priority)
        except SaturatedError as error:
            if visit is not None:
                visit.return_prompt(plan.prompt_tokens)
            raise self._saturated(plan, error) from None
        if decision.is_exploring:
            self._metrics.explored.inc()
        return decision, plan

    def _others(self, plan: Plan, decision: Decision) -> list[Engine]:
        """Whom Envoy may try next, by the same choice."""
        tried = {decision.chosen.engine.url}
        found: list[Engine] = []
        while len(found) < self._fallbacks:
            try:
                engine = self._chooser.choose(plan, tried).chosen.engine
            except (NoEngineError, UnknownModelError, SaturatedError):
                break
            tried.add(engine.url)
            found.append(engine)
        return found

    def _excluded(self, subset: frozenset[str] | None) -> frozenset[str]:
        """Engines without an address, and those that Envoy does not offer."""
        addresses = ((engine.url, self._addresses.of(engine)) for engine in self._engines)
        return frozenset(
            url
            for url, address in addresses
            if address is None or (subset is not None and address not in subset)
        )

    def _saturated(self, plan: Plan, error: SaturatedError) -> RefusedError:
        self._metrics.refused.labels(error.why).inc()
        seconds = self._admission.retry_after_seconds(plan.model)
        after = ((b"retry-after", b"%d" % seconds),)
        return RefusedError(error_response(429, str(error), after))

    def _change(self, asked: Asked, request: Request, engines: list[Engine]) -> HeadChange:
        endpoints = [address for e in engines if (address := self._addresses.of(e)) is not None]
        is_other = _new_body(asked, request) is not None
        length = (("content-length", b"%d" % len(request.body)),) if is_other else ()
        secret = sorted(name.decode() for name in SECRET_HEADERS) if self._tenants else ()
        return HeadChange(endpoints, length, secret)


_NEEDS_BODY = (
    "keys need the request's body, for tenants' cache salts: set request_body_mode of ext_proc to"
    " BUFFERED or FULL_DUPLEX_STREAMED (docs/envoy.md)"
)


def _body_of(request: Request, *, is_whole: bool) -> RequestBody:
    """The parsed body, or what the head tells in its place. Raises BadBodyError."""
    kind = request.header(b"content-type") or b"application/json"
    if is_whole and request.body and b"json" in kind.lower():
        return parse_body(request.body)
    model = request.header(MODEL_HEADER)
    return RequestBody.of(model=model.decode("utf-8", "replace")) if model else RequestBody.of()


def _model_of(body: RequestBody) -> str:
    model = body.get("model")
    return model if isinstance(model, str) else ""


def _body_bytes(request: Request) -> int:
    told = request.header(b"content-length") or b""
    return len(request.body) or (int(told) if told.isdigit() and len(told) < 16 else 0)


def _new_body(asked: Asked, request: Request) -> bytes | None:
    return request.body if request.body is not asked.request.body else None
