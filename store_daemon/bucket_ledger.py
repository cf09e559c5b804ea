"""What the events of each tier add up to, bucket by bucket. Pure."""

from __future__ import annotations

import numpy as np

from emberkv_proto.buckets import BUCKETS, xor_into
from emberkv_proto.events import Event, Keys, TierCleared
from emberkv_proto.types import BucketXors, Tier

FOLD_KEYS = 8192
FOLD_EVENTS = 1024
"""So much waits to be added up: a commit of a few blocks costs next to nothing here."""


class BucketLedger:
    """XOR of the keys of each bucket right after the last event entered.

    `enter` is O(1) for small events and some 20 ns a key in the end; `xors` adds up what waits:
    O(FOLD_KEYS), in C.
    """

    def __init__(self) -> None:
        self._xors: dict[Tier, Keys] = {}
        self._waiting: dict[Tier, list[Keys]] = {}
        self._waiting_keys = 0
        self._waiting_events = 0

    def enter(self, event: Event) -> None:
        if isinstance(event, TierCleared):
            self._waiting.pop(event.tier, None)
            self._xors.pop(event.tier, None)
            return
        # Storing a key and removing it are the same toggle.
        self._waiting.setdefault(event.tier, []).append(event.keys)
        self._waiting_events += 1
        self._waiting_keys += len(event.keys)
        if self._waiting_keys >= FOLD_KEYS or self._waiting_events >= FOLD_EVENTS:
            self._fold()

    def xors(self, tier: Tier) -> BucketXors:
        self._fold()
        found = self._xors.get(tier)
        return BucketXors(tier, (0,) * BUCKETS if found is None else tuple(found.tolist()))

    def check(self, tier: Tier, resident: Keys) -> None:
        """Assert that the buckets add up to just these keys. O(keys)."""
        xors = np.zeros(BUCKETS, np.uint64)
        xor_into(xors, resident)
        assert self.xors(tier).xors == tuple(xors.tolist()), f"{tier.name}: a bucket drifted"

    def _fold(self) -> None:
        for tier, waiting in self._waiting.items():
            xors = self._xors.setdefault(tier, np.zeros(BUCKETS, np.uint64))
            xor_into(xors, np.concatenate(waiting))
        self._waiting.clear()
        self._waiting_keys = self._waiting_events = 0
