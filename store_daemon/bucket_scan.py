"""The contents of some buckets, gathered over many turns of the loop while blocks come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from emberkv_proto.buckets import BUCKETS, bucket_numbers
from emberkv_proto.events import BlocksStored, Event, Keys, TierCleared
from emberkv_proto.types import BucketChoice, Tier

ScanKeys = Callable[[Tier], Iterator[Keys]]
"""A tier's keys, a few at a time, each read when it is yielded (see `ports.Residency`)."""


class BucketScan:
    """Give it every event from its making on, and `step` until that returns False.

    What it has gathered is then the state right after the last event: a key that was looked at is
    as it was at that moment and as later events left it; one that was not is as events left it, or
    is looked at yet.
    """

    def __init__(self, choices: Sequence[BucketChoice], scan_keys: ScanKeys) -> None:
        self._keys = {
            choice.tier: {bucket: set[int]() for bucket in choice.buckets} for choice in choices
        }
        self._chosen = {choice.tier: _mask(choice) for choice in choices}
        self._pages = ((choice.tier, keys) for choice in choices for keys in scan_keys(choice.tier))

    def step(self) -> bool:
        """Look at the next few keys; False when none are left."""
        page = next(self._pages, None)
        if page is None:
            return False
        self._add(*page)
        return True

    def enter(self, event: Event) -> None:
        """An event that has just happened."""
        if event.tier not in self._keys:
            return
        match event:
            case BlocksStored(tier, keys):
                self._add(tier, keys)
            case TierCleared(tier):
                for held in self._keys[tier].values():
                    held.clear()
            case _:
                held_by = self._keys[event.tier]
                for key, bucket in self._select(event.tier, event.keys):
                    held_by[bucket].discard(key)

    def keys(self, tier: Tier, bucket: int) -> Keys:
        """What was gathered, ascending."""
        held = self._keys[tier][bucket]
        return np.sort(np.fromiter(held, np.uint64, len(held)))

    def _add(self, tier: Tier, keys: Keys) -> None:
        held_by = self._keys[tier]
        for key, bucket in self._select(tier, keys):
            held_by[bucket].add(key)

    def _select(self, tier: Tier, keys: Keys) -> Iterator[tuple[int, int]]:
        """Keys of chosen buckets, and their buckets."""
        numbers = bucket_numbers(keys)
        is_chosen = self._chosen[tier][numbers]
        return zip(keys[is_chosen].tolist(), numbers[is_chosen].tolist(), strict=True)


def _mask(choice: BucketChoice) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(BUCKETS, np.bool_)
    mask[list(choice.buckets)] = True
    return mask
