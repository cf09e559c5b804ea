"""S3-FIFO (Yang et al., SOSP 2023): a small queue filters out what is asked for only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from store_daemon.policies.base import EvictionPolicy
from store_daemon.policies.ghosts import Ghosts

if TYPE_CHECKING:
    from store_daemon.block import Block

SMALL, MAIN = 0, 1
SMALL_SHARE = 0.1
MOST_USES = 3
PROMOTE_USES = 2
"""Uses in the small queue, after the first, that earn a place in the main one."""


class S3FifoPolicy(EvictionPolicy):
    """New blocks enter SMALL; those used again, or remembered as a ghost, go to MAIN.

    MAIN gives a used block another round for each use, at most three. Ghosts are at most as many
    as the blocks that were in DRAM at once.
    """

    lanes = 2

    def __init__(self) -> None:
        self._sizes = [0, 0]
        self._capacity = 0
        self._ghosts = Ghosts()
        self._position = 0
        self._access = -1

    def entered(self, block: Block) -> None:
        block.lane = MAIN if self._ghosts.take(block.hash) else SMALL
        # Blocks that enter together share one place: their chain came as one.
        if block.access != self._access:
            self._access = block.access
            self._position += 1
        block.rank = self._position
        self._sizes[block.lane] += 1
        self._capacity = max(self._capacity, sum(self._sizes))

    def left(self, block: Block) -> None:
        self._sizes[block.lane] -= 1
        if block.lane == SMALL:
            self._ghosts.add(block.hash)
            self._ghosts.trim(self._capacity)

    def order(self, block: Block) -> float:
        return block.rank

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        small, main = heads
        if small is not None and (main is None or self._is_small_full()):
            if small.uses < PROMOTE_USES:
                return small
            self._sizes[SMALL] -= 1
            self._sizes[MAIN] += 1
            small.lane = MAIN
            self._requeue(small)
            return None
        assert main is not None
        if main.uses:
            main.uses = min(main.uses, MOST_USES) - 1
            self._requeue(main)
            return None
        return main

    def check_integrity(self) -> None:
        assert min(self._sizes) >= 0
        assert len(self._ghosts) <= self._capacity

    def _is_small_full(self) -> bool:
        return self._sizes[SMALL] >= SMALL_SHARE * sum(self._sizes)

    def _requeue(self, block: Block) -> None:
        self._position += 1
        block.rank = self._position
