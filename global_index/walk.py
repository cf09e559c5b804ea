"""The walk of a chain over the memory index's table, compiled by Numba. See kernels.py."""

from __future__ import annotations

import numpy as np

from global_index.holder_rows import LOW_WORD, row_of, tier_bits
from global_index.jit import I64, U64, Int, Word, compiled, fetch, lowest_bit, part, rare_part, u64
from global_index.slots import find, look_ahead
from global_index.table_state import (
    ACTIVE,
    ENTRIES,
    LINKS,
    OUT,
    RUNS,
    SLOTS,
    TOP,
    WATCHED,
    WORDS,
    bitmap_rows,
    i64_array,
    i64_table,
    u32_array,
    u64_array,
)

# links[holder]: its base, the first holder whose base it is, the next with the same base; or -1.
BASE, FIRST, NEXT = range(3)
# runs[holder]: its run while a chain is walked. PLACE in `active` is -1 when it has none.
PLACE, TIER, SINCE, HBM, DRAM = range(5)
NOWHERE = 3
STEP, FAR = 8, 96
"""Blocks compared at once: two cache lines. How far ahead they are fetched: processors do not look
beyond a page, and a chain that nobody has asked for lately is in none of the caches."""

_0, _1, _2, _3, _16 = map(u64, (0, 1, 2, 3, 16))


@part
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


@rare_part
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


@rare_part
def go_on(
    rows: U64, links: I64, runs: I64, active: I64, out: I64,
    found: Int, value: Word, holder: Int, position: Int,
) -> Int:  # fmt: skip
    """Take a holder's run on to a block that may differ from the one before; return `found`.

    A run that ends here goes to out[:, found], and the last active holder takes its place.
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
    out[0, found] = holder
    out[1, found] = position
    out[2, found] = runs[holder, HBM]
    out[3, found] = runs[holder, DRAM]
    return found + 1


@rare_part
def watch(links: I64, watched: U64, words: I64, active: I64, columns: Int) -> None:
    """Note whose bits matter: active holders' and their bases'. words[-1] is the count of words.

    A base that never had a block may be beyond the columns of a bitmap row.
    """
    watched[:] = _0
    for n in range(active[active.shape[0] - 1]):
        holder = active[n]
        watched[holder >> 6] |= _1 << np.uint64(holder & 63)
        holder = links[holder, BASE]
        if holder >= 0:
            watched[holder >> 6] |= _1 << np.uint64(holder & 63)
    count = 0
    for word in range(columns):
        if watched[word] != _0:
            words[count] = word
            count += 1
    words[words.shape[0] - 1] = count


@rare_part
def start(
    rows: U64, links: I64, runs: I64, active: I64, value: Word
) -> None:  # fmt: skip
    """Begin the runs of all that have the first block, whose holders are `value`."""
    if value & LOW_WORD != _0:
        rest = value
        while rest != _0:
            start_runs(rows, links, runs, active, value, np.int64((rest & LOW_WORD) >> _3))
            rest >>= _16
    elif value != _0:
        row = row_of(value)
        for word in range(rows.shape[2]):
            mask = rows[row, 0, word] | rows[row, 1, word] | rows[row, 2, word]
            while mask != _0:
                start_runs(rows, links, runs, active, value, word * 64 + lowest_bit(mask))
                mask &= mask - _1


@compiled
def walk(state: I64, keys: U64) -> Int:
    """Leading runs of a chain: out[:, n] = (holder, hit, hbm, dram); return how many.

    Blocks whose holders are those of the block before cost a comparison; else only runs that
    this block may end or take to another tier are looked at. All of runs[:, PLACE] is -1
    before and after.
    """
    total = keys.shape[0]
    found = 0
    if total == 0:
        return found
    slots, entries, rows = u32_array(state, SLOTS), u64_array(state, ENTRIES), bitmap_rows(state)
    links, out = i64_table(state, LINKS, 3), i64_table(state, OUT, state[OUT + 1] // 4)
    runs, active = i64_table(state, RUNS, 5), i64_array(state, ACTIVE)
    top = state[TOP]
    last = active.shape[0] - 1
    active[last] = 0
    place = find(slots, entries, keys[0])
    if place < 0:
        return found
    was = entries[2 * place + 1]
    start(rows, links, runs, active, was)
    watched, words = u64_array(state, WATCHED), i64_array(state, WORDS)
    watching = -1
    position = 1
    while active[last] > 0:
        place += 1
        # The whole stretch that lies in a row and has the same holders.
        while position + STEP <= total and place + STEP <= top:
            fetch(entries, 2 * (place + FAR))
            fetch(entries, 2 * (place + FAR) + STEP)
            fetch(keys, position + FAR)
            differs = _0
            for n in range(STEP):
                differs |= entries[2 * (place + n)] ^ keys[position + n]
                differs |= entries[2 * (place + n) + 1] ^ was
            if differs != _0:
                break
            place += STEP
            position += STEP
        while position < total and place < top:
            if (entries[2 * place] ^ keys[position]) | (entries[2 * place + 1] ^ was) != _0:
                break
            place += 1
            position += 1
        value = _0
        if position < total:
            if place < top and entries[2 * place] == keys[position]:
                value = entries[2 * place + 1]
            else:
                look_ahead(slots, entries, keys, position)
                at = find(slots, entries, keys[position])
                if at >= 0:
                    place = at
                    value = entries[2 * place + 1]
        if value == was:
            position += 1
            continue
        if was & LOW_WORD == _0 and value & LOW_WORD == _0 and value != _0:
            if watching < 0 or 2 * active[last] < watching:
                watch(links, watched, words, active, rows.shape[2])
                watching = active[last]
            row = row_of(value)
            before = row_of(was)
            for n in range(words[words.shape[0] - 1]):
                column = words[n]
                mask = (
                    (rows[row, 0, column] ^ rows[before, 0, column])
                    | (rows[row, 1, column] ^ rows[before, 1, column])
                    | (rows[row, 2, column] ^ rows[before, 2, column])
                ) & watched[column]
                while mask != _0:
                    changed = column * 64 + lowest_bit(mask)
                    mask &= mask - _1
                    who = changed
                    while who >= 0:
                        after = links[changed, FIRST] if who == changed else links[who, NEXT]
                        if runs[who, PLACE] >= 0:
                            found = go_on(
                                rows, links, runs, active, out, found, value, who, position
                            )
                        who = after
        else:
            for n in range(active[last] - 1, -1, -1):
                found = go_on(rows, links, runs, active, out, found, value, active[n], position)
        was = value
        position += 1
    return found
