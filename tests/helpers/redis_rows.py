"""What the index in Redis says of a node, read past everything that caches it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import redis.asyncio
from redis.exceptions import RedisError

from emberkv_proto.types import NodeId, Tier
from global_index.index import Holder
from global_index.ingest import Exactness
from global_index.redis_registry import parse_registry
from global_index.redis_schema import RedisSchema
from global_index.redis_walk import decode
from tests.helpers.agreement import Catalog

CALL_SECONDS = 20.0
T = TypeVar("T")


def flush(url: str) -> None:
    """FLUSHALL."""
    asyncio.run(_with_client(url, lambda client: client.flushall()))


def redis_differences(url: str, catalog: Catalog) -> list[str]:
    """In which way the rows in Redis are not those of a node's catalog."""

    async def compare(client: Any) -> list[str]:
        schema = RedisSchema()
        raw = await client.hgetall(schema.registry("records"))
        record = parse_registry(b"", raw).records.get(NodeId(catalog.node_id))
        if record is None:
            return [f"Redis: {catalog.node_id} is not known"]
        view = record.view
        if view.exactness is not Exactness.EXACT or view.incarnation != catalog.incarnation:
            return [f"Redis: {catalog.node_id} is {view.exactness} in life {view.incarnation}"]
        found = []
        rows = await rows_of(client, record.number)
        for tier, wanted in catalog.rows.items():
            if rows[tier] != wanted:
                found.append(
                    f"Redis: {catalog.node_id} lacks {len(wanted - rows[tier])} blocks in"
                    f" {tier.name} and has {len(rows[tier] - wanted)} too many"
                )
        return found

    try:
        return asyncio.run(_with_client(url, compare))
    except (RedisError, OSError) as error:
        return [f"Redis: {error!r}"]


async def rows_of(client: Any, number: Holder) -> dict[Tier, frozenset[int]]:
    """All rows of a number, by the blocks' values that queries read: every key is looked at."""
    head = len(RedisSchema().blocks(np.ones(1, np.uint64))[0]) - 8
    names = [name async for name in client.scan_iter(count=10_000) if len(name) == head + 8]
    values = await client.mget(names) if names else []  # a set's is None
    window = decode(values)
    assert window.malformed == 0
    found: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for place, holder, tiers in zip(
        window.places.tolist(), window.numbers.tolist(), window.tiers.tolist(), strict=True
    ):
        for tier in Tier:
            if holder == number and tiers >> (tier - 1) & 1:
                found[tier].add(int.from_bytes(names[place][head:], "little"))
    return {tier: frozenset(keys) for tier, keys in found.items()}


async def _with_client(url: str, ask: Callable[[Any], Awaitable[T]]) -> T:
    async with redis.asyncio.Redis.from_url(url, socket_timeout=CALL_SECONDS) as client:
        return await ask(client)
