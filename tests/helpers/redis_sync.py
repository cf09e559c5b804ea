"""A `BlockIndex` over rows in a real Redis, for tests that hold it against the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis.asyncio

from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index.index import (
    EVERYTHING,
    MAX_HOLDERS,
    Applied,
    Holder,
    HolderHits,
    Holding,
    TableSize,
)
from global_index.redis_index import RedisIndex, Token
from global_index.redis_schema import RedisSchema

T = TypeVar("T")


class SyncRedisIndex:
    """Calls wait for Redis on a loop of their own. It bounds no capacity. `close` it."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = _connected(url)
        self._do(self._client.flushall())
        self.index = RedisIndex(self._client, RedisSchema())
        self._claimed: set[Holder] = set()

    def close(self) -> None:
        self._do(self._client.aclose())
        self._loop.close()

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        self._claim(holder)
        return self._do(self.index.apply_stored(holder, tier, keys))

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        self._claim(holder)
        return self._do(self.index.apply_removed(holder, tier, keys))

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        self._claim(holder)
        return self._do(self.index.clear_tier(holder, tier))

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        self._claim(holder)
        self._do(self.index.remove_holder(holder))
        return True

    def query(self, keys: Keys) -> HolderHits:
        return HolderHits.of(self._do(self.index.query(keys)))

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        return self._do(self.index.holdings(key))

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        return self._do(self.index.digest(holder, tier))

    def size(self) -> TableSize:
        """`blocks` counts keys of Redis, reverse sets and fences included."""
        return TableSize(self._do(self._client.dbsize()), MAX_HOLDERS, 0)

    def check_integrity(self) -> None:
        self._do(self.index.check_integrity())

    def _claim(self, holder: Holder) -> None:
        if holder not in self._claimed:
            self._do(self.index.claim(holder, Token(1)))
            self._claimed.add(holder)

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)


def _connected(url: str) -> Any:
    return redis.asyncio.Redis.from_url(url)
