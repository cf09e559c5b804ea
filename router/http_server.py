"""Listens for clients, knows their connections, drains."""

from __future__ import annotations

import asyncio

from router.server_connection import Handler, ServerConnection, ServerLimits

CLOSE_SECONDS = 5.0


class HttpServer:
    """Listens, and knows its connections. All methods on the event loop."""

    def __init__(self, handler: Handler, limits: ServerLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.connections: set[ServerConnection] = set()
        self.is_draining = False
        self._listener: asyncio.Server | None = None
        self._end = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port."""
        self._listener = await self.loop.create_server(
            lambda: ServerConnection(self), host, port, backlog=1024
        )
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def check_idle(self) -> None:
        now = self.loop.time()
        for connection in tuple(self.connections):
            connection.check_idle(now)

    def noticed_end(self) -> None:
        self._end.set()

    async def drain(self, seconds: float) -> int:
        """Accept no more, let requests in flight end; return how many had to be cut."""
        self.is_draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self.connections):
            connection.close_if_idle()
        deadline = self.loop.time() + seconds
        while self.connections and (left := deadline - self.loop.time()) > 0:
            self._end.clear()
            try:
                await asyncio.wait_for(self._end.wait(), left)
            except asyncio.TimeoutError:
                break
        cut = [connection for connection in self.connections if connection.is_busy]
        for connection in tuple(self.connections):
            connection.cancel()
        while self.connections:  # aborted transports end within a turn or two of the loop
            self._end.clear()
            await asyncio.wait_for(self._end.wait(), CLOSE_SECONDS)
        return len(cut)
