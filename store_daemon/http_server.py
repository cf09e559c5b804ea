"""The daemon's small HTTP server: /metrics, /health and /ready, for scrapers and orchestrators."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from emberkv_proto.errors import UnavailableError
from store_daemon.life import Life
from store_daemon.store import BlockStore

log = logging.getLogger(__name__)
REQUEST_SECONDS = 5.0


class HttpServer:
    """GET /metrics, /health (the loop turns), /ready (recovered, and new sessions are taken).

    It listens before the daemon has recovered, so that who asks is told so.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._store: BlockStore | None = None
        self._registry = CollectorRegistry()
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> str:
        """Listen; return host:port. Raises UnavailableError."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve metrics on {host}:{port}: {error.strerror};"
                " set daemon.metrics_port to a free one, or 0"
            ) from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def open_to(self, store: BlockStore, collector: Collector) -> None:
        """The daemon has recovered: show its numbers and its health."""
        self._store = store
        self._registry.register(collector)

    @property
    def is_healthy(self) -> bool:
        """No task that must run has failed."""
        return self._store is None or not self._store.holdings.counters["failed_tasks"]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_SECONDS)
            words = request.split(b"\r\n", 1)[0].split()
            path = words[1].split(b"?")[0] if len(words) == 3 and words[0] == b"GET" else b""
            writer.write(self._answer(path))
            await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        except (
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.TimeoutError,
            ConnectionError,
        ) as error:
            log.debug("metrics request dropped: %r", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, path: bytes) -> bytes:
        if path == b"/metrics":
            return _response("200 OK", generate_latest(self._registry), CONTENT_TYPE_LATEST)
        if path == b"/health":
            if not self.is_healthy:
                return _response("500 Internal Server Error", b"a task has failed; see the log\n")
            return _response("200 OK", b"ok\n")
        if path == b"/ready":
            if self._life.state == "serving":
                return _response("200 OK", b"serving\n")
            doing = f": {self._life.doing}" if self._life.state == "recovering" else ""
            return _response("503 Service Unavailable", f"{self._life.state}{doing}\n".encode())
        return _response("404 Not Found", b"try /metrics, /health or /ready\n")


def _response(status: str, body: bytes, content_type: str = "text/plain") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
