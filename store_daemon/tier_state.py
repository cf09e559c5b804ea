"""A tier as operators and the index see it."""

from __future__ import annotations

from dataclasses import dataclass

from emberkv_proto.types import Tier, TierDigest
from store_daemon.holdings import Holdings
from store_daemon.tiers.ssd import SsdTier


@dataclass(frozen=True, slots=True)
class TierState:
    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    state: str

    def digest(self, xor: int) -> TierDigest:
        return TierDigest(self.tier, self.blocks, xor, self.capacity_bytes, self.used_bytes)


def tier_states(holdings: Holdings, ssd: SsdTier | None) -> tuple[TierState, ...]:
    """DRAM, then SSD."""
    slots = holdings.pool.slots
    return (
        TierState(
            Tier.DRAM,
            slots.extent_count * slots.extent_bytes,
            slots.used_bytes,
            holdings.blocks_of(Tier.DRAM),
            "ok",
        ),
        TierState(
            Tier.SSD,
            ssd.capacity_bytes if ssd is not None else 0,
            ssd.used_bytes if ssd is not None else 0,
            holdings.blocks_of(Tier.SSD),
            ssd.state if ssd is not None else "off",
        ),
    )
