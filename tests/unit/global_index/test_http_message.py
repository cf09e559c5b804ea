"""Request heads that are read, and those that are refused."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from global_index.http_message import RefusedError, parse_head


def head(*lines: str) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def test_a_request_is_read_with_its_query_and_headers() -> None:
    read = parse_head(
        head("POST /dump?node_id=a%20b&x= HTTP/1.1", "Host: h", "CONTENT-Length: 12", "X: a:b ")
    )
    assert (read.method, read.path) == ("POST", "/dump")
    assert read.query == {"node_id": "a b", "x": ""}
    assert read.headers == {"host": "h", "content-length": "12", "x": "a:b"}
    assert (read.body_bytes, read.keeps_alive, read.expects_continue) == (12, True, False)


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        ("HTTP/1.1", "x", True),
        ("HTTP/1.1", "Close", False),
        ("HTTP/1.0", "x", False),
        ("HTTP/1.0", "Keep-Alive", True),
    ],
)
def test_connections_are_kept_as_the_version_and_the_client_wish(
    version: str, connection: str, keeps_alive: bool
) -> None:
    read = parse_head(head(f"GET / {version}", f"Connection: {connection}"))
    assert read.keeps_alive is keeps_alive


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("GET /"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1 x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/2"), HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (head("GET / HTTP/1.1", "no colon"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", ": x"), HTTPStatus.BAD_REQUEST),
        (head("GET / HTTP/1.1", " folded: x"), HTTPStatus.BAD_REQUEST),
        (head("POST / HTTP/1.1", "Content-Length: -1"), HTTPStatus.BAD_REQUEST),
        (head("POST / HTTP/1.1", "Content-Length: \xb2"), HTTPStatus.BAD_REQUEST),
        (
            head("POST / HTTP/1.1", "Content-Length: 1", "Content-Length: 2"),
            HTTPStatus.BAD_REQUEST,
        ),
        (head(f"GET /?{'a&' * 40} HTTP/1.1"), HTTPStatus.BAD_REQUEST),
        (head("POST / HTTP/1.1", "Transfer-Encoding: chunked"), HTTPStatus.LENGTH_REQUIRED),
        (
            head("POST / HTTP/1.1", "Content-Length: 99999999999"),
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        ),
    ],
)
def test_what_is_no_request_of_ours_is_refused_with_its_status(
    raw: bytes, status: HTTPStatus
) -> None:
    with pytest.raises(RefusedError) as refused:
        parse_head(raw)
    assert refused.value.status is status
