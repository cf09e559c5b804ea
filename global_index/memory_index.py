"""The default index: open addressing in numpy arrays, walked by Numba kernels.

16 bytes a slot at a load of 1/2 to 3/4, so 21 to 32 bytes a block with at most four holders; a
block with more takes a bitmap row of 3 x 8 bytes for each 64 holders known. Costs: README.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from emberkv_proto.buckets import BUCKETS
from emberkv_proto.errors import IntegrityError
from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index import kernels
from global_index.base_links import BaseLinks
from global_index.bucket_kernels import bucket_rows
from global_index.index import (
    EVERYTHING,
    MAX_HOLDERS,
    Applied,
    Collected,
    Holder,
    HolderHit,
    Holding,
    TableSize,
)
from global_index.kernels import (
    BASE,
    BLOCKS,
    CHANGED,
    DROPPED,
    FIRST,
    FREE_ROWS,
    NEXT,
    PLACE,
    UNCHANGED,
)

_MIN_SLOTS = 1024
_MAX_SLOTS = 1 << 32  # `home` multiplies 32 bits by the slot count
_ALL_TIERS = 0b111
_BUCKETS_AT_ONCE = 4
"""A 64th of the table: two milliseconds at five million blocks."""


class MemoryIndex:
    """A `BlockIndex`. Grows by half when 3/4 full, up to `capacity_blocks` blocks."""

    def __init__(self, capacity_blocks: int) -> None:
        if not 1 <= capacity_blocks <= _MAX_SLOTS // 2:
            raise ValueError(f"capacity_blocks {capacity_blocks} is not in 1..{_MAX_SLOTS // 2}")
        self._capacity = capacity_blocks
        self._table = np.zeros(2 * _MIN_SLOTS, np.uint64)
        self._rows = np.zeros((0, kernels.TIERS, 1), np.uint64)
        self._free_rows = np.zeros(0, np.int64)
        self._state = np.zeros(kernels.STATE_WORDS, np.int64)
        self._digests = np.zeros((MAX_HOLDERS, kernels.TIERS, 2), np.uint64)
        self._cursors: dict[Holder, int] = {}
        self._links = BaseLinks()
        self._link_table = np.full((MAX_HOLDERS, 3), -1, np.int64)
        self._out = np.zeros((MAX_HOLDERS, 4), np.int64)
        self._runs = np.full((MAX_HOLDERS, 5), -1, np.int64)
        self._active = np.zeros(MAX_HOLDERS + 1, np.int64)

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        keys = _u64(keys)
        self._admit(holder)
        self._state[CHANGED:] = 0
        done = 0
        while True:
            done = kernels.store(
                self._table,
                self._rows,
                self._free_rows,
                self._state,
                self._digests,
                holder,
                tier - 1,
                keys,
                done,
                self._grow_at(),
                self._capacity,
            )
            if done == keys.size:
                return self._applied()
            if self._state[BLOCKS] >= self._grow_at():
                self._grow_table()
            else:
                self._grow_rows()

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        self._state[CHANGED:] = 0
        kernels.remove(
            self._table,
            self._rows,
            self._free_rows,
            self._state,
            self._digests,
            holder,
            tier - 1,
            _u64(keys),
        )
        return self._applied()

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        removed = self.digest(holder, tier).blocks
        while self.digest(holder, tier).blocks:
            self._sweep(holder, 1 << (tier - 1), 0, EVERYTHING)
        return removed

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        cursor = self._sweep(holder, _ALL_TIERS, self._cursors.get(holder, 0), budget_slots)
        if self._digests[holder, :, 0].any():
            self._cursors[holder] = cursor
            return False
        self._cursors.pop(holder, None)
        for dependant in self._links.dependants(holder):
            self.set_base(dependant, None)
        self.set_base(holder, None)
        return True

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        old = self._links.base(holder)
        self._links.set_base(holder, base)
        self._link_table[holder, [BASE, NEXT]] = -1
        _write_links(
            self._links,
            {changed for changed in (old, base) if changed is not None},
            self._link_table,
        )

    def query(self, keys: Keys) -> list[HolderHit]:
        found = kernels.walk(
            self._table,
            self._rows,
            self._link_table,
            _u64(keys),
            self._out,
            self._runs,
            self._active,
        )
        return [HolderHit(*row) for row in self._out[:found].tolist()]

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        slot = kernels.find(self._table, np.uint64(key))
        return tuple(
            Holding(Holder(holder), tuple(tier for tier in Tier if bits >> (tier - 1) & 1))
            for holder, bits in sorted(self._unpack(int(self._table[2 * slot + 1])).items())
        )

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        return self.collect(holder, tier, 0, EVERYTHING).keys

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        slots = len(self._table) // 2
        stop = min(slots, start_slot + budget_slots)
        out = np.empty(min(stop - start_slot, self.digest(holder, tier).blocks), np.uint64)
        bit = np.uint64(1 << (tier - 1))
        found = kernels.collect(self._table, self._rows, holder, bit, start_slot, stop, out)
        return Collected(out[:found], stop if stop < slots else None)

    @property
    def buckets_at_once(self) -> int:
        return _BUCKETS_AT_ONCE

    def bucket_xors(self, holder: Holder, tier: Tier, first: int, count: int) -> Keys:
        xors = np.zeros(count, np.uint64)
        if self._digests[holder, tier - 1, 0]:
            for n in range(count):
                xors[n] = np.bitwise_xor.reduce(self.bucket_keys(holder, tier, first + n))
        return xors

    def bucket_keys(self, holder: Holder, tier: Tier, bucket: int) -> Keys:
        room = 64 + int(self._digests[holder, tier - 1, 0]) // BUCKETS * 2
        while True:
            out = np.empty(room, np.uint64)
            found = bucket_rows(self._table, self._rows, holder, tier - 1, np.uint64(bucket), out)
            if found <= room:
                return out[:found]
            room = found

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        blocks, xor = self._digests[holder, tier - 1].tolist()
        return TierDigest(tier, blocks, xor)

    def size(self) -> TableSize:
        arrays = (self._table, self._rows, self._free_rows)
        return TableSize(
            int(self._state[BLOCKS]), self._capacity, sum(array.nbytes for array in arrays)
        )

    def check_integrity(self) -> None:
        slots = np.flatnonzero(self._table[::2])
        assert len(slots) == self._state[BLOCKS] <= self._capacity, "block count is wrong"
        digests = np.zeros_like(self._digests)
        rows_used: list[int] = []
        for slot in slots.tolist():
            key, value = self._table[2 * slot], int(self._table[2 * slot + 1])
            assert kernels.find(self._table, key) == slot, f"key {key} cannot be found"
            if value & 0xFFFF == 0:
                rows_used.append((value >> 16) - 1)
            held = self._unpack(value)
            assert held, f"key {key} has no holder"
            for holder, bits in held.items():
                assert bits, f"holder {holder} of key {key} has no tier"
                for tier in range(kernels.TIERS):
                    if bits >> tier & 1:
                        digests[holder, tier, 0] += np.uint64(1)
                        digests[holder, tier, 1] ^= key
        assert np.array_equal(digests, self._digests), "digests differ from the rows"
        self._links.check_integrity()
        expected = np.full_like(self._link_table, -1)
        _write_links(self._links, self._links.bases(), expected)
        assert np.array_equal(expected, self._link_table), "the kernels know other links"
        assert (self._runs[:, PLACE] == -1).all(), "a walk left a run behind"
        free = self._free_rows[: self._state[FREE_ROWS]].tolist()
        assert sorted(rows_used + free) == list(range(len(self._rows))), "a bitmap row is lost"

    def _unpack(self, value: int) -> dict[int, int]:
        """A slot's holders and their tier bits."""
        held: dict[int, int] = {}
        if value and value & 0xFFFF == 0:
            for tier, words in enumerate(self._rows[(value >> 16) - 1]):
                mask = int.from_bytes(words.astype("<u8").tobytes(), "little")
                while mask:
                    holder = (mask & -mask).bit_length() - 1
                    held[holder] = held.get(holder, 0) | 1 << tier
                    mask &= mask - 1
            return held
        while value:
            assert (value & 0xFFFF) >> 3 not in held, "a holder stands twice in a slot"
            held[(value & 0xFFFF) >> 3] = value & 7
            value >>= 16
        return held

    def _sweep(self, holder: Holder, tiers: int, slot: int, budget: int) -> int:
        return int(
            kernels.sweep(
                self._table,
                self._rows,
                self._free_rows,
                self._state,
                self._digests,
                holder,
                np.uint64(tiers),
                slot,
                budget,
            )
        )

    def _admit(self, holder: Holder) -> None:
        """Make bitmap rows wide enough for `holder`; doubles, so a fleet that grows pays little."""
        if not 0 <= holder < MAX_HOLDERS:
            raise IntegrityError(f"holder {holder} is not in 0..{MAX_HOLDERS - 1}")
        words = self._rows.shape[2]
        if holder >= 64 * words:
            while holder >= 64 * words:
                words *= 2
            wider = np.zeros((len(self._rows), kernels.TIERS, words), np.uint64)
            wider[:, :, : self._rows.shape[2]] = self._rows
            self._rows = wider

    def _grow_at(self) -> int:
        return len(self._table) // 2 * 3 // 4

    def _grow_table(self) -> None:
        slots = len(self._table) // 2
        wanted = min(slots + slots // 2, self._capacity * 4 // 3 + 64)
        larger = np.zeros(2 * max(wanted, slots + 64), np.uint64)
        kernels.rehash(self._table, larger)
        self._table = larger

    def _grow_rows(self) -> None:
        old = len(self._rows)
        new = old + old // 2 + 64
        rows = np.zeros((new, *self._rows.shape[1:]), np.uint64)
        rows[:old] = self._rows
        free = np.zeros(new, np.int64)
        free[: new - old] = np.arange(old, new)
        self._rows, self._free_rows = rows, free
        self._state[FREE_ROWS] = new - old

    def _applied(self) -> Applied:
        state = self._state
        return Applied(int(state[CHANGED]), int(state[UNCHANGED]), int(state[DROPPED]))


def warm_kernels() -> None:
    """Compile or load every kernel now, so that no request waits for it (seconds when cold)."""
    index = MemoryIndex(4096)
    keys = np.arange(1, 1500, dtype=np.uint64)
    for holder in range(6):
        index.apply_stored(Holder(holder), Tier.DRAM, keys)
    index.query(keys)
    index.apply_removed(Holder(0), Tier.DRAM, keys)
    index.remove_holder(Holder(1))
    index.holdings(IndexKey(1))
    index.rows(Holder(2), Tier.DRAM)
    index.bucket_keys(Holder(2), Tier.DRAM, 0)


def _write_links(links: BaseLinks, bases: Iterable[Holder], table: kernels.I64) -> None:
    """Write who has these bases: for each a list linked by holder numbers."""
    for base in bases:
        last, place = base, FIRST
        for dependant in links.dependants(base):
            table[dependant, BASE] = base
            table[last, place] = dependant
            last, place = dependant, NEXT
        table[last, place] = -1


def _u64(keys: Keys) -> Keys:
    """The one array type that the kernels are compiled for; keys from the wire are read-only."""
    return np.require(keys, np.uint64, ["C", "A", "W"])
