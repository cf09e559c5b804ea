"""HTTP messages as values, and the OpenAI-style error bodies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]
"""Names as the sender wrote them in responses; in lower case in requests."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Belong to one connection, never passed on (RFC 9110 section 7.6.1)."""


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Request:
    """One whole request of a client. Not changed once it is made."""

    method: str
    path: str
    target: bytes
    """Path and query, as they go upstream."""
    headers: Headers
    body: bytes
    http_version: str
    keep_alive: bool
    tenant: str = ""
    """Whose key came with it; empty where no keys are asked for."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of `name` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Response:
    """One whole response of our own."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_response(
    value: object, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Response:
    return Response(status, json.dumps(value).encode(), headers=headers)


def error_body(status: int, message: str, kind: str, code: str | None = None) -> bytes:
    """The error object that OpenAI clients expect."""
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return json.dumps({"error": error}).encode()


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "request_timeout",
    429: "rate_limit_error",
    500: "internal_error",
    501: "not_implemented",
    502: "upstream_error",
    503: "service_unavailable",
    504: "upstream_timeout",
}


def error_response(
    status: int,
    message: str,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    code: str | None = None,
) -> Response:
    kind = _KINDS.get(status, "invalid_request_error")
    return Response(status, error_body(status, message, kind, code), headers=headers)


def reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def format_response(response: Response, keep_alive: bool) -> bytes:
    """Return head and body as bytes for the wire."""
    return format_head(response, keep_alive) + response.body


def format_head(response: Response, keep_alive: bool) -> bytes:
    """Return the head alone, which is all that HEAD is answered with."""
    head = [
        f"HTTP/1.1 {response.status} {reason(response.status)}\r\n".encode(),
        b"content-type: " + response.content_type + b"\r\n",
        b"content-length: %d\r\n" % len(response.body),
        b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n",
    ]
    head += [name + b": " + value + b"\r\n" for name, value in response.headers]
    return b"".join(head) + b"\r\n"


def connection_options(headers: Headers) -> frozenset[bytes]:
    """Names that a Connection header declares hop-by-hop, in lower case."""
    names: set[bytes] = set()
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            names.update(item.strip().lower() for item in value.split(b","))
    return frozenset(names)
