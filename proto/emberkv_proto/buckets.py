"""Buckets of index keys: what daemon and index compare to repair only what differs.

A key's bucket is the high byte of the key times an odd constant. The memory index's table is
ordered by the same product, so a bucket's rows lie together there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkv_proto.events import Keys

BUCKETS = 256
MOST_REPAIRED = BUCKETS // 4
"""Of one tier; when more differ, a snapshot is the better repair."""
BUCKET_SHIFT = 56
KEY_MIX = 0x9E3779B97F4A7C15

_MIX = np.uint64(KEY_MIX)
_SHIFT = np.uint64(BUCKET_SHIFT)


def bucket_numbers(keys: Keys) -> npt.NDArray[np.uint64]:
    """The bucket of each key, 0..255. O(keys), in C."""
    numbers: npt.NDArray[np.uint64] = (keys * _MIX) >> _SHIFT
    return numbers


def xor_into(xors: Keys, keys: Keys) -> None:
    """Toggle `keys` in the XORs of their buckets: the same call adds and removes. O(keys), in C."""
    np.bitwise_xor.at(xors, bucket_numbers(keys).astype(np.intp), keys)
