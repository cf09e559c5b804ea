"""The memory index's inner loops, compiled by Numba. No allocation, no Python objects, no GIL.

Table: `table[2 * slot]` is the key (0: empty), `table[2 * slot + 1]` its holders: up to four
16-bit words `holder << 3 | tier bits` packed from the low end, or, when the low word is 0,
`(row + 1) << 16`: the block's bitmap row, `rows[row, tier - 1, holder // 64]`. Linear probing from
`home(key)`, which grows with the mixed key, so a rehash reads and writes in order; deletion shifts
entries back, so churn leaves no tombstones.

All arithmetic on keys is in uint64 and all on slots in int64: Numba makes a float of a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])
Word = Any
"""A uint64: a key, a slot's holders, a mask."""
Int = Any
"""An int64: a slot, a row, a holder, a count. (Numpy's scalar types are no `int` to mypy.)"""

# state[...]: the numbers that a kernel changes beside the arrays.
BLOCKS, FREE_ROWS, CHANGED, UNCHANGED, DROPPED = range(5)
STATE_WORDS = 5
TIERS = 3

# links[holder]: its base, the first holder whose base it is, the next with the same base; or -1.
BASE, FIRST, NEXT = range(3)
# runs[holder]: its run while a chain is walked. PLACE in `active` is -1 when it has none.
PLACE, TIER, SINCE, HBM, DRAM = range(5)
NOWHERE = 3

_0, _1, _2, _3, _7, _16, _32, _58 = (np.uint64(n) for n in (0, 1, 2, 3, 7, 16, 32, 58))
_LOW_WORD = np.uint64(0xFFFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_NUMBER = np.zeros(64, dtype=np.int64)
for _n in range(64):
    _BIT_NUMBER[((0x03F79D71B4CB0A89 << _n) & (2**64 - 1)) >> 58] = _n


def _compiled(function: F) -> F:
    """njit with an on-disk cache, or without one where no cache directory can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "kernels are compiled anew at each start (%s); set NUMBA_CACHE_DIR", error
        )
        return cast(F, numba.njit(nogil=True)(function))


@_compiled
def lowest_bit(mask: Word) -> Int:
    """Number of the lowest set bit; mask is not 0."""
    return _BIT_NUMBER[((mask & (~mask + _1)) * _DE_BRUIJN) >> _58]


@_compiled
def home(key: Word, slots: Int) -> Int:
    return np.int64((((key * _MIX) >> _32) * np.uint64(slots)) >> _32)


@_compiled
def find(table: U64, key: Word) -> Int:
    """Slot of `key`, or the empty slot where it would go."""
    slots = table.shape[0] >> 1
    slot = home(key, slots)
    while table[2 * slot] != _0 and table[2 * slot] != key:
        slot += 1
        if slot == slots:
            slot = 0
    return slot


@_compiled
def erase(table: U64, hole: Int) -> None:
    """Empty a slot and shift back what had probed past it."""
    slots = table.shape[0] >> 1
    slot = hole
    while True:
        slot += 1
        if slot == slots:
            slot = 0
        key = table[2 * slot]
        if key == _0:
            break
        from_home = slot - home(key, slots)
        if from_home < 0:
            from_home += slots
        from_hole = slot - hole
        if from_hole < 0:
            from_hole += slots
        if from_home >= from_hole:
            table[2 * hole] = key
            table[2 * hole + 1] = table[2 * slot + 1]
            hole = slot
    table[2 * hole] = _0
    table[2 * hole + 1] = _0


@_compiled
def rehash(old: U64, new: U64) -> None:
    """Move all entries of `old` into the empty, larger `new`."""
    for slot in range(old.shape[0] >> 1):
        key = old[2 * slot]
        if key != _0:
            place = find(new, key)
            new[2 * place] = key
            new[2 * place + 1] = old[2 * slot + 1]


@_compiled
def tier_bits(rows: U64, value: Word, holder: Int) -> Word:
    """The tiers in which `holder` has the block whose holders are `value`."""
    if value & _LOW_WORD == _0:
        row = np.int64(value >> _16) - 1
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


@_compiled
def put_in_row(rows: U64, row: Int, holder: Int, bits: Word) -> None:
    mark = _1 << np.uint64(holder & 63)
    for tier in range(TIERS):
        if (bits >> np.uint64(tier)) & _1 != _0:
            rows[row, tier, holder >> 6] |= mark


@_compiled
def count_row(rows: U64, row: Int, enough: Int) -> Int:
    """Holders in a row; counting stops once there are more than `enough`."""
    count = 0
    for word in range(rows.shape[2]):
        mask = rows[row, 0, word] | rows[row, 1, word] | rows[row, 2, word]
        while mask != _0:
            mask &= mask - _1
            count += 1
            if count > enough:
                return count
    return count


@_compiled
def row_inline(rows: U64, row: Int) -> Word:
    """The inline form of a row with at most four holders."""
    value = _0
    for word in range(rows.shape[2]):
        mask = rows[row, 0, word] | rows[row, 1, word] | rows[row, 2, word]
        while mask != _0:
            holder = word * 64 + lowest_bit(mask)
            mask &= mask - _1
            packed = (np.uint64(holder) << _3) | tier_bits(rows, np.uint64(row + 1) << _16, holder)
            value = (value << _16) | packed
    return value


@_compiled
def store(
    table: U64, rows: U64, free_rows: I64, state: I64, digests: U64,
    holder: Int, tier: Int, keys: U64, start: Int, grow_at: Int, capacity: Int,
) -> Int:  # fmt: skip
    """Add rows for keys[start:]; return where it stopped.

    Less than len(keys) means: make the table larger (state[BLOCKS] reached grow_at), or else add
    free rows, then go on from there.
    """
    bit = _1 << np.uint64(tier)
    for i in range(start, keys.shape[0]):
        key = keys[i]
        if key == _0:
            state[UNCHANGED] += 1
            continue
        slot = find(table, key)
        if table[2 * slot] == _0:
            if state[BLOCKS] >= capacity:
                state[DROPPED] += 1
                continue
            if state[BLOCKS] >= grow_at:
                return i
            table[2 * slot] = key
            table[2 * slot + 1] = (np.uint64(holder) << _3) | bit
            state[BLOCKS] += 1
        else:
            value = table[2 * slot + 1]
            if tier_bits(rows, value, holder) & bit != _0:
                state[UNCHANGED] += 1
                continue
            if value & _LOW_WORD == _0:
                put_in_row(rows, np.int64(value >> _16) - 1, holder, bit)
            else:
                shift = _0
                wanted = np.uint64(holder)
                while shift < np.uint64(64):
                    word = (value >> shift) & _LOW_WORD
                    if word == _0:
                        value |= ((wanted << _3) | bit) << shift
                        break
                    if word >> _3 == wanted:
                        value |= bit << shift
                        break
                    shift += _16
                if shift == np.uint64(64):
                    if state[FREE_ROWS] == 0:
                        return i
                    state[FREE_ROWS] -= 1
                    row = free_rows[state[FREE_ROWS]]
                    rows[row, :, :] = _0
                    while value != _0:
                        word = value & _LOW_WORD
                        put_in_row(rows, row, np.int64(word >> _3), word & _7)
                        value >>= _16
                    put_in_row(rows, row, holder, bit)
                    value = np.uint64(row + 1) << _16
                table[2 * slot + 1] = value
        state[CHANGED] += 1
        digests[holder, tier, 0] += _1
        digests[holder, tier, 1] ^= key
    return keys.shape[0]


@_compiled
def drop_bits(
    table: U64, rows: U64, free_rows: I64, state: I64, digests: U64,
    slot: Int, holder: Int, bits: Word,
) -> bool:  # fmt: skip
    """Take `bits` (all present) of `holder` off a slot. True when the slot was emptied."""
    key = table[2 * slot]
    value = table[2 * slot + 1]
    for tier in range(TIERS):
        if (bits >> np.uint64(tier)) & _1 != _0:
            digests[holder, tier, 0] -= _1
            digests[holder, tier, 1] ^= key
            state[CHANGED] += 1
    if value & _LOW_WORD == _0:
        row = np.int64(value >> _16) - 1
        mark = _1 << np.uint64(holder & 63)
        for tier in range(TIERS):
            if (bits >> np.uint64(tier)) & _1 != _0:
                rows[row, tier, holder >> 6] &= ~mark
        # Back to inline at two, not four: a block that wavers around four would thrash.
        if tier_bits(rows, value, holder) == _0 and count_row(rows, row, 2) <= 2:
            table[2 * slot + 1] = row_inline(rows, row)
            free_rows[state[FREE_ROWS]] = row
            state[FREE_ROWS] += 1
        return False
    shift = _0
    while (value >> shift) & _LOW_WORD == _0 or ((value >> shift) & _LOW_WORD) >> _3 != np.uint64(
        holder
    ):
        shift += _16
    value &= ~(bits << shift)
    if (value >> shift) & _7 == _0:
        # The words above move down one place, so that the used ones stay at the low end.
        above = _0
        if shift < np.uint64(48):
            above = value >> (shift + _16)
        value = (value & ((_1 << shift) - _1)) | (above << shift)
    if value == _0:
        erase(table, slot)
        state[BLOCKS] -= 1
        return True
    table[2 * slot + 1] = value
    return False


@_compiled
def remove(
    table: U64, rows: U64, free_rows: I64, state: I64, digests: U64,
    holder: Int, tier: Int, keys: U64,
) -> None:  # fmt: skip
    bit = _1 << np.uint64(tier)
    for i in range(keys.shape[0]):
        key = keys[i]
        slot = find(table, key)
        if (
            key == _0
            or table[2 * slot] == _0
            or tier_bits(rows, table[2 * slot + 1], holder) & bit == _0
        ):
            state[UNCHANGED] += 1
            continue
        drop_bits(table, rows, free_rows, state, digests, slot, holder, bit)


@_compiled
def sweep(
    table: U64, rows: U64, free_rows: I64, state: I64, digests: U64,
    holder: Int, tiers: Word, slot: Int, budget: Int,
) -> Int:  # fmt: skip
    """Take `holder` off all slots from `slot` on, round the end; return where it stopped.

    Stops when the digests say that nothing is left, or after `budget` slots. A removal between
    two sweeps may shift an entry behind the cursor: the next round finds it.
    """
    slots = table.shape[0] >> 1
    if slot >= slots:
        slot = 0
    while budget > 0:
        left = _0
        for tier in range(TIERS):
            if (tiers >> np.uint64(tier)) & _1 != _0:
                left += digests[holder, tier, 0]
        if left == _0:
            break
        budget -= 1
        emptied = False
        if table[2 * slot] != _0:
            bits = tier_bits(rows, table[2 * slot + 1], holder) & tiers
            if bits != _0:
                emptied = drop_bits(table, rows, free_rows, state, digests, slot, holder, bits)
        if not emptied:  # else another entry may have moved here
            slot += 1
            if slot == slots:
                slot = 0
    return slot


@_compiled
def collect(
    table: U64, rows: U64, holder: Int, tier: Word, start: Int, stop: Int, found: U64
) -> Int:
    """Write the keys that `holder` has in `tier` (one bit) in slots start..stop - 1; how many.

    `found` has room for all.
    """
    count = 0
    for slot in range(start, stop):
        if count == found.shape[0]:
            break
        value = table[2 * slot + 1]
        if table[2 * slot] != _0 and tier_bits(rows, value, holder) & tier != _0:
            found[count] = table[2 * slot]
            count += 1
    return count


@_compiled
def fastest(rows: U64, links: I64, value: Word, holder: Int) -> Int:
    """The fastest tier in which `holder` or its base has the block: 0, 1, 2, or NOWHERE."""
    if value == _0:
        return NOWHERE
    bits = tier_bits(rows, value, holder)
    if links[holder, BASE] >= 0:
        bits |= tier_bits(rows, value, links[holder, BASE])
    if bits & _1 != _0:
        return 0
    if bits & _2 != _0:
        return 1
    return 2 if bits != _0 else NOWHERE


@_compiled
def start_runs(rows: U64, links: I64, runs: I64, active: I64, value: Word, holder: Int) -> None:
    """Begin the runs of `holder` and of those whose base it is. active[-1] is their count."""
    last = active.shape[0] - 1
    who = holder
    while who >= 0:
        if runs[who, PLACE] < 0:
            runs[who, TIER] = fastest(rows, links, value, who)
            runs[who, SINCE] = runs[who, HBM] = runs[who, DRAM] = 0
            runs[who, PLACE] = active[last]
            active[active[last]] = who
            active[last] += 1
        who = links[holder, FIRST] if who == holder else links[who, NEXT]


@_compiled
def go_on(
    rows: U64, links: I64, runs: I64, active: I64, out: I64,
    found: Int, value: Word, holder: Int, position: Int,
) -> Int:  # fmt: skip
    """Take a holder's run on to a block that may differ from the one before; return `found`.

    A run that ends here goes to out[found], and the last active holder takes its place.
    """
    tier = fastest(rows, links, value, holder)
    was = runs[holder, TIER]
    if tier == was:
        return found
    if was < 2:
        runs[holder, HBM + was] += position - runs[holder, SINCE]
    runs[holder, TIER] = tier
    runs[holder, SINCE] = position
    if tier != NOWHERE:
        return found
    last = active.shape[0] - 1
    active[last] -= 1
    moved = active[active[last]]
    active[runs[holder, PLACE]] = moved
    runs[moved, PLACE] = runs[holder, PLACE]
    runs[holder, PLACE] = -1
    out[found, 0] = holder
    out[found, 1] = position
    out[found, 2] = runs[holder, HBM]
    out[found, 3] = runs[holder, DRAM]
    return found + 1


@_compiled
def watch(links: I64, runs: I64, watched: U64, holder: Int) -> None:
    """Mark whose bits matter: `holder`'s if it, or one whose base it is, is still active."""
    matters = runs[holder, PLACE] >= 0
    who = links[holder, FIRST]
    while who >= 0 and not matters:
        matters = runs[who, PLACE] >= 0
        who = links[who, NEXT]
    mark = _1 << np.uint64(holder & 63)
    if matters:
        watched[holder >> 6] |= mark
    else:
        watched[holder >> 6] &= ~mark


@_compiled
def walk(table: U64, rows: U64, links: I64, keys: U64, out: I64, runs: I64, active: I64) -> Int:
    """Leading runs of a chain: out[n] = (holder, hit, hbm, dram); return how many.

    Blocks whose holders are those of the block before cost a comparison; else only runs that this
    block may end or take to another tier are looked at. All of runs[:, PLACE] is -1 before and
    after.
    """
    total = keys.shape[0]
    found = 0
    if total == 0:
        return found
    last = active.shape[0] - 1
    active[last] = 0
    slot = find(table, keys[0])
    was = _0
    if table[2 * slot] != _0:
        was = table[2 * slot + 1]
    watched = np.zeros(rows.shape[2], np.uint64)
    if was & _LOW_WORD != _0:
        rest = was
        while rest != _0:
            start_runs(rows, links, runs, active, was, np.int64((rest & _LOW_WORD) >> _3))
            rest >>= _16
    elif was != _0:
        row = np.int64(was >> _16) - 1
        for word in range(rows.shape[2]):
            mask = rows[row, 0, word] | rows[row, 1, word] | rows[row, 2, word]
            while mask != _0:
                start_runs(rows, links, runs, active, was, word * 64 + lowest_bit(mask))
                mask &= mask - _1
        for n in range(active[last]):
            watch(links, runs, watched, active[n])
            if links[active[n], BASE] >= 0:
                watch(links, runs, watched, links[active[n], BASE])
    for position in range(1, total + 1):
        if active[last] == 0:
            break
        value = _0
        if position < total:
            slot = find(table, keys[position])
            if table[2 * slot] != _0:
                value = table[2 * slot + 1]
        if value == was:
            continue
        if value != _0 and was & _LOW_WORD == _0 and value & _LOW_WORD == _0:
            row = np.int64(value >> _16) - 1
            before = np.int64(was >> _16) - 1
            for word in range(rows.shape[2]):
                if watched[word] == _0:
                    continue
                mask = (
                    (rows[row, 0, word] ^ rows[before, 0, word])
                    | (rows[row, 1, word] ^ rows[before, 1, word])
                    | (rows[row, 2, word] ^ rows[before, 2, word])
                ) & watched[word]
                while mask != _0:
                    changed = word * 64 + lowest_bit(mask)
                    mask &= mask - _1
                    ended = found
                    who = changed
                    while who >= 0:
                        next_ = links[changed, FIRST] if who == changed else links[who, NEXT]
                        if runs[who, PLACE] >= 0:
                            found = go_on(
                                rows, links, runs, active, out, found, value, who, position
                            )
                        who = next_
                    for n in range(ended, found):
                        watch(links, runs, watched, out[n, 0])
                        if links[out[n, 0], BASE] >= 0:
                            watch(links, runs, watched, links[out[n, 0], BASE])
        else:
            for n in range(active[last] - 1, -1, -1):
                found = go_on(rows, links, runs, active, out, found, value, active[n], position)
            # watched is a superset now, or (inline before) not made yet
            if value & _LOW_WORD == _0:
                for n in range(active[last]):
                    watch(links, runs, watched, active[n])
                    if links[active[n], BASE] >= 0:
                        watch(links, runs, watched, links[active[n], BASE])
        was = value
    return found
