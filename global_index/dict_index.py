"""The memory index's twin in plain Python: one dict of integers.

The fallback where Numba is missing or cannot compile; ten times slower, five times larger, same
answers. A block's holders are one integer with three bits a holder: HBM, DRAM, SSD.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from emberkv_proto.buckets import BUCKETS, bucket_numbers, xor_into
from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index.base_links import BaseLinks
from global_index.index import (
    EVERYTHING,
    MAX_HOLDERS,
    Applied,
    Collected,
    Holder,
    HolderHit,
    HolderHits,
    Holding,
    TableSize,
)

_HOLDER_BITS = 3
_FIRST_BITS = sum(1 << (_HOLDER_BITS * holder) for holder in range(MAX_HOLDERS))
"""The lowest of each holder's bits."""


@dataclass(slots=True)
class _Run:
    """One holder's leading run while it is walked: its stays in HBM and in DRAM."""

    tier: Tier | None = None
    since: int = 0
    hbm: int = 0
    dram: int = 0

    def go_on(self, position: int, tier: Tier | None) -> None:
        if self.tier is Tier.HBM:
            self.hbm += position - self.since
        elif self.tier is Tier.DRAM:
            self.dram += position - self.since
        self.tier, self.since = tier, position

    def hit(self, holder: Holder, end: int) -> HolderHit:
        self.go_on(end, None)
        return HolderHit(holder, end, self.hbm, self.dram)


class DictIndex:
    """A `BlockIndex`. Removing a holder or clearing a tier scans the dict."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks {capacity_blocks} must be at least 1")
        self._capacity = capacity_blocks
        self._blocks: dict[int, int] = {}
        self._digests: dict[tuple[Holder, Tier], TierDigest] = {}
        self._links = BaseLinks()

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        blocks, bit = self._blocks, _bit(holder, tier)
        changed = unchanged = dropped = xor = 0
        for key in keys.tolist():
            held = blocks.get(key, 0)
            if not key or held & bit:
                unchanged += 1
            elif not held and len(blocks) >= self._capacity:
                dropped += 1
            else:
                blocks[key] = held | bit
                changed += 1
                xor ^= key
        self._count(holder, tier, changed, xor)
        return Applied(changed, unchanged, dropped)

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        blocks, bit = self._blocks, _bit(holder, tier)
        changed = unchanged = xor = 0
        for key in keys.tolist():
            held = blocks.get(key, 0)
            if not held & bit:
                unchanged += 1
                continue
            if held == bit:
                del blocks[key]
            else:
                blocks[key] = held ^ bit
            changed += 1
            xor ^= key
        self._count(holder, tier, -changed, xor)
        return Applied(changed, unchanged, 0)

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        bit = _bit(holder, tier)
        removed = self.digest(holder, tier).blocks
        if removed:
            self._strip([key for key, held in self._blocks.items() if held & bit], bit)
            self._digests.pop((holder, tier))
        return removed

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        """A dict has no slots to go on from: the budget bounds the rows removed, not the scan."""
        mask = 0b111 << (_HOLDER_BITS * holder)
        found = (key for key, held in self._blocks.items() if held & mask)
        left = sum(self.digest(holder, tier).blocks for tier in Tier)
        keys = list(islice(found, min(budget_slots, left)))
        for key in keys:
            for tier in Tier:
                if self._blocks[key] & _bit(holder, tier):
                    self._count(holder, tier, -1, key)
        self._strip(keys, mask)
        if any(self.digest(holder, tier).blocks for tier in Tier):
            return False
        self._links.forget(holder)
        return True

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        self._links.set_base(holder, base)

    def query(self, keys: Keys) -> HolderHits:
        hits: list[HolderHit] = []
        runs: dict[Holder, _Run] = {}
        was = 0
        for position, key in enumerate(keys.tolist()):
            held = self._blocks.get(key, 0)
            # Only holders whose tiers change are touched, whatever the chain's length.
            changed = held ^ was
            was = held
            for seen in _holders((changed | changed >> 1 | changed >> 2) & _FIRST_BITS):
                for holder in (seen, *self._links.dependents(seen)):
                    if position == 0:
                        runs.setdefault(holder, _Run())
                    if holder in runs:
                        runs[holder].go_on(position, self._fastest(held, holder))
                        if runs[holder].tier is None:
                            hits.append(runs.pop(holder).hit(holder, position))
            if not runs:
                break
        hits += [run.hit(holder, keys.size) for holder, run in runs.items()]
        return HolderHits.of(hits)

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        held = self._blocks.get(key, 0)
        present = (held | held >> 1 | held >> 2) & _FIRST_BITS
        return tuple(
            Holding(holder, tuple(tier for tier in Tier if held & _bit(holder, tier)))
            for holder in _holders(present)
        )

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        bit = _bit(holder, tier)
        return np.array([key for key, held in self._blocks.items() if held & bit], np.uint64)

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        """All at once, whatever the budget: a dict that changes cannot be gone on with."""
        return Collected(self.rows(holder, tier), None)

    @property
    def buckets_at_once(self) -> int:
        return BUCKETS  # one scan of the dict, however many

    def bucket_xors(self, holder: Holder, tier: Tier, first: int, count: int) -> Keys:
        xors = np.zeros(BUCKETS, np.uint64)
        xor_into(xors, self.rows(holder, tier))
        return xors[first : first + count]

    def bucket_keys(self, holder: Holder, tier: Tier, bucket: int) -> Keys:
        keys = self.rows(holder, tier)
        found: Keys = keys[bucket_numbers(keys) == bucket]
        return found

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        return self._digests.get((holder, tier)) or TierDigest(tier, 0, 0)

    def size(self) -> TableSize:
        return TableSize(len(self._blocks), self._capacity, 0)

    def check_integrity(self) -> None:
        self._links.check_integrity()
        assert len(self._blocks) <= self._capacity, "more blocks than capacity"
        counted: dict[tuple[Holder, Tier], TierDigest] = {}
        for key, held in self._blocks.items():
            assert key, "key 0 names no block"
            assert held, f"key {key} has no holder"
            for holding in self.holdings(IndexKey(key)):
                for tier in holding.tiers:
                    old = counted.get((holding.holder, tier), TierDigest(tier, 0, 0))
                    counted[holding.holder, tier] = TierDigest(tier, old.blocks + 1, old.xor ^ key)
        assert counted == self._digests, "digests differ from the rows"

    def _fastest(self, held: int, holder: Holder) -> Tier | None:
        base = self._links.base(holder)
        bits = held >> (_HOLDER_BITS * holder)
        if base is not None:
            bits |= held >> (_HOLDER_BITS * base)
        bits &= 0b111
        return Tier((bits & -bits).bit_length()) if bits else None

    def _strip(self, keys: list[int], mask: int) -> None:
        for key in keys:
            left = self._blocks[key] & ~mask
            if left:
                self._blocks[key] = left
            else:
                del self._blocks[key]

    def _count(self, holder: Holder, tier: Tier, change: int, xor: int) -> None:
        old = self.digest(holder, tier)
        new = TierDigest(tier, old.blocks + change, old.xor ^ xor)
        if new.blocks:
            self._digests[holder, tier] = new
        else:
            self._digests.pop((holder, tier), None)


def _bit(holder: Holder, tier: Tier) -> int:
    return 1 << (_HOLDER_BITS * holder + tier - 1)


def _holders(mask: int) -> list[Holder]:
    """Holder numbers of a mask made of first bits, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(Holder((low.bit_length() - 1) // _HOLDER_BITS))
        mask ^= low
    return found
