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

_0, _1, _3, _7, _16, _32, _58 = (np.uint64(n) for n in (0, 1, 3, 7, 16, 32, 58))
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
def walk(table: U64, rows: U64, keys: U64, out: I64, since: I64) -> Int:
    """Leading runs of a chain: out[n] = (holder, hit, hbm, dram); return how many.

    Two gears. While blocks have bitmap rows the active set is a mask: each row is one AND, and
    only holders that drop out or change tier are touched (`since[holder]`: where its stay in HBM
    or DRAM began). The first inline block leaves at most four holders, which are walked singly.
    """
    total = keys.shape[0]
    found = 0
    words = rows.shape[2]
    active = np.zeros(words, np.uint64)
    was = np.zeros((2, words), np.uint64)
    small = np.zeros((4, 3), np.int64)
    count = 0
    position = 0
    value = _0
    for position in range(total + 1):
        value = _0
        if position < total:
            slot = find(table, keys[position])
            if table[2 * slot] != _0:
                value = table[2 * slot + 1]
        if value == _0 or value & _LOW_WORD != _0:
            break
        row = np.int64(value >> _16) - 1
        live = _0
        for word in range(words):
            hbm, dram = rows[row, 0, word], rows[row, 1, word]
            present = hbm | dram | rows[row, 2, word]
            if position == 0:
                active[word] = present
                mask = present
                while mask != _0:
                    holder = word * 64 + lowest_bit(mask)
                    mask &= mask - _1
                    for column in range(4):
                        since[holder, column] = 0
            now = active[word]
            if now == _0:
                continue
            gone = now & ~present
            while gone != _0:
                number = lowest_bit(gone)
                gone &= gone - _1
                holder = word * 64 + number
                out[found, 0] = holder
                out[found, 1] = position
                for kind in range(2):
                    if (was[kind, word] >> np.uint64(number)) & _1 != _0:
                        since[holder, 2 + kind] += position - since[holder, kind]
                    out[found, 2 + kind] = since[holder, 2 + kind]
                found += 1
            now &= present
            active[word] = now
            live |= now
            for kind in range(2):
                fast = now & hbm if kind == 0 else now & dram & ~hbm
                changed = (fast ^ was[kind, word]) & now
                was[kind, word] = fast
                while changed != _0:
                    number = lowest_bit(changed)
                    changed &= changed - _1
                    holder = word * 64 + number
                    if (fast >> np.uint64(number)) & _1 != _0:
                        since[holder, kind] = position
                    else:
                        since[holder, 2 + kind] += position - since[holder, kind]
        if live == _0:
            return found
    if position == 0:
        rest = value
        while rest != _0:
            small[count, 0] = np.int64((rest & _LOW_WORD) >> _3)
            count += 1
            rest >>= _16
    else:
        for word in range(words):
            mask = active[word]
            while mask != _0:
                number = lowest_bit(mask)
                mask &= mask - _1
                holder = word * 64 + number
                for kind in range(2):
                    if (was[kind, word] >> np.uint64(number)) & _1 != _0:
                        since[holder, 2 + kind] += position - since[holder, kind]
                if value != _0 and tier_bits(rows, value, holder) != _0:
                    small[count, 0] = holder
                    small[count, 1] = since[holder, 2]
                    small[count, 2] = since[holder, 3]
                    count += 1
                else:
                    out[found, 0] = holder
                    out[found, 1] = position
                    out[found, 2] = since[holder, 2]
                    out[found, 3] = since[holder, 3]
                    found += 1
    while count > 0:
        place = 0
        while place < count:
            bits = tier_bits(rows, value, small[place, 0]) if value != _0 else _0
            if bits == _0:
                count -= 1
                out[found, 0] = small[place, 0]
                out[found, 1] = position
                out[found, 2] = small[place, 1]
                out[found, 3] = small[place, 2]
                found += 1
                for column in range(3):
                    small[place, column] = small[count, column]
            else:
                if bits & _1 != _0:
                    small[place, 1] += 1
                elif bits & np.uint64(2) != _0:
                    small[place, 2] += 1
                place += 1
        position += 1
        value = _0
        if position < total:
            slot = find(table, keys[position])
            if table[2 * slot] != _0:
                value = table[2 * slot + 1]
    return found
