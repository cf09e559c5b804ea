"""One client's connection: an asyncio protocol over httptools.

A connection answers its requests one at a time and in order, however they were pipelined. What
answers one is a `Work`: a trip through the proxy's callbacks, or a task. When the client goes away
it is cancelled at once, which is how an upstream request is aborted. A half-closed connection
counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

import httptools

from router.http_message import (
    Headers,
    Request,
    Response,
    error_response,
    format_head,
    format_response,
)

log = logging.getLogger(__name__)

MAX_PIPELINED = 8
LINGER_SECONDS = 2.0
_OF_FRAMING = frozenset({b"content-length", b"expect", b"transfer-encoding"})
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Source(Protocol):
    """Where a response's bytes come from, so that a slow client can hold it back."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Work(Protocol):
    """What a response is being made by."""

    def cancel(self) -> object:
        """The client is gone, or the drain is over. `ended` is called now or soon."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_body_bytes: int
    max_header_bytes: int
    client_idle_seconds: float


Answering = Coroutine[Any, Any, None]
Handler = Callable[[Request, "ServerConnection"], Answering | None]
"""Returns what is to run as a task until the response is complete; or None, and has called
`answer_by` or `ended`."""


class Listener(Protocol):
    """The server a connection belongs to."""

    handler: Handler
    limits: ServerLimits
    loop: asyncio.AbstractEventLoop
    connections: set[ServerConnection]
    is_draining: bool

    def noticed_end(self) -> None:
        """A response or a connection has ended."""
        ...


class _Refusal(Exception):
    """The request being read is answered with an error; nothing after it can be read."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


@dataclass(frozen=True, slots=True)
class _Target:
    """What a request line asks for: the path, and with its query as it goes upstream."""

    path: str
    raw: bytes


TARGETS_KEPT = 256
_targets: dict[bytes, _Target] = {}
"""The last ones; clients ask for few, again and again."""


def _read_target(url: bytes) -> _Target:
    """Raises _Refusal."""
    try:
        parts = httptools.parse_url(url)
        path = (parts.path or b"/").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise _Refusal(error_response(400, "malformed request target")) from None
    raw = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
    target = _Target(path, raw)
    if len(_targets) >= TARGETS_KEPT:
        _targets.clear()
    _targets[url] = target
    return target


class _Beginning:
    """Stands for the work of a request whose handler has not returned yet."""

    def cancel(self) -> None:
        """Nothing runs yet."""


_BEGINNING = _Beginning()


class ServerConnection(asyncio.Protocol):
    """One client. Handlers answer with `respond`, or with `start`, `write` and `finish`."""

    def __init__(self, server: Listener) -> None:
        self._server = server
        self._limits = server.limits
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._waiting: deque[Request | Response] = deque()
        self._waiting_bytes = 0
        self._work: Work | None = None
        self._current: Request | None = None
        self._source: Source | None = None
        self._is_write_paused = False
        self._is_read_paused = False
        self._is_discarding = False
        self._has_started = False
        self._keep_alive = True
        self._wants_continue = False
        self.last_activity = server.loop.time()
        self._fed_head_bytes = 0
        self._reset_message()

    # ---- what a handler may call ----

    @property
    def has_started(self) -> bool:
        """Whether any byte of the current response was written."""
        return self._has_started

    def respond(self, response: Response) -> None:
        """Write a whole response of our own and end the exchange."""
        assert self._current is not None
        keep_alive = self._current.keep_alive and not self._server.is_draining
        self._has_started = True
        form = format_head if self._current.method == "HEAD" else format_response
        self._transport.write(form(response, keep_alive))
        self._keep_alive = keep_alive

    def answer_by(self, work: Work) -> None:
        """Have the current request answered by `work`, which calls `ended` when it is done."""
        self._work = work

    def ended(self) -> None:
        """The response is complete or given up: the next request's turn."""
        self._work = None
        self._current = None
        self._source = None
        self.last_activity = self._server.loop.time()
        if not self._keep_alive or self._server.is_draining:
            self._transport.close()
            self._server.noticed_end()
        elif self._waiting or self._wants_continue:
            # Not here: a line of requests that are answered at once would go deeper for each.
            self._server.loop.call_soon(self._next)

    def start(self, keep_alive: bool) -> Callable[[bytes], None]:
        """Begin a response; return the function that writes its bytes, head first."""
        self._has_started = True
        self._keep_alive = keep_alive
        return self._transport.write

    def attach(self, source: Source) -> None:
        """From now on a full send buffer pauses `source`."""
        self._source = source
        if self._is_write_paused:
            source.pause()

    def detach(self) -> None:
        self._source = None

    def close_after_response(self) -> None:
        """The response just written was the last of this connection."""
        self._keep_alive = False

    def abort(self) -> None:
        """Close at once, so that the client sees a cut response."""
        self._keep_alive = False
        self._transport.abort()

    @property
    def peer(self) -> str:
        """The client's address as gRPC writes it: ipv4:127.0.0.1:80, ipv6:[::1]:80."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple) or len(name) < 2:
            return "unknown:"
        host, port = name[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    @property
    def wants_keep_alive(self) -> bool:
        """Whether the current response may promise to keep the connection."""
        return (
            self._current is not None and self._current.keep_alive and not self._server.is_draining
        )

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        if not self._is_reading_message:
            # A request that comes drop by drop has no more time than one that stops.
            self.last_activity = self._server.loop.time()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refusal):
                self._refuse(cause.response)
            else:
                self._refuse(error_response(400, f"malformed HTTP: {error}"))
        except _Refusal as refusal:
            self._refuse(refusal.response)

    def eof_received(self) -> bool:
        if self._work is not None:
            self.cancel()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
        self._server.noticed_end()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.last_activity = self._server.loop.time()  # it has taken all until now
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.last_activity = self._server.loop.time()
        if self._source is not None:
            self._source.resume()
        self._next()

    # ---- httptools callbacks ----

    def on_message_begin(self) -> None:
        self._reset_message()
        self._is_reading_message = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.max_header_bytes:
            raise _Refusal(self._head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.max_header_bytes:
            raise _Refusal(self._head_too_large())
        if not self._is_head_complete:  # trailers come here too; they are not passed on
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_head_complete = True
        for name, value in self._headers:
            if name not in _OF_FRAMING:
                continue
            if name == b"content-length" and int(value) > self._limits.max_body_bytes:
                raise _Refusal(self._too_large())
            if name == b"expect":
                if value.lower() != b"100-continue":
                    raise _Refusal(error_response(417, "only Expect: 100-continue is known"))
                self._wants_continue = True
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise _Refusal(error_response(501, "only Transfer-Encoding: chunked is known"))
        self._send_continue()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise _Refusal(self._too_large())
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # only the head was read; see _parse
        self._is_reading_message = False
        self._wants_continue = False
        target = _targets.get(self._url) or _read_target(self._url)
        parser = self._parser
        request = Request(
            parser.get_method().decode(),
            target.path,
            target.raw,
            self._headers,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            parser.get_http_version(),
            bool(parser.should_keep_alive()),
        )
        if self._waiting or not self._may_answer:
            self._enqueue(request)
        else:
            self._answer(request)

    # ---- inside ----

    def _reset_message(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._is_head_complete = False
        self._is_reading_message = False

    def _parse(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # HTTP lets a server ignore an offered upgrade, but this parser stops after such a
                # head, before any body: read the head again without the offer.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                continue
            break
        # A header line without end is not reported to on_header until it ends.
        if was_in_head and self._is_in_head:
            self._fed_head_bytes += len(data)
            if self._fed_head_bytes > self._limits.max_header_bytes:
                raise _Refusal(self._head_too_large())
        else:
            self._fed_head_bytes = 0

    def _head_without_upgrade(self) -> bytes:
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise _Refusal(error_response(405, "CONNECT is not offered"))
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (method, self._url, version)]
        lines += [b"%s: %s\r\n" % item for item in self._headers if item[0] != b"upgrade"]
        return b"".join(lines) + b"\r\n"

    @property
    def _is_in_head(self) -> bool:
        return self._is_reading_message and not self._is_head_complete

    def _head_too_large(self) -> Response:
        return error_response(
            431, f"request head is over the limit of {self._limits.max_header_bytes} bytes"
        )

    def _too_large(self) -> Response:
        return error_response(
            413, f"request body is over the limit of {self._limits.max_body_bytes} bytes"
        )

    def _send_continue(self) -> None:
        """Let the client send its body, once all earlier responses are out."""
        if self._wants_continue and self._work is None and not self._waiting:
            self._wants_continue = False
            if not self._body_bytes:
                self._transport.write(_CONTINUE)

    def _refuse(self, response: Response) -> None:
        """Answer after what is pending, then close; whatever else comes is thrown away."""
        self._is_discarding = True
        self._wants_continue = False
        self._body.clear()
        self._enqueue(response)

    def _enqueue(self, item: Request | Response) -> None:
        self._waiting.append(item)
        if isinstance(item, Request):
            self._waiting_bytes += len(item.body)
        self._next()
        is_full = (
            len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > self._limits.max_body_bytes
        )
        if is_full and not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    @property
    def _may_answer(self) -> bool:
        """A client that takes no answers gets none made for what else it asks."""
        is_free = self._work is None and not self._is_write_paused
        return is_free and not self._transport.is_closing()

    def _next(self) -> None:
        if not self._may_answer:
            return
        if not self._waiting:
            self._send_continue()
            return
        item = self._waiting.popleft()
        if isinstance(item, Response):
            # Only what was being read is refused, so it is the parser's method.
            is_head = bool(self._url) and self._parser.get_method() == b"HEAD"
            form = format_head if is_head else format_response
            self._transport.write(form(item, keep_alive=False))
            self._linger()
            return
        self._waiting_bytes -= len(item.body)
        if self._is_read_paused and not self._waiting:
            self._is_read_paused = False
            self._transport.resume_reading()
        self._answer(item)

    def _answer(self, request: Request) -> None:
        self._current = request
        self._has_started = False
        self._work = _BEGINNING
        try:
            work = self._server.handler(request, self)
        except Exception as error:
            self._failed(error)
            self.ended()
            return
        if work is not None:
            task = self._work = self._server.loop.create_task(work)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._transport.abort()
        elif (error := task.exception()) is not None:
            self._failed(error)
        self.ended()

    def _failed(self, error: BaseException) -> None:
        request = self._current
        assert request is not None
        log.error("request %s %s failed", request.method, request.path, exc_info=error)
        if self._has_started:
            self.abort()
        else:
            self.respond(error_response(500, "internal error of the router"))

    def _linger(self) -> None:
        """Close without a reset, which could destroy the response on its way to the client."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._server.loop.call_later(LINGER_SECONDS, self._transport.abort)

    # ---- what the server calls ----

    @property
    def is_busy(self) -> bool:
        return self._work is not None or bool(self._waiting)

    def cancel(self) -> None:
        """End the current request, if any, and close."""
        self._transport.abort()
        if self._work is not None:
            self._work.cancel()

    def close_if_idle(self) -> None:
        if not self.is_busy:
            self._transport.close()

    def check_idle(self, now: float) -> None:
        """Close a connection that has waited too long for a request or for its client to read."""
        if now - self.last_activity < self._limits.client_idle_seconds:
            return
        if self._transport.is_closing() or self._is_write_paused:
            self.cancel()
        elif not self.is_busy and not self._is_discarding:
            if self._is_reading_message:
                self._refuse(error_response(408, "the request did not come to its end in time"))
            else:
                self._transport.close()
