"""Inner loop over one bucket of the memory index's table (see `emberkv_proto.buckets`).

A slot's home grows with the same product that its bucket is the high byte of, so a bucket's slots
lie between two places, and in the run of full slots after them that they may have been pushed into.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emberkv_proto.buckets import BUCKET_SHIFT, BUCKETS
from global_index.jit import U64, Int, Word, compiled, u64
from global_index.kernels import STAMP, place_of, tier_bits

_0, _1 = u64(0), u64(1)
_SHIFT = u64(BUCKET_SHIFT)


def _bucket_rows(stamp: int) -> Callable[..., Int]:
    """The kernel, for one state of kernels.py."""

    @compiled
    def bucket_rows(
        slots: U64, entries: U64, rows: U64, holder: Int, tier: Int, bucket: Word, out: U64
    ) -> Int:
        """Write the holder's keys of one bucket to `out` while there is room; return how many."""
        count = slots.shape[0]
        first = (np.int64(bucket) * count) // BUCKETS
        last = ((np.int64(bucket) + 1) * count) // BUCKETS
        bit = _1 << np.uint64(tier)
        found = 0 * stamp
        slot = first
        for step in range(count):
            word = slots[slot]
            if word == _0:
                if first + step >= last:
                    break
            elif word >> _SHIFT == bucket:
                place = place_of(word)
                if tier_bits(rows, entries[2 * place + 1], holder) & bit != _0:
                    if found < out.shape[0]:
                        out[found] = entries[2 * place]
                    found += 1
            slot += 1
            if slot == count:
                slot = 0
        return found

    return bucket_rows


bucket_rows = _bucket_rows(STAMP)
