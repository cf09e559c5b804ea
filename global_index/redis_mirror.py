"""Takes down what changes in a `BlockIndex`, for holders whose rows are also in Redis. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index.index import (
    EVERYTHING,
    Applied,
    BlockIndex,
    Collected,
    Holder,
    HolderHits,
    Holding,
    TableSize,
)
from global_index.redis_index import Change


@dataclass(slots=True)
class _Queue:
    changes: list[Change] = field(default_factory=list)
    rows: int = 0
    has_overflowed: bool = False


class MirroredIndex:
    """The index that it wraps, with a queue of changes for each watched holder.

    Together the queues hold `queue_rows` rows at most; the holder that needs more loses its queue
    and must be compared as a whole.
    """

    def __init__(self, inner: BlockIndex, queue_rows: int) -> None:
        self._inner = inner
        self._queue_rows = queue_rows
        self._queues: dict[Holder, _Queue] = {}
        self._queued = 0
        self.overflows = 0

    # What the writer takes

    def watch(self, holder: Holder) -> None:
        """Begin an empty queue: what changes from now on."""
        self.unwatch(holder)
        self._queues[holder] = _Queue()

    def unwatch(self, holder: Holder) -> None:
        queue = self._queues.pop(holder, None)
        if queue:
            self._queued -= queue.rows

    def is_complete(self, holder: Holder) -> bool:
        """Whether the queue holds all changes since it was last taken."""
        queue = self._queues.get(holder)
        return queue is not None and not queue.has_overflowed

    def has_changes(self, holder: Holder) -> bool:
        return bool(self._queues[holder].changes)

    def take(self, holder: Holder) -> list[Change]:
        """The changes since the last time, oldest first."""
        queue = self._queues[holder]
        self._queued -= queue.rows
        taken, queue.changes, queue.rows = queue.changes, [], 0
        return taken

    @property
    def queued_rows(self) -> int:
        return self._queued

    # BlockIndex

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        self._note(holder, tier, keys, stores=True)
        return self._inner.apply_stored(holder, tier, keys)

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        self._note(holder, tier, keys, stores=False)
        return self._inner.apply_removed(holder, tier, keys)

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        if holder in self._queues:
            self._note(holder, tier, self._inner.rows(holder, tier), stores=False)
        return self._inner.clear_tier(holder, tier)

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        self.unwatch(holder)  # its rows went out of sight before
        return self._inner.remove_holder(holder, budget_slots)

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        self._inner.set_base(holder, base)

    def query(self, keys: Keys) -> HolderHits:
        return self._inner.query(keys)

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        return self._inner.holdings(key)

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        return self._inner.rows(holder, tier)

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        return self._inner.collect(holder, tier, start_slot, budget_slots)

    @property
    def buckets_at_once(self) -> int:
        return self._inner.buckets_at_once

    def bucket_xors(self, holder: Holder, tier: Tier, first: int, count: int) -> Keys:
        return self._inner.bucket_xors(holder, tier, first, count)

    def bucket_keys(self, holder: Holder, tier: Tier, bucket: int) -> Keys:
        return self._inner.bucket_keys(holder, tier, bucket)

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        return self._inner.digest(holder, tier)

    def size(self) -> TableSize:
        return self._inner.size()

    def check_integrity(self) -> None:
        self._inner.check_integrity()
        assert self._queued <= self._queue_rows, "more rows are queued than may be"
        assert self._queued == sum(queue.rows for queue in self._queues.values())
        for queue in self._queues.values():
            assert queue.rows == sum(change.keys.size for change in queue.changes)

    def _note(self, holder: Holder, tier: Tier, keys: Keys, *, stores: bool) -> None:
        queue = self._queues.get(holder)
        if queue is None or queue.has_overflowed:
            return
        if self._queued + keys.size > self._queue_rows:
            self._queued -= queue.rows
            queue.changes, queue.rows, queue.has_overflowed = [], 0, True
            self.overflows += 1
            return
        queue.changes.append(Change(tier, np.array(keys, np.uint64), stores))
        queue.rows += keys.size
        self._queued += keys.size
