"""Who has a block, in 64 bits, and the bitmap rows behind them. Parts of the index's kernels.

Up to four 16-bit words `holder << 3 | tier bits` packed from the low end, or, when the low word is
0, `(row + 1) << 16`: a bitmap row, `rows[row, tier - 1, holder // 64]`. Blocks that a holder gets
or loses in one go share a row while they can: `uses[row]` is how many do, or of a free row
`-2 - next` in the list of free ones.
"""

from __future__ import annotations

import numpy as np

from global_index.jit import I64, U64, Flag, Int, Word, lowest_bit, part, rare_part, u64
from global_index.table_state import FREE_ROW, ROWS, TIERS

LOW_WORD = u64(0xFFFF)

_0, _1, _3, _7, _16, _32, _64 = map(u64, (0, 1, 3, 7, 16, 32, 64))


@rare_part
def copy_row(rows: U64, row: Int, into: U64, copy: Int) -> None:
    for tier in range(TIERS):
        for column in range(rows.shape[2]):
            into[copy, tier, column] = rows[row, tier, column]


@rare_part
def put_in_free_list(uses: I64, state: I64, first: Int) -> None:
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
    if value & LOW_WORD == _0:
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
        if (value & LOW_WORD) >> _3 == wanted:
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


@rare_part
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


@rare_part
def added(rows: U64, uses: I64, state: I64, value: Word, holder: Int, bit: Word) -> Word:
    """Holders `value` of one block and this one. A row that others use is copied.

    There must be a free row.
    """
    if value & LOW_WORD == _0:
        row = row_of(value)
        if uses[row] > 1:
            leave_row(uses, state, row)
            copy = take_row(uses, state)
            copy_row(rows, row, rows, copy)
            row = copy
    else:
        shift = _0
        while shift < _64:
            word = (value >> shift) & LOW_WORD
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
            mark(rows, row, np.int64((value & LOW_WORD) >> _3), value & _7, True)
            value >>= _16
    mark(rows, row, holder, bit, True)
    return np.uint64(row + 1) << _16


@rare_part
def removed(rows: U64, uses: I64, state: I64, value: Word, holder: Int, bits: Word) -> Word:
    """Holders `value` of one block less `bits`, of which `holder` has some; 0: nobody is left.

    A row that others use is copied. There must be a free row.
    """
    if value & LOW_WORD == _0:
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
    while (rest & LOW_WORD) >> _3 != np.uint64(holder):
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
    if became & LOW_WORD == _0 and became != _0:
        uses[row_of(became)] += 1
    if value & LOW_WORD != _0:
        return True
    leave_row(uses, state, row_of(value))
    return uses[row_of(value)] > 0
