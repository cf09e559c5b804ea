"""Inner loop over one bucket of rows (see `emberkv_proto.buckets`) in the memory index's table.

A key's home grows with the same product that its bucket of rows is the high byte of, so they are
in the slots between two places, and in those after them as long as keys went past these.
"""

from __future__ import annotations

import numpy as np

from emberkv_proto.buckets import BUCKET_SHIFT, BUCKETS
from global_index.holder_rows import tier_bits
from global_index.jit import I64, U64, Int, compiled, lowest_bit, u64
from global_index.slots import BUCKET_WORDS, PASSED, PLACES, mixed, next_bucket, occupied
from global_index.table_state import ENTRIES, SLOTS, bitmap_rows, u32_array, u64_array

_0, _1 = u64(0), u64(1)
_SHIFT = u64(BUCKET_SHIFT)


@compiled
def bucket_rows(state: I64, holder: Int, tier: Int, bucket: Int, out: U64) -> Int:
    """Write the holder's keys of one bucket to `out` while there is room; return how many."""
    slots, entries, rows = u32_array(state, SLOTS), u64_array(state, ENTRIES), bitmap_rows(state)
    homes = slots.shape[0] // BUCKET_WORDS
    first = bucket * homes // BUCKETS
    last = (bucket + 1) * homes // BUCKETS
    bit = _1 << np.uint64(tier)
    wanted = np.uint64(bucket)
    found = 0
    at = first * BUCKET_WORDS
    for step in range(homes):
        used = occupied(slots, at)
        while used != _0:
            place = np.int64(slots[at + PLACES + lowest_bit(used)])
            used &= used - _1
            key = entries[2 * place]
            if mixed(key) >> _SHIFT != wanted:
                continue
            if tier_bits(rows, entries[2 * place + 1], holder) & bit != _0:
                if found < out.shape[0]:
                    out[found] = key
                found += 1
        if first + step >= last and slots[at + PASSED] == 0:
            break
        at = next_bucket(slots, at)
    return found
