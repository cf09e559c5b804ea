"""The default index: entries in the order of their coming, found through a hash table of places.

16 bytes an entry, of which at most a twelfth are free, and 64 for each 4.4 to 7 of them to find
them: 25 to 32 bytes a block with at most four holders. A block with more takes a bitmap
row of 3 x 8 bytes for each 64 holders known. Numpy arrays, walked by Numba kernels. Costs:
README.md.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import numpy as np

from emberkv_proto.buckets import BUCKETS, KEY_MIX
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
    HolderHits,
    Holding,
    TableSize,
)
from global_index.jit import I64, U32, U64, direct
from global_index.kernels import MIN_SLOTS
from global_index.slots import BUCKET_WORDS, PASSED, PLACES
from global_index.table_state import (
    ACTIVE,
    BITMAP_WORDS,
    BITMAPS,
    BLOCKS,
    DIGESTS,
    DONE,
    ENTRIES,
    FREE_ROW,
    GROW_AT,
    LINKS,
    OUT,
    REFUSED,
    ROWS,
    RUNS,
    SLOTS,
    SPARSE,
    TIERS,
    TOP,
    USES,
    WATCHED,
    WORDS,
    empty_state,
    tell,
)
from global_index.walk import BASE, FIRST, NEXT, PLACE, walk

_MAX_SLOTS = 1 << 32  # a slot has 32 bits for its tag and 32 for a place
MOST_IN_BUCKET = 7
"""Blocks for each bucket of twelve when the table grows, on the average: few buckets are full."""
_ALL_TIERS = 0b111
_BUCKETS_AT_ONCE = 4
"""A 64th of the table: two milliseconds at five million blocks."""
_U64 = np.dtype(np.uint64)
_applied = cast(Callable[[type[Applied], tuple[int, int, int]], Applied], tuple.__new__)
"""`Applied._make` in a third of the time."""
_MAP_NORESERVE = 0x4000  # Linux; `mmap` names it from Python 3.13 on
_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class MemoryIndex:
    """A `BlockIndex`. Grows by three fifths when 7/12 full, up to `capacity_blocks` blocks.

    Shrinks when three quarters of that stand empty.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if not 1 <= capacity_blocks <= _MAX_SLOTS // 2:
            raise ValueError(f"capacity_blocks {capacity_blocks} is not in 1..{_MAX_SLOTS // 2}")
        self._capacity = capacity_blocks
        self._state = empty_state(capacity_blocks)
        none = np.zeros(0, np.uint64)
        self._store = direct(kernels.store, self._state, none, 0, 0, 0)
        self._remove = direct(kernels.remove, self._state, none, 0, 0, 0)
        self._walk = direct(walk, self._state, none)
        self._use_table(*self._new_table(), MIN_SLOTS)
        self._use_rows(np.zeros((0, TIERS, 1), np.uint64), np.zeros(0, np.int64))
        self._digests = np.zeros((MAX_HOLDERS, TIERS, 2), np.uint64)
        self._cursors: dict[Holder, int] = {}
        self._links = BaseLinks()
        self._link_table = np.full((MAX_HOLDERS, 3), -1, np.int64)
        self._out = np.zeros((4, MAX_HOLDERS), np.int64)
        self._columns: list[Any] = [column.data for column in self._out]
        self._runs = np.full((MAX_HOLDERS, 5), -1, np.int64)
        self._active = np.zeros(MAX_HOLDERS + 1, np.int64)
        tell(self._state, DIGESTS, self._digests)
        tell(self._state, LINKS, self._link_table)
        tell(self._state, OUT, self._out)
        tell(self._state, RUNS, self._runs)
        tell(self._state, ACTIVE, self._active)
        self._watched = np.zeros(MAX_HOLDERS // 64, np.uint64)
        self._words = np.zeros(MAX_HOLDERS // 64 + 1, np.int64)
        tell(self._state, WATCHED, self._watched)
        tell(self._state, WORDS, self._words)

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        keys = _u64(keys)
        if not 0 <= holder < self._holders_fit:
            self._widen(holder)
        changed = self._store(self._state, keys, holder, tier - 1, 0)
        if changed < 0:
            return self._store_rest(holder, tier, keys, ~changed)
        return _applied(Applied, (changed, len(keys) - changed, 0))

    def _store_rest(self, holder: Holder, tier: Tier, keys: Keys, changed: int) -> Applied:
        """What a call of the kernel could not do: with more room, or with none to be had."""
        state, refused = self._state, 0
        while True:
            refused += int(state[REFUSED])
            if state[DONE] == len(keys):
                return Applied(changed, len(keys) - changed - refused, refused)
            if state[BLOCKS] >= state[GROW_AT]:
                self._grow()
            else:
                self._grow_rows()
            more = self._store(state, keys, holder, tier - 1, int(state[DONE]))
            changed += max(more, ~more)

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        keys = _u64(keys)
        changed = self._remove(self._state, keys, holder, tier - 1, 0)
        if changed < 0:
            changed = self._remove_rest(holder, tier, keys, ~changed)
        return _applied(Applied, (changed, len(keys) - changed, 0))

    def _remove_rest(self, holder: Holder, tier: Tier, keys: Keys, changed: int) -> int:
        """What a call of the kernel could not do, and what has to follow; how many changed."""
        state = self._state
        while state[DONE] < len(keys):
            self._grow_rows()
            more = self._remove(state, keys, holder, tier - 1, int(state[DONE]))
            changed += max(more, ~more)
        if state[SPARSE]:
            self._shrink()
        return changed

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

    def query(self, keys: Keys) -> HolderHits:
        found = self._walk(self._state, _u64(keys))
        # Written out, and without numpy: code that is in no cache is most of what a query costs.
        holders, hits, hbm, dram = self._columns
        return HolderHits(
            holders[:found].tolist(),
            hits[:found].tolist(),
            hbm[:found].tolist(),
            dram[:found].tolist(),
        )

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        place = kernels.place_of(self._slots, self._entries, np.uint64(key))
        if place < 0:
            return ()
        return tuple(
            Holding(Holder(holder), tuple(tier for tier in Tier if bits >> (tier - 1) & 1))
            for holder, bits in sorted(self._unpack(self._value(place)).items())
        )

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        return self.collect(holder, tier, 0, EVERYTHING).keys

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        top = int(self._state[TOP])
        start = min(start_slot, top)  # it may have shrunk
        stop = min(top, start + budget_slots)
        out = np.empty(min(stop - start, self.digest(holder, tier).blocks), np.uint64)
        found = kernels.collect(self._state, holder, 1 << (tier - 1), start, stop, out)
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
            found = bucket_rows(self._state, holder, tier - 1, bucket, out)
            if found <= room:
                return out[:found]
            room = found

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        blocks, xor = self._digests[holder, tier - 1].tolist()
        return TierDigest(tier, blocks, xor)

    def size(self) -> TableSize:
        entries = 2 * _U64.itemsize * _entries_for(self._slots.size)  # those that may be written to
        used = self._slots.nbytes + entries + self._rows.nbytes + self._uses.nbytes
        return TableSize(int(self._state[BLOCKS]), self._capacity, used)

    def check_integrity(self) -> None:
        blocks, top = (int(number) for number in self._state[[BLOCKS, TOP]])
        keys = self._entries[::2]
        places = np.flatnonzero(keys)
        assert len(places) == blocks <= self._capacity, "block count is wrong"
        self._check_slots(places)
        assert not places.size or places[-1] < top, "an entry stands above the top"
        assert blocks <= _grow_at(self._slots.size), "no room was made"
        for which, array in (
            (SLOTS, self._slots),
            (ENTRIES, self._entries),
            (BITMAPS, self._rows),
            (USES, self._uses),
            (DIGESTS, self._digests),
            (LINKS, self._link_table),
            (OUT, self._out),
            (RUNS, self._runs),
            (ACTIVE, self._active),
            (WATCHED, self._watched),
            (WORDS, self._words),
        ):
            told = self._state[which : which + 2].tolist()
            assert told == [array.ctypes.data, array.size], "the kernels use another array"
        assert self._state[GROW_AT] == _grow_at(self._slots.size), "growth comes at another size"
        assert self._state[BITMAP_WORDS] == self._rows.shape[2], "rows have another width"
        assert self._slots.ctypes.data % 64 == 0, "buckets lie across cache lines"
        digests = np.zeros_like(self._digests)
        rows_used: list[int] = []
        for place in places.tolist():
            key, value = keys[place], self._value(place)
            found = kernels.place_of(self._slots, self._entries, key)
            assert found == place, f"key {key} cannot be found"
            if value & 0xFFFF == 0:
                rows_used.append((value >> 16) - 1)
            held = self._unpack(value)
            assert held, f"key {key} has no holder"
            for holder, bits in held.items():
                assert bits, f"holder {holder} of key {key} has no tier"
                for tier in range(TIERS):
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

    def _check_slots(self, places: I64) -> None:
        """Each entry in one slot, and each bucket knows how many went past it."""
        buckets = self._slots.reshape(-1, BUCKET_WORDS)
        tags = buckets[:, :PASSED].copy().view(np.uint8)
        bucket, n = np.nonzero(tags)
        told = buckets[bucket, PLACES + n].astype(np.int64)
        assert np.array_equal(np.sort(told), places), "a slot leads nowhere"
        upper = self._entries[2 * told] * np.uint64(KEY_MIX) >> np.uint64(32)
        home = (upper * np.uint64(len(buckets)) >> np.uint64(32)).astype(np.int64)
        passed = np.zeros(len(buckets), np.int64)
        for first, last in zip(home[home != bucket], bucket[home != bucket], strict=True):
            behind = np.arange(first, last if last > first else last + len(buckets))
            passed[behind % len(buckets)] += 1
        assert np.array_equal(passed, buckets[:, PASSED]), "keys past a bucket are miscounted"

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
            place, budget = kernels.sweep(self._state, holder, tiers, place, budget)
            is_done = not any(
                self._digests[holder, tier, 0] for tier in range(TIERS) if tiers >> tier & 1
            )
            if is_done or budget == 0:
                break
            self._grow_rows()
        if kernels.is_sparse(self._state):
            self._shrink()
        return place

    def _widen(self, holder: Holder) -> None:
        """Make bitmap rows wide enough for `holder`; doubles, so a fleet that grows pays little."""
        if not 0 <= holder < MAX_HOLDERS:
            raise IntegrityError(f"holder {holder} is not in 0..{MAX_HOLDERS - 1}")
        words = self._rows.shape[2]
        while holder >= 64 * words:
            words *= 2
        wider = np.zeros((len(self._rows), TIERS, words), np.uint64)
        wider[:, :, : self._rows.shape[2]] = self._rows
        self._use_rows(wider, self._uses)

    def _grow(self) -> None:
        old = self._slots.size
        larger = max(min(old * 8 // 5, _most_slots(self._capacity)), old + BUCKET_WORDS)
        self._slots[:] = 0
        self._use_table(self._slot_room, self._entries, larger)
        kernels.rehash(self._state)

    def _grow_rows(self) -> None:
        old = len(self._rows)
        new = old + old // 2 + 64
        rows = np.zeros((new, *self._rows.shape[1:]), np.uint64)
        rows[:old] = self._rows
        self._use_rows(rows, np.append(self._uses, np.zeros(new - old, np.int64)))
        kernels.list_free_rows(self._state, old)

    def _shrink(self) -> None:
        """Give memory back: write table and bitmap rows anew, with some room for more."""
        count = max(_slots_for(int(self._state[BLOCKS])) * 8 // 5, MIN_SLOTS)
        room, entries = self._new_table()
        rows = 2 * int(self._state[ROWS])
        packed_rows = np.zeros((rows, *self._rows.shape[1:]), np.uint64)
        uses = np.zeros(rows, np.int64)
        kernels.pack(self._state, _whole_buckets(room, count), entries, packed_rows, uses)
        self._use_table(room, entries, count)
        self._use_rows(packed_rows, uses)

    def _new_table(self) -> tuple[U32, U64]:
        """Slots and entries for all of the capacity, none of it in memory yet."""
        slots = _most_slots(self._capacity)
        return _mapped(slots // 2).view(np.uint32), _mapped(2 * _entries_for(slots))

    def _use_table(self, room: U32, entries: U64, slots: int) -> None:
        self._slot_room, self._entries = room, entries
        self._slots = _whole_buckets(room, slots)
        self._state[GROW_AT] = _grow_at(self._slots.size)
        tell(self._state, SLOTS, self._slots)
        tell(self._state, ENTRIES, entries)

    def _use_rows(self, rows: U64, uses: I64) -> None:
        self._rows, self._uses = rows, uses
        self._holders_fit = 64 * rows.shape[2]
        self._state[BITMAP_WORDS] = rows.shape[2]
        tell(self._state, BITMAPS, rows)
        tell(self._state, USES, uses)


def _grow_at(slots: int) -> int:
    return slots // BUCKET_WORDS * MOST_IN_BUCKET


def _slots_for(blocks: int) -> int:
    return blocks * BUCKET_WORDS // MOST_IN_BUCKET


def _entries_for(slots: int) -> int:
    """Room for the most blocks that so many slots take and a twelfth more, so some stay free."""
    blocks = _grow_at(slots)
    return blocks + blocks // 12 + 64


def _most_slots(capacity: int) -> int:
    return max(_slots_for(capacity) + 2 * BUCKET_WORDS, MIN_SLOTS) & -BUCKET_WORDS


def _whole_buckets(room: U32, slots: int) -> U32:
    return room[: slots & -BUCKET_WORDS]


def _mapped(words: int) -> U64:
    """Zeros in pages of their own: in memory once written to, and gone as soon as let go of."""
    pages = mmap.mmap(-1, words * _U64.itemsize, flags=_PAGES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages is only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64)


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
    """What the kernels are compiled for: words of 64 bits in a row."""
    if keys.dtype is _U64 and keys.flags.c_contiguous:
        return keys
    return np.array(keys, np.uint64, order="C")
