"""The obvious index: sets of keys. Slow; the oracle that the tests hold the others against."""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from operator import xor

import numpy as np

from emberkv_proto.buckets import BUCKET_SHIFT, KEY_MIX
from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index.base_links import BaseLinks
from global_index.index import (
    EVERYTHING,
    Applied,
    Collected,
    Holder,
    HolderHit,
    HolderHits,
    Holding,
    TableSize,
)


class NaiveIndex:
    """A `BlockIndex` without one clever line."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._sets: defaultdict[tuple[Holder, Tier], set[int]] = defaultdict(set)
        self._links = BaseLinks()

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        changed = unchanged = dropped = 0
        known = self._distinct()
        for key in keys.tolist():
            if key == 0 or key in self._sets[holder, tier]:
                unchanged += 1
            elif key not in known and len(known) >= self._capacity:
                dropped += 1
            else:
                self._sets[holder, tier].add(key)
                known.add(key)
                changed += 1
        return Applied(changed, unchanged, dropped)

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        changed = unchanged = 0
        for key in keys.tolist():
            if key in self._sets[holder, tier]:
                self._sets[holder, tier].remove(key)
                changed += 1
            else:
                unchanged += 1
        return Applied(changed, unchanged, 0)

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        return len(self._sets.pop((holder, tier), set()))

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        for tier in Tier:
            self._sets.pop((holder, tier), None)
        self._links.forget(holder)
        return True

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        self._links.set_base(holder, base)

    def query(self, keys: Keys) -> HolderHits:
        hits = []
        owners = {holder for holder, _ in self._sets}
        owners.update(*(self._links.dependents(owner) for owner in [*owners]))
        for holder in owners:
            base = self._links.base(holder)
            both = (holder,) if base is None else (holder, base)
            counts = dict.fromkeys(Tier, 0)
            for key in keys.tolist():
                fastest = next(
                    (tier for tier in Tier if any(key in self._sets[who, tier] for who in both)),
                    None,
                )
                if fastest is None:
                    break
                counts[fastest] += 1
            if any(counts.values()):
                hits.append(
                    HolderHit(holder, sum(counts.values()), counts[Tier.HBM], counts[Tier.DRAM])
                )
        return HolderHits.of(hits)

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        held = [pair for pair, keys in self._sets.items() if key in keys]
        return tuple(
            Holding(holder, tuple(tier for tier in Tier if (holder, tier) in held))
            for holder in sorted({holder for holder, _ in held})
        )

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        return np.array(sorted(self._sets.get((holder, tier), ())), np.uint64)

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        return Collected(self.rows(holder, tier), None)

    @property
    def buckets_at_once(self) -> int:
        return 1

    def bucket_xors(self, holder: Holder, tier: Tier, first: int, count: int) -> Keys:
        buckets = (self.bucket_keys(holder, tier, n) for n in range(first, first + count))
        return np.array([reduce(xor, keys.tolist(), 0) for keys in buckets], np.uint64)

    def bucket_keys(self, holder: Holder, tier: Tier, bucket: int) -> Keys:
        held = self._sets.get((holder, tier), set())
        of_bucket = [key for key in held if (key * KEY_MIX) % 2**64 >> BUCKET_SHIFT == bucket]
        return np.array(of_bucket, np.uint64)

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        keys = self._sets.get((holder, tier), set())
        return TierDigest(tier, len(keys), reduce(xor, keys, 0))

    def size(self) -> TableSize:
        return TableSize(len(self._distinct()), self._capacity, 0)

    def check_integrity(self) -> None:
        self._links.check_integrity()
        assert 0 not in self._distinct(), "key 0 names no block"
        assert len(self._distinct()) <= self._capacity, "more blocks than capacity"

    def _distinct(self) -> set[int]:
        return set().union(*self._sets.values())
