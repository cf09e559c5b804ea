"""An OpenAI-like engine that does what a test tells it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

Script = Callable[["FakeRequest", asyncio.StreamWriter], Awaitable[bool]]
"""Writes a response; returns whether the connection stays open."""


@dataclass(frozen=True)
class FakeRequest:
    """What came from the router."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def response(
    status: int, body: bytes, headers: str = "", content_type: str = "application/json"
) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Engine-Own: kept\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def answer(payload: Any, status: int = 200) -> Script:
    """A whole JSON response."""

    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(response(status, json.dumps(payload).encode()))
        return True

    return script


def stream(events: list[bytes], pause_seconds: float = 0.0) -> Script:
    """A chunked event stream with a pause before each event."""

    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(SSE_HEAD)
        for event in events:
            await asyncio.sleep(pause_seconds)
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    return script


def raw_then_die(data: bytes) -> Script:
    """Send these bytes, then close in the middle of everything."""

    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return False

    return script


def hang(data: bytes = b"") -> Script:
    """Send these bytes and then nothing, until the router goes away."""

    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        await asyncio.Event().wait()
        return False

    return script


COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "ember", "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 8, "dram_tokens": 6, "ssd_tokens": 2},
    },
}


class FakeEngine:
    """One engine. `completion` and the other scripts may be changed at any time."""

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.completion: Script = answer(COMPLETION)
        self.health: Script = answer({"status": "ok"})
        self.tokenize: Script = self._tokenize
        self.requests: list[FakeRequest] = []
        """Completions only."""
        self.tokenize_calls = 0
        self.aborts = 0
        """Completions whose connection the router closed before their end."""
        self.aborted = asyncio.Event()
        self._asked = asyncio.Event()
        self.active = 0
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEngine]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def was_asked(self) -> None:
        """Wait for the first completion or tokenization."""
        await asyncio.wait_for(self._asked.wait(), 30)

    @property
    def is_down(self) -> bool:
        return self._server is None or not self._server.is_serving()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: stop listening and cut every connection."""
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                if not await self._respond(request, reader, writer):
                    break
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the router, or the test, has had enough of this engine
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _respond(
        self, request: FakeRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if request.target == "/health":
            return await self.health(request, writer)
        if request.target == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": "test"}
            return await answer({"object": "list", "data": [card]})(request, writer)
        if request.target == "/tokenize":
            self.tokenize_calls += 1
            self._asked.set()
            return await self.tokenize(request, writer)
        self.requests.append(request)
        self._asked.set()
        self.active += 1
        work = asyncio.ensure_future(self.completion(request, writer))
        gone = asyncio.ensure_future(reader.read(1))  # the router does not pipeline
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.aborts += 1
                self.aborted.set()
                return False
            return work.result()
        finally:
            self.active -= 1
            for future in (work, gone):
                future.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _tokenize(self, request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        """One token per character of the prompt, or of all messages' content."""
        body = request.json
        text = body.get("prompt") or "".join(m["content"] for m in body["messages"])
        return await answer({"tokens": [ord(letter) for letter in text]})(request, writer)


async def _read_request(reader: asyncio.StreamReader) -> FakeRequest | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        return FakeRequest(method, target, headers, await _read_chunks(reader))
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return FakeRequest(method, target, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while length := int(await reader.readline(), 16):
        body += await reader.readexactly(length)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body
