"""The default index: entries in the order of their coming, found through a hash table of places.

16 bytes an entry, of which at most a twelfth are free, and 8 a slot at a load of 9/16 to 3/4: 27
to 32 bytes a block with at most four holders. A block with more takes a bitmap row of 3 x 8 bytes
for each 64 holders known. Numpy arrays, walked by Numba kernels. Costs: README.md.
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
from global_index.jit import I64, U64
from global_index.kernels import (
    BLOCKS,
    FREE_ROW,
    MIN_SLOTS,
    ROWS,
    TOP,
)
from global_index.walk import BASE, FIRST, NEXT, PLACE, walk

_MAX_SLOTS = 1 << 32  # a slot has 32 bits for its tag and 32 for a place
_ALL_TIERS = 0b111
_BUCKETS_AT_ONCE = 4
"""A 64th of the table: two milliseconds at five million blocks."""
_U64 = np.dtype(np.uint64)


class MemoryIndex:
    """A `BlockIndex`. Grows by a third when 3/4 full, up to `capacity_blocks` blocks.

    Shrinks when three quarters of that stand empty.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if not 1 <= capacity_blocks <= _MAX_SLOTS // 2:
            raise ValueError(f"capacity_blocks {capacity_blocks} is not in 1..{_MAX_SLOTS // 2}")
        self._capacity = capacity_blocks
        self._slots = np.zeros(MIN_SLOTS, np.uint64)
        self._entries = _new_entries(MIN_SLOTS)
        self._rows = np.zeros((0, kernels.TIERS, 1), np.uint64)
        self._uses = np.zeros(0, np.int64)
        self._state = np.zeros(kernels.STATE_WORDS, np.int64)
        self._state[FREE_ROW] = -1
        self._digests = np.zeros((MAX_HOLDERS, kernels.TIERS, 2), np.uint64)
        self._cursors: dict[Holder, int] = {}
        self._links = BaseLinks()
        self._link_table = np.full((MAX_HOLDERS, 3), -1, np.int64)
        self._out = np.zeros((MAX_HOLDERS, 4), np.int64)
        self._runs = np.full((MAX_HOLDERS, 5), -1, np.int64)
        self._active = np.zeros(MAX_HOLDERS + 1, np.int64)

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        keys = _u64(keys)
        if not 0 <= holder < 64 * self._rows.shape[2]:
            self._widen(holder)
        done = changed = unchanged = dropped = 0
        while True:
            done, added, found, refused = kernels.store(
                self._slots,
                self._entries,
                self._rows,
                self._uses,
                self._state,
                self._digests,
                holder,
                tier - 1,
                keys,
                done,
                _grow_at(self._slots.size),
                self._capacity,
            )
            changed, unchanged, dropped = changed + added, unchanged + found, dropped + refused
            if done == keys.size:
                return Applied(changed, unchanged, dropped)
            if self._state[BLOCKS] >= _grow_at(self._slots.size):
                self._grow()
            else:
                self._grow_rows()

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        keys = _u64(keys)
        done = changed = 0
        while True:
            done, taken, is_sparse = kernels.remove(
                self._slots,
                self._entries,
                self._rows,
                self._uses,
                self._state,
                self._digests,
                holder,
                tier - 1,
                keys,
                done,
            )
            changed += taken
            if done == keys.size:
                break
            self._grow_rows()
        if is_sparse:
            self._shrink()
        return Applied(changed, keys.size - changed, 0)

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        removed = self.digest(holder, tier).blocks
        self._sweep(holder, 1 << (tier - 1), 0, EVERYTHING)
        return removed

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        cursor = self._sweep(holder, _ALL_TIERS, self._cursors.get(holder, 0), budget_slots)
        if self._digests[holder, :, 0].any():
            self._cursors[holder] = cursor
            return False
        self._cursors.pop(holder, None)
        for dependent in self._links.dependents(holder):
            self.set_base(dependent, None)
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
        found = walk(
            self._slots,
            self._entries,
            self._rows,
            self._link_table,
            self._state[TOP],
            _u64(keys),
            self._out,
            self._runs,
            self._active,
        )
        return [*map(HolderHit._make, self._out[:found].tolist())]

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        word = int(self._slots[kernels.slot_of(self._slots, self._entries, np.uint64(key))])
        if not word:
            return ()
        return tuple(
            Holding(Holder(holder), tuple(tier for tier in Tier if bits >> (tier - 1) & 1))
            for holder, bits in sorted(self._unpack(self._value((word & 0xFFFFFFFF) - 1)).items())
        )

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        return self.collect(holder, tier, 0, EVERYTHING).keys

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        top = int(self._state[TOP])
        start = min(start_slot, top)  # it may have shrunk
        stop = min(top, start + budget_slots)
        out = np.empty(min(stop - start, self.digest(holder, tier).blocks), np.uint64)
        bit = np.uint64(1 << (tier - 1))
        found = kernels.collect(self._entries, self._rows, holder, bit, start, stop, out)
        return Collected(out[:found], stop if stop < top else None)

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
            found = bucket_rows(
                self._slots,
                self._entries,
                self._rows,
                holder,
                tier - 1,
                np.uint64(bucket),
                out,
            )
            if found <= room:
                return out[:found]
            room = found

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        blocks, xor = self._digests[holder, tier - 1].tolist()
        return TierDigest(tier, blocks, xor)

    def size(self) -> TableSize:
        arrays = (self._slots, self._entries, self._rows, self._uses)
        return TableSize(
            int(self._state[BLOCKS]), self._capacity, sum(array.nbytes for array in arrays)
        )

    def check_integrity(self) -> None:
        blocks, top = (int(number) for number in self._state[[BLOCKS, TOP]])
        keys = self._entries[::2]
        places = np.flatnonzero(keys)
        assert len(places) == blocks <= self._capacity, "block count is wrong"
        assert np.count_nonzero(self._slots) == blocks, "a slot leads nowhere"
        assert not places.size or places[-1] < top, "an entry stands above the top"
        assert blocks <= _grow_at(self._slots.size), "no room was made"
        digests = np.zeros_like(self._digests)
        rows_used: list[int] = []
        for place in places.tolist():
            key, value = keys[place], self._value(place)
            word = int(self._slots[kernels.slot_of(self._slots, self._entries, key)])
            assert (word & 0xFFFFFFFF) - 1 == place, f"key {key} cannot be found"
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
        used = np.bincount(rows_used, minlength=len(self._rows))
        assert np.array_equal(used, np.maximum(self._uses, 0)), "uses of a row are miscounted"
        assert np.count_nonzero(used) == self._state[ROWS], "rows in use are miscounted"
        free, row = 0, int(self._state[FREE_ROW])
        while row >= 0:
            free, row = free + 1, -2 - int(self._uses[row])
        assert free + self._state[ROWS] == len(self._rows), "a free row is lost"

    def _value(self, place: int) -> int:
        return int(self._entries[2 * place + 1])

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

    def _sweep(self, holder: Holder, tiers: int, place: int, budget: int) -> int:
        while True:
            place, budget = kernels.sweep(
                self._slots,
                self._entries,
                self._rows,
                self._uses,
                self._state,
                self._digests,
                holder,
                np.uint64(tiers),
                place,
                budget,
            )
            is_done = not any(
                self._digests[holder, tier, 0] for tier in range(kernels.TIERS) if tiers >> tier & 1
            )
            if is_done or budget == 0:
                break
            self._grow_rows()
        if kernels.is_sparse(self._slots, self._rows, self._state):
            self._shrink()
        return place

    def _widen(self, holder: Holder) -> None:
        """Make bitmap rows wide enough for `holder`; doubles, so a fleet that grows pays little."""
        if not 0 <= holder < MAX_HOLDERS:
            raise IntegrityError(f"holder {holder} is not in 0..{MAX_HOLDERS - 1}")
        words = self._rows.shape[2]
        while holder >= 64 * words:
            words *= 2
        wider = np.zeros((len(self._rows), kernels.TIERS, words), np.uint64)
        wider[:, :, : self._rows.shape[2]] = self._rows
        self._rows = wider

    def _grow(self) -> None:
        slots = self._slots.size
        largest = self._capacity * 4 // 3 + 64
        larger = np.zeros(max(min(slots + slots // 3, largest), slots + 64), np.uint64)
        entries = _new_entries(larger.size)
        used = 2 * int(self._state[TOP])
        entries[:used] = self._entries[:used]
        self._entries = entries
        kernels.rehash(self._slots, larger)
        self._slots = larger

    def _grow_rows(self) -> None:
        old = len(self._rows)
        new = old + old // 2 + 64
        rows = np.zeros((new, *self._rows.shape[1:]), np.uint64)
        rows[:old] = self._rows
        self._rows = rows
        self._uses = np.append(self._uses, np.zeros(new - old, np.int64))
        kernels.list_free_rows(self._uses, self._state, old)

    def _shrink(self) -> None:
        """Give memory back: write table and bitmap rows anew, at about twice what is used."""
        slots = max(2 * int(self._state[BLOCKS]), MIN_SLOTS)
        rows = int(self._state[ROWS])
        packed = _new_entries(slots)
        packed_rows = np.zeros((2 * rows, *self._rows.shape[1:]), np.uint64)
        smaller = np.zeros(slots, np.uint64)
        uses = np.zeros(2 * rows, np.int64)
        self._state[FREE_ROW] = -1
        kernels.pack(self._entries, self._rows, self._state, smaller, packed, packed_rows, uses)
        self._slots, self._entries = smaller, packed
        self._rows, self._uses = packed_rows, uses


def _grow_at(slots: int) -> int:
    return slots * 3 // 4


def _new_entries(slots: int) -> U64:
    """Room for the most blocks that so many slots take and a twelfth more, so some stay free."""
    blocks = _grow_at(slots)
    return np.zeros(2 * (blocks + blocks // 12 + 64), np.uint64)


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
    for holder in range(6):
        index.remove_holder(Holder(holder))  # which gives the memory back


def _write_links(links: BaseLinks, bases: Iterable[Holder], table: I64) -> None:
    """Write who has these bases: for each a list linked by holder numbers."""
    for base in bases:
        last, place = base, FIRST
        for dependent in links.dependents(base):
            table[dependent, BASE] = base
            table[last, place] = dependent
            last, place = dependent, NEXT
        table[last, place] = -1


def _u64(keys: Keys) -> Keys:
    """The one array type that the kernels are compiled for; keys from the wire are read-only."""
    if keys.dtype is _U64 and keys.flags.carray:
        return keys
    return np.require(keys, np.uint64, ["C", "A", "W"])
