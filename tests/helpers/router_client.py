"""A router in the test's own loop, an index that a test fills by hand, and a raw HTTP client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from client_sdk.aio import timeout
from emberkv_proto.events import Keys
from emberkv_proto.types import ChainHits, EngineHit, EngineInfo, NodeHit, NodeId, TierDigest
from global_index.kube.pods import EnginePod
from router.app import Router
from router.config import RouterSection
from router.view import IndexView


@dataclass
class HandNode:
    """A node as the test says it is."""

    node_id: NodeId
    liveness: str = "ok"
    engines: tuple[EngineInfo, ...] = ()
    dram: set[int] = field(default_factory=set)
    """Index keys."""
    exactness: str = "exact"
    reported_state: str = "serving"
    tiers: tuple[TierDigest, ...] = ()
    lag_seconds: float = 0.0
    dropped: int = 0
    grpc_address: str = ""


class HandIndex:
    """The IndexView of nodes made by hand."""

    def __init__(self, *nodes: HandNode) -> None:
        self.all = list(nodes)
        self.hbm: dict[str, set[int]] = {}
        """Index keys of engines that publish their events, by URL."""
        self.configured: list[tuple[NodeId, EngineInfo]] = []
        self.found: list[EnginePod] = []
        self.queries = 0
        self.is_broken = False
        self.is_far = False
        """Answers have to be waited for, as those of Redis."""

    async def answer(self, keys: Keys) -> ChainHits:
        await asyncio.sleep(0)
        return self._answer(keys)

    def answer_now(self, keys: Keys) -> ChainHits | None:
        return None if self.is_far else self._answer(keys)

    def _answer(self, keys: Keys) -> ChainHits:
        self.queries += 1
        if self.is_broken:
            raise RuntimeError("the index is broken")
        chain = keys.tolist()
        nodes = tuple(
            NodeHit(node.node_id, count, count, 0)
            for node in self.all
            if (count := _run(chain, node.dram))
        )
        engines = [hit for node in self.all for hit in self._engine_hits(chain, node)]
        return ChainHits(nodes, tuple(sorted(engines, key=lambda hit: -hit.hit_blocks)))

    def _engine_hits(self, chain: list[int], node: HandNode) -> Iterator[EngineHit]:
        for engine in node.engines:
            own = self.hbm.get(engine.url)
            if own is not None and (count := _run(chain, own | node.dram)):
                hbm = sum(key in own for key in chain[:count])
                who = (engine.engine_id, engine.dp_rank, engine.url, node.node_id)
                yield EngineHit(*who, count, hbm, count - hbm, 0)

    def configured_engines(self) -> Sequence[tuple[NodeId, EngineInfo]]:
        return self.configured

    def discovered_engines(self) -> Sequence[EnginePod]:
        return self.found

    def nodes(self) -> Sequence[HandNode]:
        return self.all


def _run(chain: list[int], held: set[int]) -> int:
    """How many leading blocks are held."""
    return next((n for n, key in enumerate(chain) if key not in held), len(chain))


SETTLE_SECONDS = 30.0
FAST = {
    "port": 0,
    "health_interval_seconds": 0.1,
    "health_timeout_seconds": 10.0,
    "breaker_open_seconds": 0.2,
    "sync_seconds": 0.05,
    "drain_seconds": 2.0,
}
"""Times for tests."""


@dataclass
class RunningRouter:
    router: Router
    port: int

    def inflight(self) -> int:
        return self.router.ledger.total_requests()

    def counter(self, name: str, **labels: str) -> float:
        value = self.router.metrics.registry.get_sample_value(f"emberkv_router_{name}", labels)
        return value or 0.0

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.inflight():
            assert time.monotonic() < deadline, f"{self.inflight()} requests never ended"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_router(
    *urls: str, index: IndexView | None = None, seed: int = 0, **settings: Any
) -> AsyncIterator[RunningRouter]:
    """A router over these engines; its parts' invariants are checked at the end."""
    values: dict[str, Any] = {**FAST, "engines": [{"url": url} for url in urls], **settings}
    cfg = RouterSection.model_validate(values)
    router = Router(cfg, index or HandIndex(), random.Random(seed))
    async with router.running() as port:
        yield RunningRouter(router, port)
        router.check_integrity()
    router.check_integrity()
    assert router.ledger.total_requests() == 0
    assert router.pool.open_connections == 0


@dataclass
class Got:
    """A response as it came."""

    status: int
    headers: dict[str, str]
    raw_body: bytes
    """With its framing."""

    @property
    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.raw_body
        out, rest = b"", self.raw_body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            out += rest[:length]
            assert rest[length : length + 2] == b"\r\n", "chunk without end"
            rest = rest[length + 2 :]
            if not length:
                assert not rest
        return out

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One connection; what is sent is exactly what the test writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_head(self) -> Got:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        first, *lines = raw.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                headers[name.lower()] = value.strip()
        return Got(int(first.split(" ")[1]), headers, b"")

    async def read(self) -> Got:
        """One whole response, by its framing."""
        got = await self.read_head()
        if got.headers.get("transfer-encoding") == "chunked":
            while True:
                line = await asyncio.wait_for(self.reader.readline(), 30)
                length = int(line, 16)
                rest = await asyncio.wait_for(self.reader.readexactly(length + 2), 30)
                got.raw_body += line + rest
                if not length:
                    return got
        if "content-length" in got.headers:
            length = int(got.headers["content-length"])
            got.raw_body = await asyncio.wait_for(self.reader.readexactly(length), 30)
        else:
            got.raw_body = await asyncio.wait_for(self.reader.read(), 30)
        return got

    async def is_closed(self) -> bool:
        """Whether the router closes this connection without a further byte."""
        return await asyncio.wait_for(self.reader.read(), 30) == b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> None:
        self.send(http_post(path, body, headers))


def http_post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(raw)}\r\n{extra}\r\n"
    return head.encode() + raw


async def until_status(
    port: int,
    path: str,
    status: int,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Got:
    """Ask again and again until the answer has this status."""
    async with timeout(SETTLE_SECONDS):
        while (got := await request(port, path, body, headers)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return got


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def request(
    port: int, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Got:
    """One request on a connection of its own; a GET when there is no body."""
    async with connected(port) as client:
        if body is None:
            client.send(f"GET {path} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
        else:
            client.post(path, body, headers)
        return await client.read()
