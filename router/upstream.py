"""The engines' side: one connection to one engine, one request at a time.

A response's head is parsed; its body is handed on piece by piece as it comes, with only its framing
followed (see chunked.py). Whoever sent the request is told by callbacks, so that no future and no
task stands between an engine's bytes and the client's socket; `request` and `relay` are the same
for coroutines. An exchange that does not end well closes its connection, so the engine notices at
once and a later request never reads an earlier one's bytes.
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
    UpstreamError,
    known_head,
)

MAX_HEAD_BYTES = 64 * 1024


class StaleError(UpstreamError):
    """A pooled connection had been closed by the engine before it saw this request."""


class Receiver(Protocol):
    """Whoever sent a request. Told of `answered`, then `ended`, or at any time `failed`."""

    connection: UpstreamConnection | None
    """Set when the request is sent."""

    def answered(self, head: ResponseHead) -> None:
        """The head came. The body is kept until `follow` takes it over, now or later."""
        ...

    def ended(self) -> None:
        """The body came to its end; the connection is pooled again, or closed."""
        ...

    def failed(self, error: UpstreamError) -> None:
        """There will be nothing more; the connection is closed. StaleError: ask another one."""
        ...


class Owner(Protocol):
    """Whoever keeps the connections; told when one opens, is free again and is gone."""

    deadlines: Deadlines

    def opened(self, connection: UpstreamConnection) -> None: ...

    def put(self, connection: UpstreamConnection) -> None: ...

    def lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to one engine."""

    __slots__ = (
        "_body",
        "_buffer",
        "_has_head",
        "_idle_seconds",
        "_is_lost",
        "_is_paused",
        "_loop",
        "_lost_error",
        "_may_reuse",
        "_owner",
        "_receiver",
        "_response_seconds",
        "_transport",
        "deadline",
        "idle_since",
        "is_reused",
        "sink",
        "url",
    )

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
        self._receiver: Receiver | None = None
        """Of the request that is on its way; None between two."""
        self._has_head = False
        self._buffer = b""
        """What came of a head, or of a body that nobody follows yet."""
        self._body: Body | None = None
        self.sink: Callable[[bytes], None] = _refuse
        """Who gets the pieces of a body that is followed; may become another one."""
        self._may_reuse = False
        self._is_paused = False
        self._is_lost = False
        self._lost_error: Exception | None = None

    # ---- one exchange ----

    def send(self, payload: bytes, receiver: Receiver) -> None:
        """Send a whole request; its head has to come within `response_seconds`."""
        self._receiver = receiver
        receiver.connection = self
        self._has_head = False
        self._transport.write(payload)
        self.deadline = self._loop.time() + self._response_seconds
        self._owner.deadlines.watch(self)

    def follow(self, head: ResponseHead, body: Body, sink: Callable[[bytes], None]) -> None:
        """From now on hand each piece of the body to `sink` as it comes; what is here, at once."""
        self._may_reuse = head.may_keep_alive
        self._body = body
        self.sink = sink
        self.deadline = self._loop.time() + self._idle_seconds
        self._owner.deadlines.watch(self)
        early, self._buffer = self._buffer, b""
        if early or body.is_done:
            self._pass(early)
        if self._is_lost and self._body is not None:
            self._ended_by_close(self._lost_error)

    def drop(self) -> None:
        """Nobody waits for the answer any more: close, so that the engine stops working on it."""
        self._receiver = None
        self._body = None
        self.sink = _refuse
        self._owner.deadlines.forget(self)
        self._transport.abort()

    @property
    def has_early_bytes(self) -> bool:
        """Whether something of the body came with the head."""
        return bool(self._buffer)

    # ---- the same for coroutines ----

    async def request(self, payload: bytes) -> ResponseHead:
        """Send a whole request and wait for the response head, up to `response_seconds`.

        What comes of the body until `relay` takes it over is kept.

        Raises:
            UpstreamError: as its kinds say.
        """
        waiting = _Waiting(self._loop)
        self.send(payload, waiting)
        try:
            return await waiting.head
        except BaseException:
            self.drop()
            raise

    async def relay(self, head: ResponseHead, body: Body, sink: Callable[[bytes], None]) -> None:
        """Hand each piece of the body to `sink` as it comes; return at its end.

        Afterwards the connection is back in the pool, or closed. When cancelled it is closed.

        Raises:
            DiedError: it ended before its end.
        """
        waiting = _Waiting(self._loop)
        waiting.head.set_result(head)
        self._receiver = waiting
        self.follow(head, body, sink)
        try:
            await waiting.end
        except BaseException:
            if self._receiver is waiting:  # else it ended, and may be on its next exchange
                self.drop()
            raise

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
        elif self._receiver is None:
            self.abort()  # bytes that nobody asked for
        else:
            self._buffer = self._buffer + data if self._buffer else data
            if not self._has_head:
                self._find_head(self._receiver)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)
        self._is_lost = True
        self._lost_error = error
        if self._body is not None:
            self._ended_by_close(error)
        elif self._receiver is not None and not self._has_head:
            is_stale = self.is_reused and not self._buffer
            text = "connection closed before a response"
            self._fail(StaleError(text) if is_stale else ClosedEarlyError(text))

    # ---- inside ----

    def _find_head(self, receiver: Receiver) -> None:
        while True:
            end = self._buffer.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    self._fail(ProtocolError("response head without end"))
                return
            raw, self._buffer = self._buffer[:end], self._buffer[end:]
            try:
                head = known_head(raw)
            except ProtocolError as error:
                self._fail(error)
                return
            if head.status >= 200:
                self._has_head = True
                receiver.answered(head)
                return
            if head.status == 101:
                self._fail(ProtocolError("101 without having asked"))
                return
            # 100 and 103 announce; the response follows.

    def _pass(self, data: bytes) -> None:
        body = self._body
        assert body is not None
        self.deadline = self._loop.time() + self._idle_seconds
        if data:
            try:
                piece = body.feed(data)
            except FramingError as error:
                self._fail(GarbledError(str(error)))
                return
            if piece:
                self.sink(piece)
        if body.is_done:
            self._end()

    def _end(self) -> None:
        body, receiver = self._body, self._receiver
        if receiver is None:
            return  # it left in the middle of the last piece
        self._body = self._receiver = None
        self.sink = _refuse  # a pooled connection keeps no answer alive
        self._owner.deadlines.forget(self)
        if self._may_reuse and not self._is_paused and type(body) is not UntilCloseBody:
            self._owner.put(self)
        else:
            self.abort()
        receiver.ended()

    def _ended_by_close(self, error: Exception | None) -> None:
        if type(self._body) is UntilCloseBody and error is None:
            self._end()
        else:
            self._fail(DiedError("connection closed in the middle of a body"))

    def _fail(self, error: UpstreamError) -> None:
        receiver = self._receiver
        self.drop()
        if receiver is not None:
            receiver.failed(error)

    def overdue(self) -> None:
        """Called by the owner's deadlines: nothing came for too long."""
        if self._receiver is None:
            return
        if not self._has_head:
            self._fail(ResponseTimeoutError(f"no response in {self._response_seconds} s"))
        elif self._is_paused:
            self.deadline = self._loop.time() + self._idle_seconds  # it is the client that waits
        elif self._body is not None:
            self._fail(DiedError(f"silent for {self._idle_seconds} s in a body"))


def _refuse(_: bytes) -> None:
    raise AssertionError("a body that nobody follows")


class _Waiting:
    """A receiver with futures for its coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.connection: UpstreamConnection | None = None
        self.head: asyncio.Future[ResponseHead] = loop.create_future()
        self.end: asyncio.Future[None] = loop.create_future()

    def answered(self, head: ResponseHead) -> None:
        if not self.head.done():  # else its coroutine is being cancelled
            self.head.set_result(head)

    def ended(self) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def failed(self, error: UpstreamError) -> None:
        waited = self.end if self.head.done() else self.head
        if not waited.done():
            waited.set_exception(error)
