"""Inner loops over one bucket of the memory index's table (see `emberkv_proto.buckets`).

A key's home grows with the same product that its bucket is the high byte of, so a bucket's rows lie
between two slots, and in the run of full slots after them that they may have been pushed into.
"""

from __future__ import annotations

import numpy as np

from emberkv_proto.buckets import BUCKET_SHIFT, BUCKETS, KEY_MIX
from global_index.kernels import U64, Int, Word, _compiled, tier_bits

_0, _1 = np.uint64(0), np.uint64(1)
_MIX = np.uint64(KEY_MIX)
_SHIFT = np.uint64(BUCKET_SHIFT)


@_compiled
def bucket_rows(table: U64, rows: U64, holder: Int, tier: Int, bucket: Word, out: U64) -> Int:
    """Write the holder's keys of one bucket to `out` while there is room; return how many."""
    slots = table.shape[0] >> 1
    first = (np.int64(bucket) * slots) // BUCKETS
    last = ((np.int64(bucket) + 1) * slots) // BUCKETS
    bit = _1 << np.uint64(tier)
    found = 0
    slot = first
    for step in range(slots):
        key = table[2 * slot]
        if key == _0:
            if first + step >= last:
                break
        elif (key * _MIX) >> _SHIFT == bucket and (
            tier_bits(rows, table[2 * slot + 1], holder) & bit != _0
        ):
            if found < out.shape[0]:
                out[found] = key
            found += 1
        slot += 1
        if slot == slots:
            slot = 0
    return found
