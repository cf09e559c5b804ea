"""Orders to a running router: /admin/policy. For its own machine, and for whoever has the token.

Each order, refused ones too, is a line of the logger `router.audit`: who, what, from what to what.
"""

from __future__ import annotations

import logging
from typing import get_args

from client_sdk.operator_gate import OperatorGate, speaker
from emberkv_proto.errors import AccessDeniedError, UnauthenticatedError
from router.config import PolicyName
from router.decision import Chooser
from router.http_message import Request, Response, error_response, json_response
from router.request_body import BadBodyError, parse_body
from router.server_connection import ServerConnection

audit = logging.getLogger("router.audit")
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class Admin:
    """The routes under /admin. On the event loop."""

    def __init__(self, chooser: Chooser, gate: OperatorGate) -> None:
        self._chooser = chooser
        self._gate = gate

    async def show_policy(self, request: Request, client: ServerConnection) -> None:
        refused = self._refused(request, client)
        client.respond(refused or self._policy())

    async def set_policy(self, request: Request, client: ServerConnection) -> None:
        """Body: {"policy": name}. The next request is routed by it."""
        client.respond(self._refused(request, client) or self._set_policy(request, client))

    def _set_policy(self, request: Request, client: ServerConnection) -> Response:
        try:
            wanted = parse_body(request.body).get("policy")
        except BadBodyError as error:
            return error_response(400, str(error), code="invalid_json")
        named = next((name for name in POLICIES if name == wanted), None)
        if named is None:
            return error_response(400, f"policy must be one of {', '.join(POLICIES)}")
        before = self._chooser.policy_name
        self._chooser.set_policy(named)
        audit.info("policy %s -> %s by %s", before, named, client.peer)
        return self._policy()

    def _policy(self) -> Response:
        return json_response({"policy": self._chooser.policy_name, "policies": POLICIES})

    def _refused(self, request: Request, client: ServerConnection) -> Response | None:
        """What to answer to whom may give no orders.

        A page in a browser of this machine comes from loopback too, but says its origin.
        """
        problem: Response
        try:
            names = (name.decode("latin-1") for name, _ in request.headers)
            self._gate.check(speaker(client.peer, names), request.header(b"authorization"))
        except AccessDeniedError as error:
            problem = error_response(403, str(error))
        except UnauthenticatedError as error:
            problem = error_response(401, str(error), ((b"www-authenticate", b"Bearer"),))
        else:
            if request.header(b"origin") is None:
                return None
            problem = error_response(403, "orders are not taken from web pages")
        audit.warning("%s %s refused to %s", request.method, request.path, client.peer)
        return problem
