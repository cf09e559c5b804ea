"""Which buckets of a holder's rows differ from what its node says. A little in each turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from emberkv_proto.buckets import BUCKETS
from emberkv_proto.types import BucketChoice, BucketXors
from global_index.index import BlockIndex, Holder


class BucketComparison:
    """`step` until it returns False, then `choices`. The holder's rows must not change meanwhile.

    Other holders' may: a bucket is looked at in one go, whatever else moved in the table before.
    """

    def __init__(self, index: BlockIndex, holder: Holder, theirs: Sequence[BucketXors]) -> None:
        self._index = index
        self._holder = holder
        self._theirs = theirs
        self._steps = self._compare()
        self.choices: tuple[BucketChoice, ...] = ()
        """Tiers with their buckets that differ; only those with any."""

    def step(self) -> bool:
        """Look at some more; False when all has been looked at. Milliseconds at most."""
        return next(self._steps, None) is not None

    def _compare(self) -> Iterator[int]:
        at_once = self._index.buckets_at_once
        for digest in self._theirs:
            theirs = np.array(digest.xors, np.uint64)
            differing: list[int] = []
            for first in range(0, BUCKETS, at_once):
                count = min(at_once, BUCKETS - first)
                ours = self._index.bucket_xors(self._holder, digest.tier, first, count)
                found = np.flatnonzero(ours != theirs[first : first + count]) + first
                differing += found.tolist()
                yield first
            if differing:
                self.choices += (BucketChoice(digest.tier, tuple(differing)),)
