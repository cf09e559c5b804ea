"""Small requests of the router's own to an engine: health, models, tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from client_sdk.aio import timeout
from router.engines import Engine
from router.upstream_head import DiedError, ResponseTimeoutError
from router.upstream_pool import UpstreamPool

MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole response."""

    status: int
    body: bytes


def format_request(engine: Engine, method: str, target: bytes, body: bytes) -> bytes:
    """Return a request of our own as bytes for the wire."""
    head = (
        f"{method} {target.decode()} HTTP/1.1\r\nhost: {engine.host}:{engine.port}\r\n"
        f"accept: application/json\r\n"
    )
    if body:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class EngineClient:
    """Asks engines, each time with a deadline over the whole exchange."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool

    async def fetch(
        self, engine: Engine, method: str, target: bytes, body: bytes, deadline_seconds: float
    ) -> Fetched:
        """Send and read the whole answer.

        Raises:
            UpstreamError: no answer within the deadline, or one over 64 MiB.
        """
        raw = format_request(engine, method, target, body)
        return await self.send(engine, raw, target.decode(), deadline_seconds)

    async def send(self, engine: Engine, raw: bytes, what: str, deadline_seconds: float) -> Fetched:
        """As `fetch`, for a request that is written already; errors name `what`."""
        try:
            async with timeout(deadline_seconds):
                return await self._send(engine, raw, what)
        except (TimeoutError, asyncio.TimeoutError):
            raise ResponseTimeoutError(
                f"{engine.name}: no answer to {what} in {deadline_seconds} s"
            ) from None

    async def _send(self, engine: Engine, raw: bytes, what: str) -> Fetched:
        exchange = await self._pool.begin(engine, raw)
        pieces: list[bytes] = []
        size = 0

        def keep(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size > MAX_BODY_BYTES:
                exchange.connection.abort()  # the relay then ends with DiedError
            else:
                pieces.append(piece)

        await exchange.connection.relay(exchange.head, exchange.head.payload_body(), keep)
        if size > MAX_BODY_BYTES:
            raise DiedError(f"{engine.name}: answer to {what} is over 64 MiB")
        return Fetched(exchange.head.status, b"".join(pieces))
