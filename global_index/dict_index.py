"""The memory index's twin in plain Python: one dict of integers.

The fallback where Numba is missing or cannot compile; ten times slower, five times larger, same
answers. A block's holders are one integer with three bits a holder: HBM, DRAM, SSD.
"""

from __future__ import annotations

from itertools import islice

from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index.index import (
    EVERYTHING,
    MAX_HOLDERS,
    Applied,
    Holder,
    HolderHit,
    Holding,
    TableSize,
)

_HOLDER_BITS = 3
_FIRST_BITS = sum(1 << (_HOLDER_BITS * holder) for holder in range(MAX_HOLDERS))
"""The lowest of each holder's bits."""


class DictIndex:
    """A `BlockIndex`. Removing a holder or clearing a tier scans the dict."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks {capacity_blocks} must be at least 1")
        self._capacity = capacity_blocks
        self._blocks: dict[int, int] = {}
        self._digests: dict[tuple[Holder, Tier], TierDigest] = {}

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
        if not any(self.digest(holder, tier).blocks for tier in Tier):
            return True
        found = (key for key, held in self._blocks.items() if held & mask)
        keys = list(islice(found, min(budget_slots, len(self._blocks))))
        for key in keys:
            for tier in Tier:
                if self._blocks[key] & _bit(holder, tier):
                    self._count(holder, tier, -1, key)
        self._strip(keys, mask)
        return not any(self.digest(holder, tier).blocks for tier in Tier)

    def query(self, keys: Keys) -> list[HolderHit]:
        get, hits = self._blocks.get, []
        active = was_hbm = was_dram = 0
        since: dict[int, list[int]] = {}
        chain = keys.tolist()
        for position in range(len(chain) + 1):
            held = get(chain[position], 0) if position < len(chain) else 0
            present = (held | held >> 1 | held >> 2) & _FIRST_BITS
            if position == 0:
                active = present
                since = {holder: [0, 0, 0, 0] for holder in _holders(active)}
            gone = active & ~present
            active &= present
            hbm = held & active
            dram = held >> 1 & active & ~hbm
            # Only holders that leave or change tier are touched, whatever the chain's length.
            for kind, was, now in ((0, was_hbm, hbm), (1, was_dram, dram)):
                for holder in _holders(was ^ now):
                    stay = since[holder]
                    if now >> (_HOLDER_BITS * holder) & 1:
                        stay[kind] = position
                    else:
                        stay[2 + kind] += position - stay[kind]
            for holder in _holders(gone):
                stay = since[holder]
                hits.append(HolderHit(Holder(holder), position, stay[2], stay[3]))
            if not active:
                break
            was_hbm, was_dram = hbm, dram
        return hits

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        held = self._blocks.get(key, 0)
        present = (held | held >> 1 | held >> 2) & _FIRST_BITS
        return tuple(
            Holding(
                Holder(holder), tuple(tier for tier in Tier if held & _bit(Holder(holder), tier))
            )
            for holder in _holders(present)
        )

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        return self._digests.get((holder, tier)) or TierDigest(tier, 0, 0)

    def size(self) -> TableSize:
        return TableSize(len(self._blocks), self._capacity, 0)

    def check_integrity(self) -> None:
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


def _holders(mask: int) -> list[int]:
    """Holder numbers of a mask made of first bits, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append((low.bit_length() - 1) // _HOLDER_BITS)
        mask ^= low
    return found
