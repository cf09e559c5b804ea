"""A copy of one holder's rows that is right although it is taken in pieces.

Between two pieces events go on changing the rows. What they change is noted; the copy is the rows
that were seen, with the noted changes made to them once more in order. Entries move in the table
too (a removal shifts its neighbours, growth moves all), so the sum is compared with the index's own
digest; if it differs, the rows are read again in one go.
"""

from __future__ import annotations

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, Keys, TierCleared
from emberkv_proto.types import Tier, TierDigest
from global_index.index import BlockIndex, Holder

COPIED_TIERS = (Tier.DRAM, Tier.SSD)
PIECE_SLOTS = 1 << 17
"""Slots looked at in one step: about a millisecond."""

OVERLAP_SLOTS = 64
"""A step begins this far before the last one's end: a removal may have shifted entries back."""

MAX_NOTED_KEYS = 1 << 20
"""Changes beyond it are not noted any more; the rows are then read in one go."""


class RowsCopy:
    """One copy in the making. The owner of the index passes every event of the holder to it."""

    def __init__(self, index: BlockIndex, holder: Holder) -> None:
        self._index = index
        self.holder = holder
        self._seen: dict[Tier, list[Keys]] = {tier: [] for tier in COPIED_TIERS}
        self._noted: dict[Tier, list[BlocksStored | BlocksRemoved]] = {
            tier: [] for tier in COPIED_TIERS
        }
        self._noted_keys = 0
        self._left = list(COPIED_TIERS)
        self._next_slot = 0
        self.rereads = 0
        """Tiers that were read again in one go."""

    def note(self, event: Event) -> None:
        """An event was applied to the holder's rows."""
        if event.tier not in self._noted:
            return
        if isinstance(event, TierCleared):
            self._seen[event.tier].clear()
            self._noted_keys -= sum(len(noted.keys) for noted in self._noted[event.tier])
            self._noted[event.tier].clear()
        elif self._noted_keys <= MAX_NOTED_KEYS:
            self._noted[event.tier].append(event)
            self._noted_keys += len(event.keys)

    def step(self) -> bool:
        """Look at one piece of the table. False when all of it was seen."""
        if not self._left or self._noted_keys > MAX_NOTED_KEYS:
            return False
        tier = self._left[0]
        piece = self._index.collect(self.holder, tier, self._next_slot, PIECE_SLOTS)
        self._seen[tier].append(piece.keys)
        if piece.next_slot is None:
            self._left.pop(0)
            self._next_slot = 0
        else:
            self._next_slot = max(0, piece.next_slot - OVERLAP_SLOTS)
        return bool(self._left)

    def settle(self) -> dict[Tier, Keys]:
        """The holder's rows as they are at this moment. Waits for nothing; call it once."""
        return {tier: self._settled(tier) for tier in COPIED_TIERS}

    def _settled(self, tier: Tier) -> Keys:
        wanted = self._index.digest(self.holder, tier)
        if tier not in self._left and self._noted_keys <= MAX_NOTED_KEYS:
            keys = _with_changes(self._seen[tier], self._noted[tier])
            if _digest(tier, keys) == wanted:
                return keys
        self.rereads += 1
        keys = self._index.rows(self.holder, tier)
        assert _digest(tier, keys) == wanted, "rows differ from their digest"
        return keys


def _with_changes(seen: list[Keys], noted: list[BlocksStored | BlocksRemoved]) -> Keys:
    """The keys seen, without those that were removed last and with those that were stored last."""
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *seen]))
    if not noted:
        return keys
    changed = np.concatenate([event.keys for event in noted])[::-1]
    is_there = np.concatenate(
        [np.full(len(event.keys), isinstance(event, BlocksStored)) for event in noted]
    )[::-1]
    changed, last = np.unique(changed, return_index=True)
    stored = changed[is_there[last]]
    return np.union1d(np.setdiff1d(keys, changed, assume_unique=True), stored[stored != 0])


def _digest(tier: Tier, keys: Keys) -> TierDigest:
    return TierDigest(tier, len(keys), int(np.bitwise_xor.reduce(keys)))
