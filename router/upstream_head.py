"""What can go wrong with an engine, and the head of its response as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httptools

from router.chunked import Body, ChunkedBody, Dechunked, FixedLengthBody, UntilCloseBody
from router.http_message import Headers, connection_options


class UpstreamError(Exception):
    """An engine did not do its part of an exchange."""


class RefusedError(UpstreamError):
    """No connection: nothing listens, or it did not answer in time."""


class ClosedEarlyError(UpstreamError):
    """Closed before a response head was complete."""


class ResponseTimeoutError(UpstreamError):
    """No response head in time."""


class DiedError(UpstreamError):
    """Closed, silent for too long or broken in the middle of a body."""


class GarbledError(DiedError):
    """The body's framing is broken, so what was passed on cannot be completed."""


class ProtocolError(UpstreamError):
    """What came is not HTTP."""


@dataclass(slots=True, eq=False)
class ResponseHead:
    """Status line and headers of a response."""

    status: int
    reason: bytes
    headers: Headers
    fields: dict[bytes, bytes]
    """First values by names in lower case."""
    may_keep_alive: bool
    options: frozenset[bytes] = field(default=frozenset())
    """Names that its Connection header takes out of what is passed on."""
    is_chunked: bool = field(init=False)

    def __post_init__(self) -> None:
        encoding = self.fields.get(b"transfer-encoding")
        self.is_chunked = encoding is not None and encoding.lower() == b"chunked"

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of `name` (lower case)."""
        return self.fields.get(name)

    def body(self) -> Body:
        """A follower of this response's body that leaves the framing as it is."""
        return ChunkedBody() if self.is_chunked else self._plain_body()

    def payload_body(self) -> Body:
        """A follower that removes the framing."""
        return Dechunked() if self.is_chunked else self._plain_body()

    def _plain_body(self) -> Body:
        if self.status in (204, 304):
            return FixedLengthBody(0)
        length = self.header(b"content-length")
        return UntilCloseBody() if length is None else FixedLengthBody(int(length))


class _HeadParser:
    """httptools callbacks for one response head."""

    def __init__(self) -> None:
        self.reason = b""
        self.headers: Headers = []
        self.fields: dict[bytes, bytes] = {}

    def on_status(self, status: bytes) -> None:
        self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self.fields.setdefault(name.lower(), value)


def parse_head(raw: bytes) -> ResponseHead:
    """Parse the bytes up to and including the empty line.

    Raises:
        ProtocolError: not a response head, or a framing that we do not follow.
    """
    callbacks = _HeadParser()
    parser: Any = httptools.HttpResponseParser(callbacks)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise ProtocolError(f"malformed response head: {error}") from None
    status: int = parser.get_status_code()
    fields = callbacks.fields
    options = connection_options(callbacks.headers) if b"connection" in fields else frozenset()
    is_http_11 = parser.get_http_version() == "1.1"
    may_keep_alive = b"close" not in options if is_http_11 else b"keep-alive" in options
    head = ResponseHead(
        status, callbacks.reason, callbacks.headers, fields, may_keep_alive, options
    )
    encoding = head.header(b"transfer-encoding")
    if encoding is not None and not head.is_chunked:
        raise ProtocolError(f"transfer-encoding {encoding!r} is not followed")
    return head
