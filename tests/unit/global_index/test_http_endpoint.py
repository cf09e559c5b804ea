"""The HTTP server over real sockets: kept connections, limits, and clients that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry

from client_sdk import aio
from emberkv_proto.errors import InvalidRequestError, PreflightError, UnavailableError
from global_index import http_endpoint
from global_index.http_endpoint import HttpEndpoint
from global_index.http_message import HttpRequest, HttpResponse, text_response


class Calls:
    def __init__(self) -> None:
        self.closed = 0
        self.go = asyncio.Event()

    async def echo(self, request: HttpRequest) -> HttpResponse:
        return text_response(f"{request.host} {len(request.body)} {request.query}")

    async def fail(self, request: HttpRequest) -> HttpResponse:
        raise {"400": InvalidRequestError, "503": UnavailableError, "500": ZeroDivisionError}[
            request.query["as"]
        ]("so it is")

    async def stream(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(HTTPStatus.OK, self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            yield b""
            await self.go.wait()
            yield b"two" * 1000
        finally:
            self.closed += 1


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def port(calls: Calls) -> AsyncIterator[int]:
    routes = {
        "/echo": {"POST": calls.echo, "GET": calls.echo},
        "/fail": {"GET": calls.fail},
        "/stream": {"GET": calls.stream},
    }
    endpoint = HttpEndpoint(CollectorRegistry(), lambda: True, routes)
    yield await endpoint.start("127.0.0.1", 0)
    await endpoint.stop()


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with aio.timeout(60):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines if line)

    async def ask(self, first: str, *headers: str, body: bytes = b"") -> tuple[int, bytes]:
        lines = [f"{first} HTTP/1.1", "Host: x", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status, answered = await self.head()
        async with aio.timeout(60):
            return status, await self.reader.readexactly(int(answered["Content-Length"]))

    async def is_hung_up(self) -> bool:
        async with aio.timeout(60):
            return await self.reader.read() == b""


async def test_many_requests_go_over_one_connection(port: int) -> None:
    async with Client(port) as client:
        for size in (0, 5, 100_000, 3_000_000):
            assert await client.ask("POST /echo?a=b", body=b"x" * size) == (
                200,
                f"127.0.0.1 {size} {{'a': 'b'}}".encode(),
            )
        assert (await client.ask("GET /health", "Connection: close"))[0] == 200
        assert await client.is_hung_up()


async def test_requests_sent_before_the_first_answer_are_answered_in_order(port: int) -> None:
    async with Client(port) as client:
        for size in (1, 2, 3):
            client.writer.write(
                f"POST /echo HTTP/1.1\r\nContent-Length: {size}\r\n\r\n{'x' * size}".encode()
            )
        for size in (1, 2, 3):
            _, headers = await client.head()
            body = await client.reader.readexactly(int(headers["Content-Length"]))
            assert body == f"127.0.0.1 {size} {{}}".encode()


async def test_a_client_that_asks_before_it_sends_a_body_is_told_to_go_on(port: int) -> None:
    async with Client(port) as client:
        client.writer.write(
            b"POST /echo HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        )
        assert (await client.head())[0] == 100
        client.writer.write(b"abc")
        assert (await client.head())[0] == 200


@pytest.mark.parametrize(
    ("first", "status", "words"),
    [
        ("GET /nothing", 404, b"/echo"),
        ("DELETE /echo", 405, b"takes POST, GET"),
        ("GET /fail?as=400", 400, b"so it is"),
        ("GET /fail?as=503", 503, b"so it is"),
        ("GET /fail?as=500", 500, b"see its log"),
    ],
)
async def test_an_error_is_json_with_its_status_and_the_connection_lives(
    port: int, first: str, status: int, words: bytes
) -> None:
    async with Client(port) as client:
        found, body = await client.ask(first)
        assert found == status
        assert body.startswith(b'{"error":')
        assert words in body
        assert (await client.ask("GET /health"))[0] == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000 + b"\r\n", 431),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"nonsense\r\n\r\n", 400),
    ],
)
async def test_a_request_that_cannot_be_read_is_answered_and_the_connection_closed(
    port: int, raw: bytes, status: int
) -> None:
    async with Client(port) as client:
        client.writer.write(raw)
        found, headers = await client.head()
        assert (found, headers["Connection"]) == (status, "close")


async def test_a_body_that_dawdles_costs_its_connection_only(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_endpoint, "REQUEST_SECONDS", 0.1)
    async with Client(port) as slow, Client(port) as other:
        slow.writer.write(b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\na")
        assert (await other.ask("GET /health"))[0] == 200
        assert await slow.is_hung_up()


async def test_an_idle_connection_is_closed_in_the_end(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_endpoint, "IDLE_SECONDS", 0.1)
    async with Client(port) as client:
        assert await client.is_hung_up()


async def test_one_connection_too_many_is_told_so(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_endpoint, "MAX_CONNECTIONS", 2)
    async with Client(port) as first, Client(port) as second:
        for client in (first, second):
            assert (await client.ask("GET /health"))[0] == 200
        async with Client(port) as third:
            assert (await third.head())[0] == 503
        assert (await first.ask("GET /health"))[0] == 200


async def test_a_stream_is_sent_piece_by_piece_and_closed_when_its_reader_leaves(
    port: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(port) as client:
        client.writer.write(b"GET /stream HTTP/1.1\r\n\r\n")
        status, headers = await client.head()
        assert (status, headers["Transfer-Encoding"]) == (200, "chunked")
        assert await client.reader.readexactly(8) == b"3\r\none\r\n"
        calls.go.set()
        rest = await client.reader.readexactly(5 + 3000 + 2 + 5)
        assert rest.startswith(b"bb8\r\ntwotwo")
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert (await client.ask("GET /health"))[0] == 200
    assert calls.closed == 1


async def test_stop_hangs_up_on_streams_and_idle_connections(calls: Calls) -> None:
    endpoint = HttpEndpoint(CollectorRegistry(), lambda: False, {"/stream": {"GET": calls.stream}})
    port = await endpoint.start("127.0.0.1", 0)
    async with Client(port) as reading, Client(port) as idle:
        assert (await idle.ask("GET /ready"))[0] == 503
        reading.writer.write(b"GET /stream HTTP/1.1\r\n\r\n")
        await reading.head()
        async with aio.timeout(60):
            await endpoint.stop()
        assert await idle.is_hung_up()
    assert calls.closed == 1


async def test_a_port_that_is_taken_names_its_setting(port: int) -> None:
    endpoint = HttpEndpoint(CollectorRegistry(), lambda: True)
    with pytest.raises(PreflightError, match=r"set index\.http_port"):
        await endpoint.start("127.0.0.1", port, "index.http_port")
    await endpoint.stop()
