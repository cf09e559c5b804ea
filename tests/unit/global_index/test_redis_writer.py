"""The writer to Redis against rows in memory: what fails, and what is removed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from redis.exceptions import RedisClusterException

from client_sdk import aio
from emberkv_proto.types import Incarnation, NodeId, Seq, Tier
from global_index import redis_writer
from global_index.dict_index import DictIndex
from global_index.index import Holder
from global_index.ingest import Counts, Exactness
from global_index.membership import Liveness
from global_index.redis_index import Change, Token
from global_index.redis_link import RedisAwayError, RedisFullError, RedisLink
from global_index.redis_mirror import MirroredIndex
from global_index.redis_registry import RedisRegistry
from global_index.redis_schema import RedisSchema
from global_index.redis_settings import RedisKeys
from global_index.redis_writer import OwnNode, RedisWriter
from global_index.views import NodeView
from tests.helpers.redis_server import RedisServer, redis_server

NODE = NodeId("n1")
KEYS = np.arange(1, 101, dtype=np.uint64)


class MemoryRows:
    """Stands for `RedisIndex` and the client behind it."""

    def __init__(self) -> None:
        self.client = self
        self.keys: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None

    async def claim(self, number: Holder, token: Token, rows: int = 0) -> None: ...

    async def release(self, number: Holder) -> None: ...

    async def remove_holder(self, number: Holder) -> None:
        self.keys.clear()

    def is_cut_too_coarsely(self, number: Holder, rows: int) -> bool:
        return False

    async def rows_of_tag(self, number: Holder, tag: int) -> dict[Tier, Any]:
        if self.fault:
            raise self.fault
        return {tier: np.empty(0, np.uint64) for tier in Tier}

    def trips(self, number: Holder, changes: Sequence[Change]) -> Iterator[Change]:
        return iter([change for change in changes if change.keys.size])

    async def send(self, number: Holder, trip: Change) -> int:
        await self.gate.wait()
        (self.keys.update if trip.stores else self.keys.difference_update)(trip.keys.tolist())
        return int(trip.keys.size)


class Link:
    is_up = True

    def __init__(self, rows: MemoryRows) -> None:
        self.client = rows

    async def call(self, do: Callable[[Any], Awaitable[Any]], seconds: float = 30.0) -> Any:
        return await do(self.client)


class Registry:
    writer = "w"

    async def register(self, address: str, token: Token, node_id: NodeId) -> Holder:
        return Holder(0)

    async def publish(self, record: Any, token: Token, *, has_news: bool) -> None: ...

    async def forget(self, node_id: NodeId, token: Token) -> None: ...


def view() -> NodeView:
    return NodeView(
        node_id=NODE,
        incarnation=Incarnation(1),
        seq=Seq(1),
        liveness=Liveness.OK,
        exactness=Exactness.EXACT,
        reported_state="serving",
        grpc_address="",
        tiers=(),
        engines=(),
        lag_seconds=0.0,
        counts=Counts(),
        anomalies=0,
        dropped=0,
    )


def own_node(node_id: NodeId) -> OwnNode:
    return OwnNode("a:1", Token(1), node_id, Holder(0), Liveness.OK, view)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> MemoryRows:
    rows = MemoryRows()
    monkeypatch.setattr(redis_writer, "RedisIndex", lambda client, schema: rows)
    return rows


@pytest.fixture
def writer(rows: MemoryRows) -> RedisWriter:
    index = MirroredIndex(DictIndex(1000), 1024)
    index.apply_stored(Holder(0), Tier.DRAM, KEYS)
    registry: Any = Registry()
    link: Any = Link(rows)
    return RedisWriter(link, RedisSchema(), registry, index, own_node, 300.0)


async def test_fault_of_one_comparison_is_told_once_and_the_next_one_is_tried(
    rows: MemoryRows, writer: RedisWriter
) -> None:
    rows.fault = ValueError("a member that is no integer")
    await writer.turn([NODE])
    await asyncio.sleep(0)
    assert not writer.alive_numbers(), "rows that could not be compared are vouched for"
    with pytest.raises(ValueError, match="no integer"):
        await writer.turn([NODE])
    rows.fault = None
    async with aio.timeout(30):
        while not writer.exact_nodes():
            await writer.turn([NODE])
            await asyncio.sleep(0)
    assert rows.keys == set(KEYS.tolist())
    await writer.close()


async def test_node_removed_while_it_is_compared_leaves_no_rows(
    rows: MemoryRows, writer: RedisWriter
) -> None:
    rows.gate.clear()
    await writer.turn([NODE])
    await asyncio.sleep(0.01)
    forgetting = asyncio.create_task(writer.forget(own_node(NODE)))
    await asyncio.sleep(0.01)
    rows.gate.set()
    await forgetting
    await asyncio.sleep(0.01)
    assert not rows.keys
    await writer.close()


@asynccontextmanager
async def connected(server: RedisServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(RedisKeys(redis_url=server.url))
    running = asyncio.create_task(link.run())
    try:
        async with aio.timeout(30):
            while not link.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("ask", [RedisLink.call, RedisLink.ask])
async def test_cluster_of_which_nobody_can_be_reached_is_away(ask: Any) -> None:
    async def fail(client: Any) -> None:
        raise RedisClusterException("Redis Cluster cannot be connected")

    with redis_server() as server:
        async with connected(server) as link:
            with pytest.raises(RedisAwayError):
                await ask(link, fail, 1.0)
            assert link.counts.losses == 1


async def test_full_redis_still_renews_leases_and_hears_who_is_alive() -> None:
    with redis_server() as server:
        async with connected(server) as link:
            registry = RedisRegistry(link, RedisSchema(), "w", 3.0)
            won = (await registry.beat({}, ["a:1"])).won
            await link.client.config_set("maxmemory", "100kb")
            with pytest.raises(RedisFullError):
                await link.call(lambda client: client.set("x", "y"))
            assert (await registry.beat(won, [])).kept == {"a:1"}
            await registry.vouch([Holder(1)])
            assert await link.client.get(registry.alive_key("w")) == b"\0\x01"
