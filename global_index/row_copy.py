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

FILTER_BITS = 20
FILTER_MASK = np.uint64((1 << FILTER_BITS) - 1)
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
        self._seen[tier].append(_without_overlap(piece.keys, self._seen[tier]))
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
            keys = _each_once(keys)  # an entry that moved on was seen twice
            if _digest(tier, keys) == wanted:
                return keys
        self.rereads += 1
        keys = self._index.rows(self.holder, tier)
        assert _digest(tier, keys) == wanted, "rows differ from their digest"
        return keys


def _without_overlap(keys: Keys, seen: list[Keys]) -> Keys:
    """A piece without what the end of the one before has shown already: both are in slot order."""
    if not seen or not len(keys):
        return keys
    head = keys[: 2 * OVERLAP_SLOTS]
    is_new = ~np.isin(head, seen[-1][-OVERLAP_SLOTS:])
    return keys if is_new.all() else np.concatenate([head[is_new], keys[len(head) :]])


def _with_changes(seen: list[Keys], noted: list[BlocksStored | BlocksRemoved]) -> Keys:
    """The keys seen, without those that were removed last and with those that were stored last."""
    keys = np.concatenate([np.empty(0, np.uint64), *seen])
    if not noted:
        return keys
    changed = np.concatenate([event.keys for event in noted])[::-1]
    is_there = np.concatenate(
        [np.full(len(event.keys), isinstance(event, BlocksStored)) for event in noted]
    )[::-1]
    changed, last = np.unique(changed, return_index=True)
    stored = changed[is_there[last]]
    # Few are changed among many: who may be one of them is told by its low bits, in one pass.
    is_near = np.zeros(1 << FILTER_BITS, np.bool_)
    is_near[changed & FILTER_MASK] = True
    near = np.flatnonzero(is_near[keys & FILTER_MASK])
    gone = near[np.isin(keys[near], changed)]
    return np.concatenate([np.delete(keys, gone), stored[stored != 0]])


def _each_once(keys: Keys) -> Keys:
    """Sorted; several times faster than `np.unique`, which builds a hash table."""
    keys = np.sort(keys)
    is_new = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
    return keys[is_new]


def _digest(tier: Tier, keys: Keys) -> TierDigest:
    return TierDigest(tier, len(keys), int(np.bitwise_xor.reduce(keys)))
