"""What the memory index's kernels know of its table: one array of numbers, `state`.

A call of a kernel costs Python 0.06 to 0.11 us for each array it hands over, so it hands over this
one, which says where the others are. Who replaces one of them must say so at once (`tell`).
"""

from __future__ import annotations

import numpy as np

from global_index.jit import (
    I64,
    U32,
    U64,
    Int,
    carray,
    i64_pointer,
    part,
    u32_pointer,
    u64_pointer,
)

BLOCKS, TOP, CURSOR, ROWS, FREE_ROW = range(5)
"""Entries in use; where the unused ones begin; where to look for a free one below; bitmap rows in
use; the first free one, or -1."""
GROW_AT, CAPACITY = 5, 6
"""Most blocks that the slots take, and that there may be at all."""
SLOTS, ENTRIES, BITMAPS, USES, DIGESTS, LINKS, OUT, RUNS, ACTIVE, WATCHED, WORDS = range(7, 29, 2)
"""Arrays: the address, then the number of elements."""
BITMAP_WORDS = 29
"""Words of a bitmap row for each tier."""
DONE, REFUSED, SPARSE = range(30, 33)
"""What a kernel says beside what it returns: boxing a tuple takes as long as to apply ten keys."""
STATE_WORDS = 33
TIERS = 3


def tell(state: I64, which: int, array: U32 | U64 | I64) -> None:
    """From now on the kernels use this array, which the caller keeps alive."""
    state[which] = array.ctypes.data
    state[which + 1] = array.size


@part
def u32_array(state: I64, which: Int) -> U32:
    array: U32 = carray(u32_pointer(state[which]), (state[which + 1],))
    return array


@part
def u64_array(state: I64, which: Int) -> U64:
    array: U64 = carray(u64_pointer(state[which]), (state[which + 1],))
    return array


@part
def i64_array(state: I64, which: Int) -> I64:
    array: I64 = carray(i64_pointer(state[which]), (state[which + 1],))
    return array


@part
def i64_table(state: I64, which: Int, columns: Int) -> I64:
    array: I64 = carray(i64_pointer(state[which]), (state[which + 1] // columns, columns))
    return array


@part
def bitmap_rows(state: I64) -> U64:
    """[row, tier - 1, holder // 64]"""
    words = state[BITMAP_WORDS]
    shape = (state[BITMAPS + 1] // (TIERS * words), TIERS, words)
    array: U64 = carray(u64_pointer(state[BITMAPS]), shape)
    return array


@part
def digest_table(state: I64) -> U64:
    """[holder, tier - 1]: the count of rows and the XOR of their keys."""
    shape = (state[DIGESTS + 1] // (2 * TIERS), TIERS, 2)
    array: U64 = carray(u64_pointer(state[DIGESTS]), shape)
    return array


def empty_state(capacity: int) -> I64:
    state = np.zeros(STATE_WORDS, np.int64)
    state[FREE_ROW] = -1
    state[CAPACITY] = capacity
    return state
