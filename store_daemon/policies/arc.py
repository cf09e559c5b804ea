"""ARC (Megiddo and Modha, FAST 2003): recency against frequency, balanced by what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from store_daemon.policies.base import EvictionPolicy
from store_daemon.policies.ghosts import Ghosts

if TYPE_CHECKING:
    from store_daemon.block import Block

RECENT, FREQUENT = 0, 1


class ArcPolicy(EvictionPolicy):
    """RECENT holds blocks used once, FREQUENT those used again; both least recently used first.

    A block that comes back from RECENT's ghosts lets RECENT grow, one of FREQUENT's lets it shrink.
    The capacity is the most blocks that were in DRAM at once. As in the paper, RECENT and its
    ghosts are at most that many, and all ghosts too.
    """

    lanes = 2

    def __init__(self) -> None:
        self._sizes = [0, 0]
        self._capacity = 0
        self._ghosts = [Ghosts(), Ghosts()]
        self._recent_target = 0.0

    def entered(self, block: Block) -> None:
        recent, frequent = (len(ghosts) for ghosts in self._ghosts)
        block.lane = FREQUENT
        if self._ghosts[RECENT].take(block.hash):
            grown = self._recent_target + max(1.0, frequent / recent)
            self._recent_target = min(float(self._capacity), grown)
        elif self._ghosts[FREQUENT].take(block.hash):
            self._recent_target = max(0.0, self._recent_target - max(1.0, recent / frequent))
        else:
            block.lane = RECENT
        self._sizes[block.lane] += 1
        self._capacity = max(self._capacity, sum(self._sizes))

    def touched(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.lane == RECENT and block.uses:
                block.lane = FREQUENT
                self._sizes[RECENT] -= 1
                self._sizes[FREQUENT] += 1

    def left(self, block: Block) -> None:
        self._sizes[block.lane] -= 1
        self._ghosts[block.lane].add(block.hash)
        self._ghosts[RECENT].trim(self._capacity - self._sizes[RECENT])
        self._ghosts[FREQUENT].trim(self._capacity - len(self._ghosts[RECENT]))

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        recent, frequent = heads
        if recent is not None and (frequent is None or self._sizes[RECENT] > self._recent_target):
            return recent
        return frequent

    def check_integrity(self) -> None:
        assert min(self._sizes) >= 0
        assert sum(len(ghosts) for ghosts in self._ghosts) <= self._capacity
        assert 0.0 <= self._recent_target <= self._capacity
