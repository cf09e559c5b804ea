"""HTTP/1.1 requests and answers of the index: what is read from a connection, and written to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import msgspec

MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 12 * 1024 * 1024
"""A prompt of a million token ids as JSON."""
MAX_QUERY_FIELDS = 32
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


class RefusedError(Exception):
    """A request that is answered with an error status; the connection is closed after it."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, whole. `host` is who sent it; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    host: str
    keeps_alive: bool


@dataclass(frozen=True, slots=True, eq=False)
class HttpResponse:
    """An answer. A body that is a generator is sent piece by piece; it is closed in any case."""

    status: HTTPStatus
    body: bytes | AsyncGenerator[bytes, None]
    content_type: str = JSON


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode(value) + b"\n")


def text_response(text: str, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, text.encode(), TEXT)


def error_response(status: HTTPStatus, message: str) -> HttpResponse:
    """What went wrong, in the form that Dynamo's indexer has for it."""
    return json_response({"error": message}, status)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_bytes: int
    keeps_alive: bool
    expects_continue: bool


def parse_head(raw: bytes) -> RequestHead:
    """What stands before a body. Raises RefusedError for what is no such request."""
    try:
        first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, version = first.split(" ")
    except ValueError:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the first line is no HTTP request") from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "wanted HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a header line is malformed")
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "two different Content-Length headers")
        headers[name] = value
    if "transfer-encoding" in headers:
        raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "send the body with a Content-Length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 20):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "Content-Length is no number")
    if int(length) > MAX_BODY_BYTES:
        raise RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY_BYTES} bytes"
        )
    path, _, query = target.partition("?")
    try:
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"a query has at most {MAX_QUERY_FIELDS} fields"
        ) from None
    wish = headers.get("connection", "").lower()
    return RequestHead(
        method,
        path,
        asked,
        headers,
        int(length),
        wish == "keep-alive" if version == "HTTP/1.0" else wish != "close",
        headers.get("expect", "").lower() == "100-continue",
    )


async def read_head(reader: asyncio.StreamReader) -> RequestHead | None:
    """The next request's head; None when the client has left. Raises RefusedError."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the request breaks off") from None
        return None
    except asyncio.LimitOverrunError:
        raise RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the headers have more than {MAX_HEAD_BYTES} bytes",
        ) from None
    return parse_head(raw)


def head_bytes(response: HttpResponse, length: int | None, *, keeps_alive: bool) -> bytes:
    """Status line and headers; without a length the body is sent in chunks."""
    status = response.status
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    connection = "keep-alive" if keeps_alive else "close"
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {response.content_type}\r\n"
        f"{size}\r\nConnection: {connection}\r\n\r\n"
    ).encode()
