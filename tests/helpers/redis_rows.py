"""What the index in Redis says of a node, read past everything that caches it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from emberkv_proto.types import NodeId
from global_index.ingest import Exactness
from global_index.redis_index import RedisIndex
from global_index.redis_registry import parse_registry
from global_index.redis_schema import RedisSchema
from tests.helpers.agreement import Catalog

CALL_SECONDS = 5.0
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
        rows = RedisIndex(client, schema)
        for tier, wanted in catalog.digests.items():
            digest = await rows.digest(record.number, tier)
            if (digest.blocks, digest.xor) != wanted:
                found.append(
                    f"Redis: {catalog.node_id} has {digest.blocks} blocks in {tier.name},"
                    f" its catalog {wanted[0]}"
                )
        return found

    try:
        return asyncio.run(_with_client(url, compare))
    except (RedisError, OSError) as error:
        return [f"Redis: {error!r}"]


async def _with_client(url: str, ask: Callable[[Any], Awaitable[T]]) -> T:
    async with redis.asyncio.Redis.from_url(url, socket_timeout=CALL_SECONDS) as client:
        return await ask(client)
