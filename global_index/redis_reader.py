"""Queries to Redis: blocks, alive nodes and the registry's version in one round trip."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from emberkv_proto.events import Keys
from emberkv_proto.types import NodeHit, NodeId
from global_index.index import Holder, HolderHit
from global_index.redis_index import ask_values, windows
from global_index.redis_link import RedisAwayError, RedisLink
from global_index.redis_record import NodeRecord
from global_index.redis_registry import RedisRegistry, Registry, alive_numbers
from global_index.redis_schema import RedisSchema
from global_index.redis_walk import ChainWalk, Window, decode

NOTHING = Registry(b"", {}, {}, (), 0)


@dataclass(slots=True)
class ReaderCounts:
    """What queries to Redis went through; never goes down."""

    queries: int = 0
    away: int = 0
    """Answered from this process's rows alone: Redis was away or late."""
    malformed: int = 0
    """Values and records that no writer of ours wrote, left out."""
    unknown: int = 0
    """Hits of numbers that no record names, left out."""


class RedisReader:
    """Answers from Redis. Not thread-safe; calls may overlap."""

    def __init__(
        self, link: RedisLink, schema: RedisSchema, registry: RedisRegistry, query_seconds: float
    ) -> None:
        self._link = link
        self._schema = schema
        self._access = registry
        self._query_seconds = query_seconds
        self._registry = NOTHING
        self._alive: frozenset[Holder] = frozenset()
        self.counts = ReaderCounts()
        self.has_news = asyncio.Event()
        """The records have changed since they were read: call `refresh`."""

    async def query(self, keys: Keys) -> list[NodeHit] | None:
        """Leading runs on the nodes that are alive; None where Redis does not answer in time."""
        self.counts.queries += 1
        if not keys.size:
            return []
        try:
            hits = await self._link.ask(lambda client: self._ask(client, keys), self._query_seconds)
        except RedisAwayError:
            self.counts.away += 1
            return None
        found = []
        for hit in hits:
            record = self._registry.by_number.get(hit.holder)
            if record is None:
                self.counts.unknown += 1
            elif hit.holder in self._alive:
                found.append(
                    NodeHit(record.view.node_id, hit.hit_blocks, hit.dram_blocks, hit.ssd_blocks)
                )
        return found

    async def trace(self, keys: Keys) -> dict[NodeId, bytes]:
        """In which tiers each node has each block: a byte a block, 1 HBM, 2 DRAM, 4 SSD, added.

        Nothing while Redis is away. For people; `keys` are a piece of a chain.
        """

        async def ask(client: Any) -> Window:
            async with client.pipeline(transaction=False) as pipe:
                asked = ask_values(client, pipe, self._schema, keys)
                return decode(asked.in_order(await pipe.execute()))

        try:
            window = await self._link.call(ask)
        except RedisAwayError:
            return {}
        traces: dict[NodeId, bytes] = {}
        for number, record in self._registry.by_number.items():
            of_node = window.numbers == number
            tiers = np.zeros(keys.size, np.uint8)
            tiers[window.places[of_node]] = window.tiers[of_node]
            traces[record.view.node_id] = tiers.tobytes()
        return traces

    async def refresh(self) -> None:
        """Read the records anew. Raises RedisAwayError."""
        self.has_news.clear()
        registry = await self._access.read()
        if registry.malformed != self._registry.malformed:
            self.counts.malformed += registry.malformed
        self._registry = registry
        await self._link.call(self._read_alive)

    def forget(self) -> None:
        """Redis is away: of what it said, the records stay, but nobody is known to be alive."""
        self._alive = frozenset()

    def records(self) -> list[NodeRecord]:
        return list(self._registry.records.values())

    def is_alive(self, node_id: NodeId) -> bool:
        record = self._registry.records.get(node_id)
        return record is not None and record.number in self._alive

    async def _ask(self, client: Any, keys: Keys) -> list[HolderHit]:
        walk = ChainWalk()
        for first, last in windows(keys.size):
            writers = self._registry.writers
            names = [self._access.version_key(), *map(self._access.alive_key, writers)]
            async with client.pipeline(transaction=False) as pipe:
                pipe.execute_command("MGET", *names)
                asked = ask_values(client, pipe, self._schema, keys[first:last])
                (version, *vouchers), *replies = await pipe.execute()
            self._alive = alive_numbers(self._registry, writers, vouchers)
            if (version or b"") != self._registry.version:
                # What is known stays true of every number for REST_SECONDS; only news is missing.
                self.has_news.set()
            window = decode(asked.in_order(replies))
            self.counts.malformed += window.malformed
            walk.add(window)
            walk.keep(np.array(sorted(self._alive), np.intp))
            if walk.is_over:
                break
        return walk.hits()

    async def _read_alive(self, client: Any) -> None:
        registry = self._registry
        if not registry.writers:
            self._alive = frozenset()
            return
        names = [self._access.alive_key(writer) for writer in registry.writers]
        vouchers = await client.execute_command("MGET", *names)
        self._alive = alive_numbers(registry, registry.writers, vouchers)
