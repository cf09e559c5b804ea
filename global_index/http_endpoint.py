"""The index's HTTP server, on the event loop that owns the index: its own pages, and calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from client_sdk import aio
from emberkv_proto.errors import (
    AccessDeniedError,
    EmberError,
    InvalidRequestError,
    PreflightError,
    UnauthenticatedError,
    UnavailableError,
)
from global_index.http_message import (
    MAX_HEAD_BYTES,
    HttpRequest,
    HttpResponse,
    RefusedError,
    RequestHead,
    error_response,
    head_bytes,
    read_head,
    text_response,
)

log = logging.getLogger(__name__)

Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Path, method, and who answers."""

REQUEST_SECONDS = 10.0
"""For a body to come, and for an answer, or a piece of it, to be taken."""
IDLE_SECONDS = 60.0
"""How long a connection may wait for its next request."""
MAX_CONNECTIONS = 256
MAX_LARGE_BODIES = 4
LARGE_BODY_BYTES = 1 << 20
"""So many bodies above this size are read at the same time; more wait."""

_STATUS: Mapping[type[EmberError], HTTPStatus] = {
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    AccessDeniedError: HTTPStatus.FORBIDDEN,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}


class HttpEndpoint:
    """Serves /metrics, /health, /ready and whatever else `routes` names."""

    def __init__(
        self,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        routes: Routes | None = None,
    ) -> None:
        self._registry = registry
        self._is_ready = is_ready
        self._routes: dict[str, Mapping[str, Handler]] = {
            "/metrics": {"GET": self._metrics},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            **(routes or {}),
        }
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)

    async def start(self, host: str, port: int, setting: str = "index.metrics_port") -> int:
        """Listen and return the port. Raises PreflightError, naming `setting`, when it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise PreflightError(
                f"cannot listen on {host}:{port} ({error.strerror}); set {setting}"
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Hang up on everybody."""
        if self._server is None:
            return
        self._server.close()
        tasks = [*self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with aio.timeout(REQUEST_SECONDS):
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                busy = error_response(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
                await _send(writer, busy, keeps_alive=False)
                return
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.TimeoutError, TimeoutError, asyncio.IncompleteReadError):
            return  # the asker went away or dawdled
        except asyncio.CancelledError:
            return  # `stop`; the server, not the loop, waits for this task
        finally:
            del self._connections[task]
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether another may follow."""
        try:
            async with aio.timeout(IDLE_SECONDS):
                head = await read_head(reader)
            if head is None:
                return False
            body = await self._body(head, reader, writer)
        except RefusedError as error:
            await _send(writer, error_response(error.status, str(error)), keeps_alive=False)
            return False
        host = str((writer.get_extra_info("peername") or ("",))[0])
        request = HttpRequest(
            head.method, head.path, head.query, head.headers, body, host, head.keeps_alive
        )
        await _send(writer, await self._answer(request), keeps_alive=request.keeps_alive)
        return request.keeps_alive

    async def _body(
        self, head: RequestHead, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        if not head.body_bytes:
            return b""
        if head.expects_continue:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.body_bytes <= LARGE_BODY_BYTES:
            async with aio.timeout(REQUEST_SECONDS):
                return await reader.readexactly(head.body_bytes)
        async with self._large_bodies, aio.timeout(REQUEST_SECONDS):
            return await reader.readexactly(head.body_bytes)

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        methods = self._routes.get(request.path)
        if methods is None:
            wanted = ", ".join(self._routes)
            return error_response(HTTPStatus.NOT_FOUND, f"no such path; there is {wanted}")
        handler = methods.get(request.method)
        if handler is None:
            allowed = ", ".join(methods)
            message = f"{request.path} takes {allowed}, not {request.method}"
            return error_response(HTTPStatus.METHOD_NOT_ALLOWED, message)
        try:
            return await handler(request)
        except EmberError as error:
            status = next(
                (status for kind, status in _STATUS.items() if isinstance(error, kind)),
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
            return error_response(status, str(error))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(
                HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of this server; see its log"
            )

    async def _metrics(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_LATEST)

    async def _health(self, _: HttpRequest) -> HttpResponse:
        return text_response("ok\n")

    async def _ready(self, _: HttpRequest) -> HttpResponse:
        if self._is_ready():
            return text_response("ready\n")
        return text_response("starting or stopping\n", HTTPStatus.SERVICE_UNAVAILABLE)


async def _send(writer: asyncio.StreamWriter, response: HttpResponse, *, keeps_alive: bool) -> None:
    if isinstance(response.body, bytes):
        head = head_bytes(response, len(response.body), keeps_alive=keeps_alive)
        writer.write(head + response.body)
        await _drain(writer)
        return
    writer.write(head_bytes(response, None, keeps_alive=keeps_alive))
    async with aclosing(response.body) as pieces:
        await _send_pieces(writer, pieces)


async def _send_pieces(writer: asyncio.StreamWriter, pieces: AsyncGenerator[bytes, None]) -> None:
    async for piece in pieces:
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await _drain(writer)
    writer.write(b"0\r\n\r\n")
    await _drain(writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with aio.timeout(REQUEST_SECONDS):
        await writer.drain()
