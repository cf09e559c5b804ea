"""How heads change on their way through: what is dropped, what is added. Pure."""

from __future__ import annotations

import random

from router.engines import Engine
from router.http_message import HOP_BY_HOP, Request, connection_options
from router.upstream_head import ResponseHead

_DROPPED_FROM_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_DROPPED_FROM_RESPONSE = HOP_BY_HOP | {b"x-emberkv-engine", b"x-emberkv-hit-tokens"}
MAX_REQUEST_ID_BYTES = 256
_numbers = random.Random()  # noqa: S311 - seeded by the system; ids only have to differ


def request_id(request: Request) -> bytes:
    """The client's x-request-id, or a new one where it sent none that is usable."""
    given = request.header(b"x-request-id")
    if given and len(given) <= MAX_REQUEST_ID_BYTES:
        return given
    return b"%032x" % _numbers.getrandbits(128)


def upstream_request(request: Request, engine: Engine, identity: bytes) -> bytes:
    """The request as it goes to the engine: same method, target, headers and body."""
    dropped = _DROPPED_FROM_REQUEST
    options = connection_options(request.headers)
    if options:
        dropped = dropped | options
    line = (request.method.encode(), request.target, engine.authority)
    parts = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % line]
    parts += [b"%s: %s\r\n" % item for item in request.headers if item[0] not in dropped]
    parts.append(b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (identity, len(request.body)))
    parts.append(request.body)
    return b"".join(parts)


def client_head(
    head: ResponseHead,
    engine: bytes,
    hit_tokens: int,
    identity: bytes,
    *,
    framing: bytes,
    keep_alive: bool,
) -> bytes:
    """The response head as it goes to the client.

    `framing` is a header line of our own (chunked), or empty where the engine's content-length or
    the connection's end delimits the body.
    """
    return b"%s%s%s%s%s%s" % (
        head.passed or _passed(head),
        b"x-emberkv-engine: %s\r\n" % engine,
        b"x-emberkv-hit-tokens: %d\r\n" % hit_tokens,
        b"" if b"x-request-id" in head.fields else b"x-request-id: %s\r\n" % identity,
        framing,
        b"connection: keep-alive\r\n\r\n" if keep_alive else b"connection: close\r\n\r\n",
    )


def _passed(head: ResponseHead) -> bytes:
    """The lines that are passed on; kept with the head."""
    dropped = _DROPPED_FROM_RESPONSE | head.options if head.options else _DROPPED_FROM_RESPONSE
    parts = [b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)]
    parts += [b"%s: %s\r\n" % item for item in head.headers if item[0].lower() not in dropped]
    head.passed = b"".join(parts)
    return head.passed
