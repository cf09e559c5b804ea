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
from global_index.jit import I64, U32, U64, Flag, Int, compiled, part, u64
from global_index.slots import (
    BUCKET_WORDS,
    find,
    free_slot,
    look_ahead,
    look_ahead_near,
    look_at_first,
    put_all,
    put_slot,
)
from global_index.slots import place_of as place_of
from global_index.table_state import (
    BLOCKS,
    CAPACITY,
    CURSOR,
    DONE,
    ENTRIES,
    FREE_ROW,
    GROW_AT,
    REFUSED,
    ROWS,
    SLOTS,
    SPARSE,
    TIERS,
    TOP,
    USES,
    bitmap_rows,
    digest_table,
    i64_array,
    u32_array,
    u64_array,
)

MIN_SLOTS = 128 * BUCKET_WORDS
MIN_ROWS = 256

_0, _1, _3, _16 = map(u64, (0, 1, 3, 16))


@part
def next_free(entries: U64, place: Int, top: Int) -> Int:
    """The first free entry below `top` from `place` on, round the end. There must be one."""
    while True:
        if place >= top:
            place = 0
        if entries[2 * place] == _0:
            return place
        place += 1


@compiled
def store(state: I64, keys: U64, holder: Int, tier: Int, start: Int) -> Int:
    """Add rows for keys[start:]; return how many it added, or the complement (`~`) of that.

    The complement says: look at the state. REFUSED is how many keys were new and refused, DONE
    where it stopped. Less than len(keys) means: make the table larger (BLOCKS reached GROW_AT), or
    else add free rows, then go on from there.
    """
    slots, entries = u32_array(state, SLOTS), u64_array(state, ENTRIES)
    rows, uses = bitmap_rows(state), i64_array(state, USES)
    bit = _1 << np.uint64(tier)
    alone = (np.uint64(holder) << _3) | bit
    blocks, top = state[BLOCKS], state[TOP]
    most, room = min(state[GROW_AT], state[CAPACITY]), entries.shape[0] // 2
    changed, refused = 0, 0
    xor, seen, became = _0, _0, _0
    place = -1
    has_jumped = False
    i = start
    while i < keys.shape[0]:
        key = keys[i]
        place += 1
        if place >= top or entries[2 * place] != key or key == _0:
            if not has_jumped:
                look_at_first(slots, keys, i)
                has_jumped = True
            look_ahead(slots, entries, keys, i)
            place = find(slots, entries, key)
            if place < 0:
                if key == _0:
                    i += 1
                    continue
                if blocks >= most:
                    if blocks < state[CAPACITY]:
                        break
                    refused += 1
                    i += 1
                    continue
                # Behind all others, or once a twelfth is free the next free one.
                if top < room and 12 * (top - blocks) < top + 768:
                    place = top
                    top += 1
                else:
                    place = next_free(entries, state[CURSOR], top)
                    state[CURSOR] = place + 1
                put_slot(slots, key, place)
                entries[2 * place] = key
                entries[2 * place + 1] = alone
                blocks += 1
                changed += 1
                xor ^= key
                i += 1
                continue
        value = entries[2 * place + 1]
        if value == seen:
            entries[2 * place + 1] = became
            if not again(uses, state, value, became):
                seen = _0
        elif tier_bits(rows, value, holder) & bit != _0:
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
    state[BLOCKS], state[TOP] = blocks, top
    state[DONE], state[REFUSED] = i, refused
    digests = digest_table(state)
    digests[holder, tier, 0] += np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return changed if i == keys.shape[0] and refused == 0 else ~changed


@part
def lower_top(entries: U64, state: I64) -> None:
    """Let `top` come down to the last entry in use."""
    top = state[TOP]
    while top > 0 and entries[2 * top - 2] == _0:
        top -= 1
    state[TOP] = top


@part
def stands_empty(state: I64) -> Flag:
    """Whether three quarters of what the table may hold, or of the bitmap rows, are unused.

    A table in its first pages is never sparse.
    """
    rows = state[USES + 1]
    return (4 * state[BLOCKS] < state[GROW_AT] and state[SLOTS + 1] > MIN_SLOTS) or (
        4 * state[ROWS] < rows and rows > MIN_ROWS
    )


@compiled
def is_sparse(state: I64) -> Flag:
    """`stands_empty`, for Python."""
    return stands_empty(state)


@compiled
def remove(state: I64, keys: U64, holder: Int, tier: Int, start: Int) -> Int:
    """Take rows away for keys[start:]; return how many there were, or the complement of that.

    The complement says: look at the state. SPARSE is whether the table stands three quarters empty
    now, DONE where it stopped. Less than len(keys) means: add free rows, then go on from there.
    """
    slots, entries = u32_array(state, SLOTS), u64_array(state, ENTRIES)
    rows, uses = bitmap_rows(state), i64_array(state, USES)
    bit = _1 << np.uint64(tier)
    alone = (np.uint64(holder) << _3) | bit
    top = state[TOP]
    changed, freed = 0, 0
    xor, seen, became = _0, _0, _0
    place = -2
    look_at_first(slots, keys, start)
    i = start
    while i < keys.shape[0]:
        key = keys[i]
        i += 1
        if key == _0:
            continue
        # Most are neighbours: as they came, or leaves first.
        if 0 <= place < top - 1 and entries[2 * place + 2] == key:
            place += 1
            look_ahead_near(slots, keys, i)
        elif place > 0 and entries[2 * place - 2] == key:
            place -= 1
            look_ahead_near(slots, keys, i)
        else:
            look_ahead(slots, entries, keys, i)
            found = find(slots, entries, key)
            if found < 0:
                continue
            place = found
        value = entries[2 * place + 1]
        if value == alone:
            entries[2 * place] = _0
            entries[2 * place + 1] = _0
            free_slot(slots, key, place)
            freed += 1
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
    state[BLOCKS] -= freed
    lower_top(entries, state)
    is_sparse = stands_empty(state)
    state[DONE], state[SPARSE] = i, is_sparse
    digests = digest_table(state)
    digests[holder, tier, 0] -= np.uint64(changed)
    digests[holder, tier, 1] ^= xor
    return changed if i == keys.shape[0] and not is_sparse else ~changed


@compiled
def sweep(state: I64, holder: Int, tiers: Int, place: Int, budget: Int) -> tuple[Int, Int]:
    """Take `holder` off all entries from `place` on, round the end, in tiers (a bit each).

    Returns where it stopped and what is left of `budget` entries: none, or some when the digests
    say that no row is left, or else when there is no free bitmap row.
    """
    slots, entries = u32_array(state, SLOTS), u64_array(state, ENTRIES)
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
                entries[2 * place] = _0
                free_slot(slots, key, place)
                state[BLOCKS] -= 1
        budget -= 1
        place += 1
    lower_top(entries, state)
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
def pack(state: I64, slots: U32, packed: U64, packed_rows: U64, uses: I64) -> None:
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
        place += 1
    put_all(slots, packed, place)
    state[TOP] = place
    state[CURSOR] = 0
    state[ROWS] = row
    state[FREE_ROW] = -1
    put_in_free_list(uses, state, row)


@compiled
def list_free_rows(state: I64, first: Int) -> None:
    """Put all rows from `first` on in front of the list of free rows, so that they go in order."""
    put_in_free_list(i64_array(state, USES), state, first)


@compiled
def rehash(state: I64) -> None:
    """Note the places of all entries in slots that are all free."""
    put_all(u32_array(state, SLOTS), u64_array(state, ENTRIES), state[TOP])
