"""What became resident and ceased to be: the events to tell, and each tier's books. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, Keys
from emberkv_proto.hashing import index_keys, xor_of
from emberkv_proto.types import BlockHash, Tier

STORED_TIERS = (Tier.DRAM, Tier.SSD)


@dataclass(slots=True)
class TierLedger:
    """A tier's conservation books: stored - removed == blocks, and xor over their index keys.

    `xor` stands where `ResidencyBook.drain` was last called, so it always agrees with the events.
    """

    blocks: int = 0
    xor: int = 0
    stored: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class _Change:
    """Neighbouring changes of one kind."""

    kind: type[BlocksStored | BlocksRemoved]
    tier: Tier
    hashes: list[BlockHash] | Keys
    """Index keys where there were too many blocks for an object each."""

    @property
    def keys(self) -> Keys:
        return index_keys(self.hashes) if isinstance(self.hashes, list) else self.hashes


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """An event, and the blocks that it names; None where there were too many for a hash each."""

    event: Event
    hashes: list[BlockHash] | None


class ResidencyBook:
    """All calls are O(1) for each hash."""

    def __init__(self) -> None:
        self.ledgers = {tier: TierLedger() for tier in STORED_TIERS}
        self._changes: list[_Change] = []

    def stored(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        ledger = self.ledgers[tier]
        ledger.blocks += len(hashes)
        ledger.stored += len(hashes)
        self._note(BlocksStored, tier, hashes)

    def stored_keys(self, tier: Tier, keys: Keys) -> None:
        """`stored` for blocks named by their index keys."""
        ledger = self.ledgers[tier]
        ledger.blocks += len(keys)
        ledger.stored += len(keys)
        self._changes.append(_Change(BlocksStored, tier, keys))

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        ledger = self.ledgers[tier]
        ledger.blocks -= len(hashes)
        ledger.removed += len(hashes)
        self._note(BlocksRemoved, tier, hashes)

    def drain(self) -> list[Told]:
        """The changes since the last call, in order, neighbours of one kind as one event."""
        changes, self._changes = self._changes, []
        told: list[Told] = []
        for change in changes:
            keys = change.keys
            self.ledgers[change.tier].xor ^= xor_of(keys)
            hashes = change.hashes if isinstance(change.hashes, list) else None
            told.append(Told(change.kind(change.tier, keys), hashes))
        return told

    def check(self, tier: Tier, resident: Keys) -> None:
        """Assert that the tier's books say just what is resident. O(blocks)."""
        ledger, blocks, xor = self.ledgers[tier], len(resident), _xor(resident)
        for change in self._changes:
            if change.tier is tier:
                xor ^= _xor(change.keys)
        assert ledger.blocks == blocks, f"{tier.name}: {ledger.blocks} != {blocks}"
        assert ledger.stored - ledger.removed == ledger.blocks, f"{tier.name}: not conserved"
        assert ledger.xor == xor, f"{tier.name}: digest drifted"

    def _note(
        self,
        kind: type[BlocksStored | BlocksRemoved],
        tier: Tier,
        hashes: Sequence[BlockHash],
    ) -> None:
        if not hashes:
            return
        last = self._changes[-1] if self._changes else None
        if (
            last is not None
            and last.kind is kind
            and last.tier is tier
            and isinstance(last.hashes, list)
        ):
            last.hashes.extend(hashes)
        else:
            self._changes.append(_Change(kind, tier, [*hashes]))


def _xor(keys: Keys) -> int:
    return int(np.bitwise_xor.reduce(keys))
