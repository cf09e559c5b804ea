"""Which path does what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from emberkv_proto import __version__
from router.admin import Admin
from router.decision import Chooser, NoEngineError, Plan, SaturatedError, UnknownModelError
from router.engines import EngineTable
from router.explain import explain, worker
from router.http_message import Request, Response, error_response, json_response
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.proxy import Proxy
from router.request_body import BadBodyError, RequestBody, parse_body
from router.server_connection import Answering, ServerConnection
from router.speeds import SpeedBook
from router.surface import METRICS_TYPE, Work, document, served
from router.tenants import TenantRefusedError, Tenants

Route = Callable[[Request, ServerConnection], Answering | None]
"""As a server's handler."""


class Routes:
    """The table of paths; its `handle` is the server's handler."""

    def __init__(
        self,
        proxy: Proxy,
        admin: Admin,
        chooser: Chooser,
        engines: EngineTable,
        ledger: LoadLedger,
        speeds: SpeedBook,
        metrics: RouterMetrics,
        tenants: Tenants | None,
        pages: Mapping[Work, Route],
    ) -> None:
        """`pages`: what the page does; empty where there is none."""
        self._tenants = tenants
        self._chooser = chooser
        self._engines = engines
        self._ledger = ledger
        self._speeds = speeds
        self._metrics = metrics
        work: dict[Work, Route] = {
            Work.COMPLETE: proxy.complete,
            Work.COMPLETE_UNREAD: proxy.complete_unread,
            Work.FORWARD: proxy.pass_on,
            Work.MODELS: _own(self._models),
            Work.EXPLAIN: self._explain,
            Work.SHOW_POLICY: admin.show_policy,
            Work.SET_POLICY: admin.set_policy,
            Work.WORKERS: _own(self._workers),
            Work.HEALTH: _own(self._health),
            Work.READY: _own(self._ready),
            Work.METRICS: _own(self._render_metrics),
            Work.DOCUMENT: _own(self._show_document),
            **pages,
        }
        endpoints = served(work)
        self._document = json_response(document(endpoints, __version__))
        self._keyed = frozenset(endpoint.path for endpoint in endpoints if endpoint.needs_key)
        self._table: dict[str, dict[str, Route]] = {}
        for endpoint in endpoints:
            self._table.setdefault(endpoint.path, {})[endpoint.method] = work[endpoint.work]

    def handle(self, request: Request, client: ServerConnection) -> Answering | None:
        methods = self._table.get(request.path)
        if methods is None:
            _say(client, error_response(404, f"no such path: {request.path}"))
            return None
        # A HEAD is answered as a GET would be; the connection leaves the body out.
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            text = f"{request.path} takes {allowed}, not {request.method}"
            _say(client, error_response(405, text, ((b"allow", allowed.encode()),)))
            return None
        if self._tenants is not None and request.path in self._keyed:
            try:
                request = self._tenants.identified(request)
            except TenantRefusedError as refused:
                self._metrics.refused.labels(refused.why).inc()
                _say(client, refused.response)
                return None
        return route(request, client)

    async def _explain(self, request: Request, client: ServerConnection) -> None:
        """Decide without doing: nothing is charged, predicted or sent on."""
        try:
            body = parse_body(request.body)
            plan = await self._plan(request, body)
        except TenantRefusedError as refused:
            self._metrics.refused.labels(refused.why).inc()
            client.respond(refused.response)
            return
        except BadBodyError as error:
            client.respond(error_response(400, str(error), code="invalid_json"))
            return
        except UnknownModelError as error:
            client.respond(error_response(404, str(error), code="model_not_found"))
            return
        except NoEngineError as error:
            client.respond(error_response(503, str(error)))
            return
        problem = ""
        decision = None
        try:
            decision = self._chooser.choose(plan, ())
            scored = self._chooser.explain(plan)
        except (NoEngineError, UnknownModelError) as error:
            problem, scored = str(error), []  # the last healthy one fell ill just now
        except SaturatedError as error:
            problem, scored = str(error), self._chooser.explain(plan)
        client.respond(json_response(explain(plan, decision, problem, scored, self._speeds)))

    async def _plan(self, request: Request, body: RequestBody) -> Plan:
        """An engine may have to make the tokens, so it counts as a request of the tenant's."""
        if self._tenants is None:
            return await self._chooser.plan(body, len(request.body))
        with self._tenants.visit(request.tenant) as visit:
            visit.check_model(body.text("model"))
            request = self._tenants.sealed(request, body)
            return await self._chooser.plan(body, len(request.body))

    def _models(self) -> Response:
        cards: dict[str, dict[str, Any]] = {}
        for engine in self._engines:
            if not engine.health.is_healthy:
                continue
            for card in engine.model_cards:
                cards.setdefault(card["id"], card)
            if engine.model and engine.model not in cards:
                cards[engine.model] = {
                    "id": engine.model,
                    "object": "model",
                    "created": int(time.time()),
                    "owned_by": "emberkv",
                }
        return json_response({"object": "list", "data": [cards[name] for name in sorted(cards)]})

    def _workers(self) -> Response:
        return json_response({"workers": [worker(e, self._ledger) for e in self._engines]})

    def _health(self) -> Response:
        return json_response({"status": "ok", "version": __version__})

    def _ready(self) -> Response:
        if self._engines.has_healthy:
            return json_response({"status": "ready"})
        return error_response(503, "no engine is healthy")

    def _render_metrics(self) -> Response:
        return Response(200, self._metrics.render(), METRICS_TYPE)

    def _show_document(self) -> Response:
        return self._document


def _say(client: ServerConnection, response: Response) -> None:
    client.respond(response)
    client.ended()


def _own(make: Callable[[], Response]) -> Route:
    return lambda _, client: _say(client, make())
