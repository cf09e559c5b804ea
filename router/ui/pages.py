"""Serves the page and its state. The page holds no data; the state is for operators only."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from client_sdk.operator_gate import OperatorGate, speaker
from emberkv_proto.errors import AccessDeniedError, UnauthenticatedError
from router.http_message import Request, Response, error_response
from router.server_connection import Answering, ServerConnection
from router.surface import Work
from router.ui.state import UiState

Route = Callable[[Request, ServerConnection], Answering]
STATIC = Path(__file__).parent / "static"
FILES: Mapping[Work, tuple[str, bytes]] = {
    Work.UI_PAGE: ("index.html", b"text/html; charset=utf-8"),
    Work.UI_STYLE: ("style.css", b"text/css; charset=utf-8"),
    Work.UI_SCRIPT: ("app.js", b"text/javascript; charset=utf-8"),
}
SECURITY: tuple[tuple[bytes, bytes], ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        b" img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
NO_STORE = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
FRESH_SECONDS = 0.5
"""However many look, the state is reckoned no more often."""


class UiPages:
    """The routes under /ui. On the event loop."""

    def __init__(self, state: UiState, gate: OperatorGate, clock: Callable[[], float]) -> None:
        self._state = state
        self._gate = gate
        self._clock = clock
        self._read_at = -FRESH_SECONDS
        self._body = b""
        self.routes: Mapping[Work, Route] = {
            **{work: _serve(*file) for work, file in FILES.items()},
            Work.UI_STATE: self._show_state,
        }

    async def _show_state(self, request: Request, client: ServerConnection) -> None:
        client.respond(self._refused(request, client.peer) or self._current())

    def _current(self) -> Response:
        now = self._clock()
        if now - self._read_at >= FRESH_SECONDS:
            self._body = json.dumps(self._state.read(), allow_nan=False).encode()
            self._read_at = now
        return Response(200, self._body, headers=NO_STORE)

    def _refused(self, request: Request, peer: str) -> Response | None:
        """What to answer to whom may not see it: as with /admin, loopback or the token.

        A page of another origin says so; one whose name was made to resolve to this machine says
        a Host that no operator would.
        """
        names = (name.decode("latin-1") for name, _ in request.headers)
        authorization = request.header(b"authorization")
        try:
            self._gate.check(speaker(peer, names), authorization)
        except AccessDeniedError as error:
            return error_response(403, str(error), NO_STORE)
        except UnauthenticatedError as error:
            challenge = ((b"www-authenticate", b"Bearer"), *NO_STORE)
            return error_response(401, str(error), challenge)
        if request.header(b"origin") is not None:
            return error_response(403, "not for pages of other origins", NO_STORE)
        if not self._has_token(authorization) and not _is_own_name(request.header(b"host")):
            text = "call the router by its address or as localhost, not by another name"
            return error_response(403, text, NO_STORE)
        return None

    def _has_token(self, authorization: bytes | None) -> bool:
        try:
            self._gate.check("", authorization)
        except (AccessDeniedError, UnauthenticatedError):
            return False
        return True


def _is_own_name(host: bytes | None) -> bool:
    try:
        name = urlsplit(f"//{(host or b'').decode('latin-1')}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _serve(name: str, content_type: bytes) -> Route:
    body = (STATIC / name).read_bytes()
    response = Response(200, body, content_type, SECURITY)

    async def route(request: Request, client: ServerConnection) -> None:
        client.respond(response)

    return route
