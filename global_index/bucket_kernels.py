"""Inner loop over one bucket of rows (see `emberkv_proto.buckets`) in the memory index's table.

A slot's home grows with the same product that its bucket of rows is the high byte of, so they are
in the slots between two places, and in those after them as long as these are full.
"""

from __future__ import annotations

import numpy as np

from emberkv_proto.buckets import BUCKET_SHIFT, BUCKETS
from global_index.holder_rows import tier_bits
from global_index.jit import I64, U64, Int, compiled, equal_words, u64
from global_index.slots import BUCKET_SLOTS, next_bucket, place_of
from global_index.table_state import ENTRIES, SLOTS, bitmap_rows, u64_array

_0, _1 = u64(0), u64(1)
_SHIFT = u64(BUCKET_SHIFT)


@compiled
def bucket_rows(state: I64, holder: Int, tier: Int, bucket: Int, out: U64) -> Int:
    """Write the holder's keys of one bucket to `out` while there is room; return how many."""
    slots, entries, rows = u64_array(state, SLOTS), u64_array(state, ENTRIES), bitmap_rows(state)
    homes = slots.shape[0] // BUCKET_SLOTS
    first = bucket * homes // BUCKETS
    last = (bucket + 1) * homes // BUCKETS
    bit = _1 << np.uint64(tier)
    wanted = np.uint64(bucket)
    found = 0
    at = first * BUCKET_SLOTS
    for step in range(homes):
        for slot in range(at, at + BUCKET_SLOTS):
            word = slots[slot]
            if word != _0 and word >> _SHIFT == wanted:
                place = place_of(word)
                if tier_bits(rows, entries[2 * place + 1], holder) & bit != _0:
                    if found < out.shape[0]:
                        out[found] = entries[2 * place]
                    found += 1
        if first + step >= last and equal_words(slots, at, _0) != _0:
            break
        at = next_bucket(slots, at)
    return found
