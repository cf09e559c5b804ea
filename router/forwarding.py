"""How heads change on their way through: what is dropped, what is added. Pure."""

from __future__ import annotations

import random

from router.engines import Engine
from router.http_message import HOP_BY_HOP, Headers, Request, connection_options
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


def client_head(head: ResponseHead, added: Headers, *, framing: bytes, keep_alive: bool) -> bytes:
    """The response head as it goes to the client.

    `framing` is a header line of our own (chunked), or empty where the engine's content-length or
    the connection's end delimits the body.
    """
    dropped = _DROPPED_FROM_RESPONSE | head.options if head.options else _DROPPED_FROM_RESPONSE
    parts = [b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)]
    for name, value in head.headers:
        if name.lower() not in dropped:
            parts.append(b"%s: %s\r\n" % (name, value))
    parts += [b"%s: %s\r\n" % item for item in added if item[0] not in head.fields]
    parts.append(framing)
    parts.append(b"connection: keep-alive\r\n\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)
