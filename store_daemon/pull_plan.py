"""Which peer gives which blocks: by how long each would take, DRAM before SSD. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberkv_proto.types import NodeHit


@dataclass(frozen=True, slots=True)
class Owner:
    """A peer that may be asked for the leading blocks of a run."""

    hit: NodeHit
    bytes_per_second: float
    """As measured lately, or assumed."""
    asked_bytes: int = 0
    """What this node has asked it for already and not got."""


@dataclass(frozen=True, slots=True)
class PullCosts:
    """What the plan counts with beside measured speeds."""

    ssd_bytes_per_second: float = 1e9
    """How fast an owner's drive is taken to bring a block to its DRAM, before the block travels."""
    setup_seconds: float = 0.003
    """Of each further owner: asking the index, and a lease."""


def choose_owner(owners: Sequence[Owner], block_bytes: int, costs: PullCosts) -> Owner | None:
    """Whom to ask first; the rest of the run is planned anew when its blocks have come.

    The one with whom the longest run that anybody has is complete soonest, where what lies beyond
    an owner's blocks comes from the owner of the longest run. So a peer that has less of it, but in
    DRAM, goes before one that has all on SSD, if that is faster; and of equals the least busy one.
    """
    holding = [owner for owner in owners if owner.hit.hit_blocks]
    if not holding:
        return None
    longest = max(
        holding,
        key=lambda o: (o.hit.hit_blocks, -_block_seconds(o, block_bytes, costs), -o.asked_bytes),
    )
    run = longest.hit.hit_blocks
    beyond_seconds = _block_seconds(longest, block_bytes, costs)

    def complete_after(owner: Owner) -> float:
        blocks = owner.hit.hit_blocks
        seconds = owner.asked_bytes / owner.bytes_per_second
        seconds += blocks * _block_seconds(owner, block_bytes, costs)
        if blocks < run:
            seconds += costs.setup_seconds + (run - blocks) * beyond_seconds
        return seconds

    return min(holding, key=lambda owner: (complete_after(owner), -owner.hit.hit_blocks))


def _block_seconds(owner: Owner, block_bytes: int, costs: PullCosts) -> float:
    """How long a block of this owner's takes on average, while nothing else is asked of it."""
    on_ssd = owner.hit.hit_blocks - min(owner.hit.dram_blocks, owner.hit.hit_blocks)
    from_ssd = on_ssd / owner.hit.hit_blocks / costs.ssd_bytes_per_second
    return block_bytes * (1 / owner.bytes_per_second + from_ssd)
