"""GET /metrics, /health and /ready on the event loop that owns the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from client_sdk import aio
from emberkv_proto.errors import PreflightError

REQUEST_SECONDS = 5.0
MAX_LINE_BYTES = 8192
MAX_HEADERS = 100


class HttpEndpoint:
    """Answers one request a connection; anything but the three GETs is refused."""

    def __init__(self, registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises PreflightError when it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
        except OSError as error:
            raise PreflightError(
                f"cannot listen on {host}:{port} ({error.strerror}); set index.metrics_port"
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        if self._server:
            self._server.close()
            async with aio.timeout(REQUEST_SECONDS):
                await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with aio.timeout(REQUEST_SECONDS):
                writer.write(self._answer(await self._request_line(reader)))
                await writer.drain()
        except (OSError, asyncio.TimeoutError, TimeoutError, ValueError):
            return  # the asker went away, dawdled, or sent a line without end
        finally:
            writer.close()

    async def _request_line(self, reader: asyncio.StreamReader) -> bytes:
        line = await reader.readline()
        for _ in range(MAX_HEADERS):
            if await reader.readline() in (b"\r\n", b"\n", b""):
                break
        return line

    def _answer(self, line: bytes) -> bytes:
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET is served here\n")
        if path == b"/metrics":
            return _response("200 OK", generate_latest(self._registry), CONTENT_TYPE_LATEST)
        if path == b"/health":
            return _response("200 OK", b"ok\n")
        if path == b"/ready":
            if self._is_ready():
                return _response("200 OK", b"ready\n")
            return _response("503 Service Unavailable", b"starting or stopping\n")
        return _response("404 Not Found", b"wanted /metrics, /health or /ready\n")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
