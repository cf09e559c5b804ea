"""The memory index's inner loops, compiled by Numba. No Python objects, no GIL.

Blocks stand in `entries` in the order in which they came, so a chain mostly lies in a row and is
walked like an array: `entries[2 * place]` is the key (0: free), `entries[2 * place + 1]` its
holders (`holder_rows.py`). `slots` finds a key that is not next in the row (`slots.py`). Entries
never move, but when the table shrinks.

All arithmetic on keys is in uint64 and all on places in int64: Numba makes a float of a mixture.
Only what Python calls is cached on disk, compiled with all of its parts.
"""

from __future__ import annotations

import numpy as np

from global_index.holder_rows import (
    LOW_WORD,
    added,
    again,
    copy_row,
    put_in_free_list,
    removed,
    row_of,
    tier_bits,
)
from global_index.jit import I64, U64, Flag, Int, Word, compiled, part, u64
from global_index.slots import (
    find,
    free_slot,
    look_ahead,
    look_ahead_near,
    look_at_first,
    place_of,
    put_slot,
    word_of,
)
from global_index.slots import rehash as rehash
from global_index.slots import slot_of as slot_of
from global_index.table_state import (
    BLOCKS,
    CAPACITY,
    CURSOR,
    ENTRIES,
    FREE_ROW,
    GROW_AT,
    ROWS,
    SLOTS,
    TIERS,
    TOP,
    USES,
    bitmap_rows,
    digest_table,
    i64_array,
    u64_array,
)

MIN_SLOTS = 1024
MIN_ROWS = 256

_0, _1, _3, _16 = map(u64, (0, 1, 3, 16))


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


@compiled
def store(state: I64, keys: U64, holder: Int, tier: Int, start: Int) -> tuple[Int, Int, Int, Int]:
    """Add rows for keys[start:]; return where it stopped, and how many rows it added, found
    there already, and dropped.

    Less than len(keys) means: make the table larger (state[BLOCKS] reached state[GROW_AT]), or
    else add free rows, then go on from there.
    """
    slots, entries = u64_array(state, SLOTS), u64_array(state, ENTRIES)
    rows, uses = bitmap_rows(state), i64_array(state, USES)
    bit = _1 << np.uint64(tier)
    alone = (np.uint64(holder) << _3) | bit
    changed, unchanged, dropped = 0, 0, 0
    xor, seen, became = _0, _0, _0
    place = -1
    has_jumped = False
    i = start
    while i < keys.shape[0]:
        key = keys[i]
        place += 1
        if place >= state[TOP] or entries[2 * place] != key or key == _0:
            if not has_jumped:
                look_at_first(slots, keys, i)
                has_jumped = True
            look_ahead(slots, entries, keys, i)
            slot = find(slots, entries, key)
            if key == _0:
                unchanged += 1
                i += 1
                continue
            if slots[slot] == _0:
                if state[BLOCKS] >= state[CAPACITY]:
                    dropped += 1
                    i += 1
                    continue
                if state[BLOCKS] >= state[GROW_AT]:
                    break
                place = take_entry(entries, state)
                slots[slot] = word_of(key, place)
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
    digests = digest_table(state)
    digests[holder, tier, 0] += np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return i, changed, unchanged, dropped


@part
def free_entry(slots: U64, entries: U64, state: I64, key: Word, place: Int) -> None:
    entries[2 * place] = _0
    entries[2 * place + 1] = _0
    state[BLOCKS] -= 1
    while state[TOP] > 0 and entries[2 * state[TOP] - 2] == _0:
        state[TOP] -= 1
    free_slot(slots, word_of(key, place))


@compiled
def is_sparse(state: I64) -> Flag:
    """Whether three quarters of what the table may hold, or of the bitmap rows, are unused.

    A table in its first pages is never sparse.
    """
    slots, rows = state[SLOTS + 1], state[USES + 1]
    return (16 * state[BLOCKS] < 3 * slots and slots > MIN_SLOTS) or (
        4 * state[ROWS] < rows and rows > MIN_ROWS
    )


@compiled
def remove(state: I64, keys: U64, holder: Int, tier: Int, start: Int) -> tuple[Int, Int, Flag]:
    """Take rows away for keys[start:]; return where it stopped, how many there were, and whether
    the table stands three quarters empty now.

    Less than len(keys) means: add free rows, then go on from there.
    """
    slots, entries = u64_array(state, SLOTS), u64_array(state, ENTRIES)
    rows, uses = bitmap_rows(state), i64_array(state, USES)
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
        is_jump = False
        # Most are neighbours: leaves first, or as they came.
        if place > 0 and entries[2 * place - 2] == key:
            place -= 1
        elif 0 <= place < state[TOP] - 1 and entries[2 * place + 2] == key:
            place += 1
        else:
            is_jump = True
            look_ahead(slots, entries, keys, i)
            word = slots[find(slots, entries, key)]
            if word == _0:
                continue
            place = place_of(word)
        value = entries[2 * place + 1]
        if value == alone:
            if not is_jump:
                look_ahead_near(slots, keys, i)
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
            if value & LOW_WORD == _0 and uses[row_of(value)] <= 0:
                seen = _0
        changed += 1
        xor ^= key
    digests = digest_table(state)
    digests[holder, tier, 0] -= np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return i, changed, is_sparse(state)


@compiled
def sweep(state: I64, holder: Int, tiers: Int, place: Int, budget: Int) -> tuple[Int, Int]:
    """Take `holder` off all entries from `place` on, round the end, in tiers (a bit each).

    Returns where it stopped and what is left of `budget` entries: none, or some when the digests
    say that no row is left, or else when there is no free bitmap row.
    """
    slots, entries = u64_array(state, SLOTS), u64_array(state, ENTRIES)
    rows, uses = bitmap_rows(state), i64_array(state, USES)
    digests = digest_table(state)
    wanted = np.uint64(tiers)
    seen, became = _0, _0
    while budget > 0:
        left = _0
        for tier in range(TIERS):
            if (wanted >> np.uint64(tier)) & _1 != _0:
                left += digests[holder, tier, 0]
        if left == _0:
            break
        if place >= state[TOP]:
            place = 0
        key = entries[2 * place]
        value = entries[2 * place + 1]
        bits = tier_bits(rows, value, holder) & wanted if key != _0 else _0
        if bits != _0:
            if value == seen:
                if not again(uses, state, value, became):
                    seen = _0
            else:
                if state[FREE_ROW] < 0:
                    break
                became = removed(rows, uses, state, value, holder, bits)
                seen = value if became != value else _0
                if value & LOW_WORD == _0 and uses[row_of(value)] <= 0:
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
def collect(state: I64, holder: Int, tier: Int, start: Int, stop: Int, found: U64) -> Int:
    """Write the keys that `holder` has in `tier` (one bit) at places start..stop - 1; how many.

    `found` has room for all.
    """
    entries, rows = u64_array(state, ENTRIES), bitmap_rows(state)
    count = 0
    for place in range(start, stop):
        if count == found.shape[0]:
            break
        value = entries[2 * place + 1]
        if value != _0 and tier_bits(rows, value, holder) & np.uint64(tier) != _0:
            found[count] = entries[2 * place]
            count += 1
    return count


@compiled
def pack(state: I64, slots: U64, packed: U64, packed_rows: U64, uses: I64) -> None:
    """Move all entries, in their order, and rows in use into new empty arrays without gaps."""
    entries, rows = u64_array(state, ENTRIES), bitmap_rows(state)
    moved = np.zeros(rows.shape[0], np.int64)
    row = 0
    place = 0
    for old in range(state[TOP]):
        key = entries[2 * old]
        if key == _0:
            continue
        value = entries[2 * old + 1]
        if value & LOW_WORD == _0:
            was = row_of(value)
            if moved[was] == 0:
                copy_row(rows, was, packed_rows, row)
                row += 1
                moved[was] = row
            uses[moved[was] - 1] += 1
            value = np.uint64(moved[was]) << _16
        packed[2 * place] = key
        packed[2 * place + 1] = value
        put_slot(slots, word_of(key, place))
        place += 1
    state[TOP] = place
    state[CURSOR] = 0
    state[ROWS] = row
    state[FREE_ROW] = -1
    put_in_free_list(uses, state, row)


@compiled
def list_free_rows(state: I64, first: Int) -> None:
    """Put all rows from `first` on in front of the list of free rows, so that they go in order."""
    put_in_free_list(i64_array(state, USES), state, first)
