"""The engines' side: one connection to one engine, one request at a time.

A response's head is parsed; its body is handed on piece by piece as it comes, with only its framing
followed (see chunked.py). An exchange that does not end well closes its connection, so the engine
notices at once and a later request never reads an earlier one's bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from router.chunked import Body, FramingError, UntilCloseBody
from router.deadlines import Deadlines
from router.upstream_head import (
    ClosedEarlyError,
    DiedError,
    GarbledError,
    ProtocolError,
    ResponseHead,
    ResponseTimeoutError,
    parse_head,
)

MAX_HEAD_BYTES = 64 * 1024


class StaleError(Exception):
    """A pooled connection had been closed by the engine before it saw this request."""


class Owner(Protocol):
    """Whoever keeps the connections; told when one opens, is free again and is gone."""

    deadlines: Deadlines

    def opened(self, connection: UpstreamConnection) -> None: ...

    def put(self, connection: UpstreamConnection) -> None: ...

    def lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to one engine."""

    def __init__(
        self, owner: Owner, url: str, response_seconds: float, idle_seconds: float
    ) -> None:
        self._owner = owner
        self._response_seconds = response_seconds
        self._idle_seconds = idle_seconds
        self.deadline = 0.0
        self._loop = asyncio.get_running_loop()
        self.url = url
        self.is_reused = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._buffer = b""
        self._is_asked = False
        """Whether a request was sent whose body nobody has taken over yet."""
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._body_waiter: asyncio.Future[None] | None = None
        self._body: Body | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._may_reuse = False
        self._is_paused = False
        self._is_lost = False
        self._lost_error: Exception | None = None

    # ---- one exchange ----

    async def request(self, payload: bytes) -> ResponseHead:
        """Send a whole request and wait for the response head, up to `response_seconds`.

        What comes of the body until `relay` takes it over is kept.

        Raises:
            UpstreamError: as its kinds say.
        """
        self._is_asked = True
        self._head_waiter = self._loop.create_future()
        self._transport.write(payload)
        self.deadline = self._loop.time() + self._response_seconds
        self._owner.deadlines.watch(self)
        try:
            return await self._head_waiter
        finally:
            self._head_waiter = None
            self._owner.deadlines.forget(self)

    @property
    def has_early_bytes(self) -> bool:
        """Whether something of the body came with the head."""
        return bool(self._buffer)

    async def relay(self, head: ResponseHead, body: Body, sink: Callable[[bytes], None]) -> None:
        """Hand each piece of the body to `sink` as it comes; return at its end.

        Afterwards the connection is back in the pool, or closed. When cancelled it is closed.

        Raises:
            DiedError: it ended before its end.
        """
        self._may_reuse = head.may_keep_alive
        self._is_asked = False
        self._body = body
        self._sink = sink
        self._body_waiter = self._loop.create_future()
        early, self._buffer = self._buffer, b""
        if early or body.is_done:
            self._pass(early)
        if self._is_lost:
            self._ended(self._lost_error)
        try:
            if not self._body_waiter.done():
                self.deadline = self._loop.time() + self._idle_seconds
                self._owner.deadlines.watch(self)
            await self._body_waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._body = None
            self._sink = None
            self._body_waiter = None
            self._owner.deadlines.forget(self)
        if self._may_reuse and not self._is_paused and not isinstance(body, UntilCloseBody):
            self._owner.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once; the engine sees it and stops working on the request."""
        self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self.deadline = self._loop.time() + self._idle_seconds
            self._transport.resume_reading()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._body is not None:
            self._pass(data)
        elif self._is_asked:
            self._buffer += data
            if self._head_waiter is not None and not self._head_waiter.done():
                self._find_head()
        else:
            self.abort()  # bytes that nobody asked for

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)
        self._is_lost = True
        self._lost_error = error
        if self._head_waiter is not None and not self._head_waiter.done():
            if self.is_reused and not self._buffer:
                self._head_waiter.set_exception(StaleError())
            else:
                self._head_waiter.set_exception(
                    ClosedEarlyError("connection closed before a response")
                )
        self._ended(error)

    # ---- inside ----

    def _find_head(self) -> None:
        assert self._head_waiter is not None
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    self._head_waiter.set_exception(ProtocolError("response head without end"))
                return
            raw, self._buffer = self._buffer[: end + 4], self._buffer[end + 4 :]
            try:
                head = parse_head(raw)
            except ProtocolError as error:
                self._head_waiter.set_exception(error)
                return
            if head.status >= 200:
                self._head_waiter.set_result(head)
                return
            if head.status == 101:
                self._head_waiter.set_exception(ProtocolError("101 without having asked"))
                return
            # 100 and 103 announce; the response follows.

    def _pass(self, data: bytes) -> None:
        body, sink, waiter = self._body, self._sink, self._body_waiter
        assert body is not None
        assert sink is not None
        assert waiter is not None
        if waiter.done():
            self._may_reuse = False  # bytes after the end
            return
        self.deadline = self._loop.time() + self._idle_seconds
        try:
            piece = body.feed(data) if data else b""
        except FramingError as error:
            waiter.set_exception(GarbledError(str(error)))
            return
        if piece:
            sink(piece)
        if body.is_done:
            waiter.set_result(None)

    def _ended(self, error: Exception | None) -> None:
        waiter = self._body_waiter
        if waiter is None or waiter.done():
            return
        if isinstance(self._body, UntilCloseBody) and error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(DiedError("connection closed in the middle of a body"))

    def overdue(self) -> None:
        """Called by the owner's deadlines: nothing came for too long."""
        if self._head_waiter is not None and not self._head_waiter.done():
            self._head_waiter.set_exception(
                ResponseTimeoutError(f"no response in {self._response_seconds} s")
            )
        elif self._is_paused:
            self.deadline = self._loop.time() + self._idle_seconds  # it is the client that waits
        elif self._body_waiter is not None and not self._body_waiter.done():
            self._body_waiter.set_exception(
                DiedError(f"silent for {self._idle_seconds} s in a body")
            )
