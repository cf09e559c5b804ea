"""Connections to all engines, kept open between requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from client_sdk.aio import timeout
from router.deadlines import Deadlines
from router.engines import Engine
from router.upstream import Receiver, StaleError, UpstreamConnection
from router.upstream_head import (
    ClosedEarlyError,
    RefusedError,
    ResponseHead,
    ResponseTimeoutError,
)

CLOSE_SECONDS = 5.0
"""An aborted transport is gone after a turn of the loop; longer would be a bug."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    connect_seconds: float
    response_seconds: float
    idle_seconds: float
    pooled_connections: int
    pooled_seconds: float


class Sender(Receiver, Protocol):
    """A receiver that may lose interest before there is a connection."""

    is_over: bool


@dataclass(slots=True, eq=False)
class Exchange:
    """A response that has begun. Whoever holds it relays its body or aborts the connection."""

    connection: UpstreamConnection
    head: ResponseHead


class UpstreamPool:
    """Connections to all engines. All methods on the event loop."""

    def __init__(self, limits: UpstreamLimits) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self._idle: defaultdict[str, list[UpstreamConnection]] = defaultdict(list)
        self._open: set[UpstreamConnection] = set()
        self._all_lost = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    async def begin(self, engine: Engine, payload: bytes) -> Exchange:
        """Send a request and wait for the response's head.

        A pooled connection that turns out stale is replaced by a new one; that is no failure.

        Raises:
            UpstreamError: nothing of the response has been seen.
        """
        while True:
            connection = await self._acquire(engine)
            try:
                return Exchange(connection, await connection.request(payload))
            except StaleError:
                self.close_idle(engine.url)
            except ResponseTimeoutError as error:
                connection.abort()
                raise ResponseTimeoutError(f"{engine.name}: {error}") from None
            except BaseException:
                connection.abort()
                raise

    def send(self, engine: Engine, payload: bytes, receiver: Sender) -> None:
        """Send a request, at once where a connection is pooled; `receiver` is told what becomes."""
        connection = self._pooled(engine.url)
        if connection is not None:
            connection.send(payload, receiver)
            return
        connecting = self.loop.create_task(self._connect_and_send(engine, payload, receiver))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect_and_send(self, engine: Engine, payload: bytes, receiver: Sender) -> None:
        try:
            connection = await self._connect(engine)
        except RefusedError as error:
            if not receiver.is_over:
                receiver.failed(error)
            return
        if receiver.is_over:
            self.put(connection)  # who wanted it is gone; the next one will
        elif connection.is_closing:
            receiver.failed(ClosedEarlyError("connection closed before a response"))
        else:
            connection.send(payload, receiver)

    async def _acquire(self, engine: Engine) -> UpstreamConnection:
        return self._pooled(engine.url) or await self._connect(engine)

    def _pooled(self, url: str) -> UpstreamConnection | None:
        idle = self._idle[url]
        while idle:
            connection = idle.pop()
            if not connection.is_closing:
                connection.is_reused = True
                return connection
        return None

    async def _connect(self, engine: Engine) -> UpstreamConnection:
        try:
            async with timeout(self.limits.connect_seconds):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(
                        self, engine.url, self.limits.response_seconds, self.limits.idle_seconds
                    ),
                    engine.host,
                    engine.port,
                )
        except (OSError, UnicodeError, TimeoutError, asyncio.TimeoutError) as error:
            # UnicodeError: a host that cannot even be looked up, such as a..b.
            text = str(error) or f"no connection in {self.limits.connect_seconds} s"
            raise RefusedError(f"{engine.name}: {text}") from None
        return connection

    def put(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose exchange ended well."""
        idle = self._idle[connection.url]
        if connection.is_closing or len(idle) >= self.limits.pooled_connections:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        idle.append(connection)

    def close_idle(self, url: str) -> None:
        for connection in self._idle.pop(url, ()):
            connection.abort()

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        oldest = self.loop.time() - self.limits.pooled_seconds
        for url, idle in tuple(self._idle.items()):
            fresh = [connection for connection in idle if connection.idle_since >= oldest]
            for connection in idle:
                if connection.idle_since < oldest:
                    connection.abort()
            if fresh:
                self._idle[url] = fresh
            else:
                del self._idle[url]

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_lost.set()
        idle = self._idle.get(connection.url)
        if idle and connection in idle:
            idle.remove(connection)

    async def close(self) -> None:
        for connecting in self._connecting:
            connecting.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)
        for connection in tuple(self._open):
            connection.abort()
        if self._open:
            self._all_lost.clear()
            async with timeout(CLOSE_SECONDS):
                await self._all_lost.wait()
        self.deadlines.close()

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def check_integrity(self) -> None:
        for url, idle in self._idle.items():
            assert len(set(idle)) == len(idle), f"{url}: a connection is pooled twice"
            assert all(connection in self._open for connection in idle)
