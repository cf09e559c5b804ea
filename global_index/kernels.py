"""The memory index's inner loops, compiled by Numba. No Python objects, no GIL.

Blocks stand in `entries` in the order in which they came, so a chain mostly lies in a row and is
walked like an array: `entries[2 * place]` is the key (0: free), `entries[2 * place + 1]` its
holders: up to four 16-bit words `holder << 3 | tier bits` packed from the low end, or, when the low
word is 0, `(row + 1) << 16`: a bitmap row, `rows[row, tier - 1, holder // 64]`. Blocks that a
holder gets or loses in one go share a row while they can: `uses[row]` is how many do, or of a free
row `-2 - next` in the list of free ones.

`slots` finds a key that is not next in the row: open addressing with linear probing, 0 or
`tag << 32 | place + 1`, where the tag is the upper half of the mixed key. A slot's home grows with
its tag, so a rehash reads and writes in order and looks at no entry; deletion shifts slots back, so
churn leaves no tombstones. Entries never move, but when the table shrinks.

All arithmetic on keys is in uint64 and all on places in int64: Numba makes a float of a mixture.
Only what Python calls is cached on disk, compiled with all of its parts.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from global_index.jit import (
    I64,
    U64,
    Flag,
    Int,
    Word,
    compiled,
    fetch,
    lowest_bit,
    part,
    u64,
)

# state[...]: the numbers that a kernel changes beside the arrays.
BLOCKS, TOP, CURSOR, ROWS, FREE_ROW = range(5)
"""Entries in use; where the unused ones begin; where to look for a free one below; bitmap rows in
use; the first free one, or -1."""
STATE_WORDS = 5
TIERS = 3
MIN_SLOTS = 1024
MIN_ROWS = 256

_0, _1, _3, _7, _16, _32, _64 = map(u64, (0, 1, 3, 7, 16, 32, 64))
_LOW_WORD = u64(0xFFFF)
_LOW_HALF = u64(0xFFFFFFFF)
_MIX = u64(0x9E3779B97F4A7C15)


@part
def home(tag: Word, slots: Int) -> Int:
    return np.int64((tag * np.uint64(slots)) >> _32)


@part
def find(slots: U64, entries: U64, key: Word) -> Int:
    """Slot of `key`, or the empty slot where it would go."""
    tag = (key * _MIX) >> _32
    slot = home(tag, slots.shape[0])
    while True:
        word = slots[slot]
        if word == _0 or (word >> _32 == tag and entries[2 * place_of(word)] == key):
            return slot
        slot += 1
        if slot == slots.shape[0]:
            slot = 0


@compiled
def slot_of(slots: U64, entries: U64, key: Word) -> Int:
    """`find`, for Python."""
    return find(slots, entries, key)


@part
def place_of(word: Word) -> Int:
    return np.int64(word & _LOW_HALF) - 1


@part
def look_ahead(slots: U64, entries: U64, keys: U64, i: Int) -> None:
    """Fetch what keys[i + 8] and keys[i + 16] will need, so that misses overlap."""
    if i + 16 < keys.shape[0]:
        fetch(slots, home((keys[i + 16] * _MIX) >> _32, slots.shape[0]))
        word = slots[home((keys[i + 8] * _MIX) >> _32, slots.shape[0])]
        if word != _0:
            fetch(entries, 2 * place_of(word))


@part
def look_at_first(slots: U64, keys: U64, start: Int) -> None:
    """Fetch what the first keys need, which `look_ahead` is too late for."""
    for i in range(start, min(start + 16, keys.shape[0])):
        fetch(slots, home((keys[i] * _MIX) >> _32, slots.shape[0]))


@part
def take_entry(entries: U64, state: I64) -> Int:
    """A free entry: behind all others, or once a twelfth is free the next free one."""
    unused = state[TOP] - state[BLOCKS]
    if 2 * state[TOP] < entries.shape[0] and 12 * unused < state[TOP] + 768:
        state[TOP] += 1
        return state[TOP] - 1
    place = state[CURSOR]
    while True:
        if place >= state[TOP]:
            place = 0
        if entries[2 * place] == _0:
            state[CURSOR] = place + 1
            return place
        place += 1


@part
def free_slot(slots: U64, key: Word, place: Int) -> None:
    """Empty the slot of an entry; shift back the slots that had probed past it."""
    hole = home((key * _MIX) >> _32, slots.shape[0])
    while place_of(slots[hole]) != place:
        hole += 1
        if hole == slots.shape[0]:
            hole = 0
    slot = hole
    while True:
        slot += 1
        if slot == slots.shape[0]:
            slot = 0
        word = slots[slot]
        if word == _0:
            break
        from_home = slot - home(word >> _32, slots.shape[0])
        if from_home < 0:
            from_home += slots.shape[0]
        from_hole = slot - hole
        if from_hole < 0:
            from_hole += slots.shape[0]
        if from_home >= from_hole:
            slots[hole] = word
            hole = slot
    slots[hole] = _0


@part
def put_slot(slots: U64, word: Word) -> None:
    slot = home(word >> _32, slots.shape[0])
    while slots[slot] != _0:
        slot += 1
        if slot == slots.shape[0]:
            slot = 0
    slots[slot] = word


@compiled
def rehash(old: U64, new: U64) -> None:
    """Move all slots of `old` into the empty, larger `new`."""
    for slot in range(old.shape[0]):
        if old[slot] != _0:
            put_slot(new, old[slot])


@part
def copy_row(rows: U64, row: Int, into: U64, copy: Int) -> None:
    for tier in range(TIERS):
        for column in range(rows.shape[2]):
            into[copy, tier, column] = rows[row, tier, column]


@compiled
def pack(
    entries: U64, rows: U64, state: I64, slots: U64, packed: U64, packed_rows: U64, uses: I64
) -> None:
    """Move all entries, in their order, and rows in use into new empty arrays without gaps."""
    moved = np.zeros(rows.shape[0], np.int64)
    row = 0
    place = 0
    for old in range(state[TOP]):
        key = entries[2 * old]
        if key == _0:
            continue
        value = entries[2 * old + 1]
        if value & _LOW_WORD == _0:
            was = row_of(value)
            if moved[was] == 0:
                copy_row(rows, was, packed_rows, row)
                row += 1
                moved[was] = row
            uses[moved[was] - 1] += 1
            value = np.uint64(moved[was]) << _16
        packed[2 * place] = key
        packed[2 * place + 1] = value
        place += 1
        put_slot(slots, ((key * _MIX) & ~_LOW_HALF) | np.uint64(place))
    state[TOP] = place
    state[CURSOR] = 0
    state[ROWS] = row
    list_free_rows(uses, state, row)


@compiled
def list_free_rows(uses: I64, state: I64, first: Int) -> None:
    """Put all rows from `first` on in front of the list of free rows, so that they go in order."""
    for row in range(uses.shape[0] - 1, first - 1, -1):
        uses[row] = -2 - state[FREE_ROW]
        state[FREE_ROW] = row


@part
def row_of(value: Word) -> Int:
    return np.int64(value >> _16) - 1


@part
def tier_bits(rows: U64, value: Word, holder: Int) -> Word:
    """The tiers in which `holder` has the block whose holders are `value`."""
    if value & _LOW_WORD == _0:
        row = row_of(value)
        word = holder >> 6
        bit = np.uint64(holder & 63)
        if word >= rows.shape[2]:
            return _0
        found = _0
        for tier in range(TIERS):
            found |= ((rows[row, tier, word] >> bit) & _1) << np.uint64(tier)
        return found
    wanted = np.uint64(holder)
    while value != _0:
        if (value & _LOW_WORD) >> _3 == wanted:
            return value & _7
        value >>= _16
    return _0


@part
def mark(rows: U64, row: Int, holder: Int, bits: Word, is_there: bool) -> None:
    """Write `bits` of `holder` in a row."""
    one = _1 << np.uint64(holder & 63)
    for tier in range(TIERS):
        if (bits >> np.uint64(tier)) & _1 != _0:
            if is_there:
                rows[row, tier, holder >> 6] |= one
            else:
                rows[row, tier, holder >> 6] &= ~one


@part
def few_inline(rows: U64, row: Int) -> Word:
    """The inline form of a row with at most three holders; 0 when there are more."""
    value = _0
    for word in range(rows.shape[2]):
        mask = rows[row, 0, word] | rows[row, 1, word] | rows[row, 2, word]
        while mask != _0:
            if value >> _32 != _0:
                return _0
            holder = word * 64 + lowest_bit(mask)
            mask &= mask - _1
            packed = (np.uint64(holder) << _3) | tier_bits(rows, np.uint64(row + 1) << _16, holder)
            value = (value << _16) | packed
    return value


@part
def take_row(uses: I64, state: I64) -> Int:
    """A row for one block. There must be a free one."""
    row = state[FREE_ROW]
    state[FREE_ROW] = -2 - uses[row]
    state[ROWS] += 1
    uses[row] = 1
    return row


@part
def leave_row(uses: I64, state: I64, row: Int) -> None:
    """One block less uses the row."""
    uses[row] -= 1
    if uses[row] == 0:
        uses[row] = -2 - state[FREE_ROW]
        state[FREE_ROW] = row
        state[ROWS] -= 1


@part
def added(rows: U64, uses: I64, state: I64, value: Word, holder: Int, bit: Word) -> Word:
    """Holders `value` of one block and this one. A row that others use is copied.

    There must be a free row.
    """
    if value & _LOW_WORD == _0:
        row = row_of(value)
        if uses[row] > 1:
            leave_row(uses, state, row)
            copy = take_row(uses, state)
            copy_row(rows, row, rows, copy)
            row = copy
    else:
        shift = _0
        while shift < _64:
            word = (value >> shift) & _LOW_WORD
            if word == _0:
                return value | (((np.uint64(holder) << _3) | bit) << shift)
            if word >> _3 == np.uint64(holder):
                return value | (bit << shift)
            shift += _16
        row = take_row(uses, state)
        for tier in range(TIERS):
            for column in range(rows.shape[2]):
                rows[row, tier, column] = _0
        while value != _0:
            mark(rows, row, np.int64((value & _LOW_WORD) >> _3), value & _7, True)
            value >>= _16
    mark(rows, row, holder, bit, True)
    return np.uint64(row + 1) << _16


@part
def removed(rows: U64, uses: I64, state: I64, value: Word, holder: Int, bits: Word) -> Word:
    """Holders `value` of one block less `bits`, of which `holder` has some; 0: nobody is left.

    A row that others use is copied. There must be a free row.
    """
    if value & _LOW_WORD == _0:
        row = row_of(value)
        # Inline again at two, not four: a block that wavers around four would thrash.
        few = few_inline(rows, row) if tier_bits(rows, value, holder) & ~bits == _0 else _0
        if few == _0:
            if uses[row] > 1:
                leave_row(uses, state, row)
                copy = take_row(uses, state)
                copy_row(rows, row, rows, copy)
                row = copy
            mark(rows, row, holder, bits, False)
            return np.uint64(row + 1) << _16
        leave_row(uses, state, row)
        value = few
    shift = _0
    rest = value
    while (rest & _LOW_WORD) >> _3 != np.uint64(holder):
        shift += _16
        rest >>= _16
    if rest & _7 & ~bits != _0:
        return value & ~((rest & bits) << shift)
    # The words above move down one place, so that the used ones stay at the low end.
    return (value & ((_1 << shift) - _1)) | ((rest >> _16) << shift)


@part
def again(uses: I64, state: I64, value: Word, became: Word) -> Flag:
    """Count rows when a block's holders change as another's did: `value` to `became`.

    False when `value` stands for no holders from now on: it must not be compared with any more.
    """
    if became & _LOW_WORD == _0 and became != _0:
        uses[row_of(became)] += 1
    if value & _LOW_WORD != _0:
        return True
    leave_row(uses, state, row_of(value))
    return uses[row_of(value)] > 0


@compiled
def store(
    slots: U64, entries: U64, rows: U64, uses: I64, state: I64, digests: U64,
    holder: Int, tier: Int, keys: U64, start: Int, grow_at: Int, capacity: Int,
) -> tuple[Int, Int, Int, Int]:  # fmt: skip
    """Add rows for keys[start:]; return where it stopped, and how many rows it added, found
    there already, and dropped.

    Less than len(keys) means: make the table larger (state[BLOCKS] reached grow_at), or else add
    free rows, then go on from there.
    """
    bit = _1 << np.uint64(tier)
    alone = (np.uint64(holder) << _3) | bit
    changed, unchanged, dropped = 0, 0, 0
    xor, seen, became = _0, _0, _0
    place = -1
    look_at_first(slots, keys, start)
    i = start
    while i < keys.shape[0]:
        key = keys[i]
        place += 1
        if place >= state[TOP] or entries[2 * place] != key or key == _0:
            look_ahead(slots, entries, keys, i)
            slot = find(slots, entries, key)
            if key == _0:
                unchanged += 1
                i += 1
                continue
            if slots[slot] == _0:
                if state[BLOCKS] >= capacity:
                    dropped += 1
                    i += 1
                    continue
                if state[BLOCKS] >= grow_at:
                    break
                place = take_entry(entries, state)
                slots[slot] = ((key * _MIX) & ~_LOW_HALF) | np.uint64(place + 1)
                entries[2 * place] = key
                entries[2 * place + 1] = alone
                state[BLOCKS] += 1
                changed += 1
                xor ^= key
                i += 1
                continue
            place = place_of(slots[slot])
        value = entries[2 * place + 1]
        if value == seen:
            entries[2 * place + 1] = became
            if not again(uses, state, value, became):
                seen = _0
        elif tier_bits(rows, value, holder) & bit != _0:
            unchanged += 1
            i += 1
            continue
        else:
            if state[FREE_ROW] < 0:
                break
            became = added(rows, uses, state, value, holder, bit)
            entries[2 * place + 1] = became
            seen = value if became != value else _0
        changed += 1
        xor ^= key
        i += 1
    digests[holder, tier, 0] += np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return i, changed, unchanged, dropped


@part
def free_entry(slots: U64, entries: U64, state: I64, key: Word, place: Int) -> None:
    entries[2 * place] = _0
    state[BLOCKS] -= 1
    while state[TOP] > 0 and entries[2 * state[TOP] - 2] == _0:
        state[TOP] -= 1
    free_slot(slots, key, place)


@compiled
def is_sparse(slots: U64, rows: U64, state: I64) -> Flag:
    """Whether three quarters of what the table may hold, or of the bitmap rows, are unused.

    A table in its first pages is never sparse.
    """
    return (16 * state[BLOCKS] < 3 * slots.shape[0] and slots.shape[0] > MIN_SLOTS) or (
        4 * state[ROWS] < rows.shape[0] and rows.shape[0] > MIN_ROWS
    )


@compiled
def remove(
    slots: U64, entries: U64, rows: U64, uses: I64, state: I64, digests: U64,
    holder: Int, tier: Int, keys: U64, start: Int,
) -> tuple[Int, Int, Flag]:  # fmt: skip
    """Take rows away for keys[start:]; return where it stopped, how many there were, and whether
    the table stands three quarters empty now.

    Less than len(keys) means: add free rows, then go on from there.
    """
    bit = _1 << np.uint64(tier)
    alone = (np.uint64(holder) << _3) | bit
    changed = 0
    xor, seen, became = _0, _0, _0
    place = -2
    look_at_first(slots, keys, start)
    i = start
    while i < keys.shape[0]:
        key = keys[i]
        i += 1
        if key == _0:
            continue
        # Most are neighbours: leaves first, or as they came.
        if place > 0 and entries[2 * place - 2] == key:
            place -= 1
        elif 0 <= place < state[TOP] - 1 and entries[2 * place + 2] == key:
            place += 1
        else:
            word = slots[find(slots, entries, key)]
            if word == _0:
                continue
            place = place_of(word)
        value = entries[2 * place + 1]
        if value == alone:
            look_ahead(slots, entries, keys, i)
            entries[2 * place + 1] = _0
            free_entry(slots, entries, state, key, place)
        elif value == seen:
            entries[2 * place + 1] = became
            if not again(uses, state, value, became):
                seen = _0
        elif tier_bits(rows, value, holder) & bit == _0:
            continue
        else:
            if state[FREE_ROW] < 0:
                i -= 1
                break
            became = removed(rows, uses, state, value, holder, bit)
            entries[2 * place + 1] = became
            seen = value if became != value else _0
            if value & _LOW_WORD == _0 and uses[row_of(value)] <= 0:
                seen = _0
        changed += 1
        xor ^= key
    digests[holder, tier, 0] -= np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return i, changed, is_sparse(slots, rows, state)


@compiled
def sweep(
    slots: U64, entries: U64, rows: U64, uses: I64, state: I64, digests: U64,
    holder: Int, tiers: Word, place: Int, budget: Int,
) -> tuple[Int, Int]:  # fmt: skip
    """Take `holder` off all entries from `place` on, round the end.

    Returns where it stopped and what is left of `budget` entries: none, or some when the digests
    say that no row is left, or else when there is no free bitmap row.
    """
    seen, became = _0, _0
    while budget > 0:
        left = _0
        for tier in range(TIERS):
            if (tiers >> np.uint64(tier)) & _1 != _0:
                left += digests[holder, tier, 0]
        if left == _0:
            break
        if place >= state[TOP]:
            place = 0
        key = entries[2 * place]
        value = entries[2 * place + 1]
        bits = tier_bits(rows, value, holder) & tiers if key != _0 else _0
        if bits != _0:
            if value == seen:
                if not again(uses, state, value, became):
                    seen = _0
            else:
                if state[FREE_ROW] < 0:
                    break
                became = removed(rows, uses, state, value, holder, bits)
                seen = value if became != value else _0
                if value & _LOW_WORD == _0 and uses[row_of(value)] <= 0:
                    seen = _0
            entries[2 * place + 1] = became
            for tier in range(TIERS):
                if (bits >> np.uint64(tier)) & _1 != _0:
                    digests[holder, tier, 0] -= _1
                    digests[holder, tier, 1] ^= key
            if became == _0:
                free_entry(slots, entries, state, key, place)
        budget -= 1
        place += 1
    return place, budget


@compiled
def collect(
    entries: U64, rows: U64, holder: Int, tier: Word, start: Int, stop: Int, found: U64
) -> Int:
    """Write the keys that `holder` has in `tier` (one bit) at places start..stop - 1; how many.

    `found` has room for all.
    """
    count = 0
    for place in range(start, stop):
        if count == found.shape[0]:
            break
        value = entries[2 * place + 1]
        if value != _0 and tier_bits(rows, value, holder) & tier != _0:
            found[count] = entries[2 * place]
            count += 1
    return count


STAMP = zlib.crc32(Path(__file__).read_bytes())
"""What kernels in other files that call parts of this one close over, which makes it a part of the
key of their cache: Numba does not notice by itself that a function elsewhere has changed."""
