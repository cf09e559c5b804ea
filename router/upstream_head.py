"""What can go wrong with an engine, and the head of its response as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from router.chunked import Body, ChunkedBody, Dechunked, FixedLengthBody, UntilCloseBody
from router.http_message import Headers, connection_options

HEADS_KEPT = 512
LONGEST_KEPT_BYTES = 2048
BODILESS = (204, 304)
"""End with their head, whatever it says of a body (RFC 9112, section 6.3)."""
_known: dict[bytes, ResponseHead] = {}


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


@dataclass(frozen=True, slots=True)
class BodyKind:
    """What a response's body is, by its headers."""

    is_stream: bool
    """Of server-sent events."""
    is_plain: bool
    """Not compressed."""
    is_read: bool
    """A form whose usage can be read."""
    length: int
    """0 where it is not told."""

    @classmethod
    def told_by(cls, fields: Mapping[bytes, bytes]) -> BodyKind:
        content_type = fields.get(b"content-type", b"").lower()
        is_stream = content_type.startswith(b"text/event-stream")
        is_plain = b"content-encoding" not in fields
        is_read = is_plain and (is_stream or content_type.startswith(b"application/json"))
        return cls(is_stream, is_plain, is_read, int(fields.get(b"content-length", b"") or 0))


@dataclass(slots=True, eq=False)
class ResponseHead:
    """Status line and headers of a response. Shared by all responses with the same bytes."""

    status: int
    reason: bytes
    headers: Headers
    fields: dict[bytes, bytes]
    """First values by names in lower case."""
    may_keep_alive: bool
    options: frozenset[bytes] = field(default=frozenset())
    """Names that its Connection header takes out of what is passed on."""
    is_chunked: bool = field(init=False)
    kind: BodyKind = field(init=False)
    passed: bytes | None = None
    """Its lines as they go to clients, once somebody has made them."""

    def __post_init__(self) -> None:
        encoding = self.fields.get(b"transfer-encoding")
        self.is_chunked = (
            encoding is not None and encoding.lower() == b"chunked" and self.status not in BODILESS
        )
        self.kind = BodyKind.told_by(self.fields)

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
        if self.status in BODILESS:
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
    if encoding is not None and status in BODILESS:
        head.may_keep_alive = False  # who says such a thing may send an end of chunks, too
    elif encoding is not None and not head.is_chunked:
        raise ProtocolError(f"transfer-encoding {encoding!r} is not followed")
    return head


def known_head(raw: bytes) -> ResponseHead:
    """As `parse_head`: an engine's heads are mostly those that it sent a moment ago."""
    head = _known.get(raw)
    if head is None:
        head = parse_head(raw)
        if len(raw) <= LONGEST_KEPT_BYTES:
            if len(_known) >= HEADS_KEPT:
                _known.clear()
            _known[raw] = head
    return head
