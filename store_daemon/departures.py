"""Victims that stay in DRAM until their SSD copy is written. Pure: the clock is passed in.

A block chosen for eviction whose copy is on its way is put off, and others go meanwhile. Once
written it is a candidate again, and then leaves for SSD instead of for nowhere. How much may be put
off at a time is bounded, and so is how long one waits before it may go unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from store_daemon.block import UNWRITTEN, Block
from store_daemon.config import SsdSection

UNWRITTEN_SECONDS = 10.0
"""How long ssd.writeback: on_evict keeps a victim in DRAM that is not written yet."""


def patience_seconds(config: SsdSection) -> float:
    """In the other modes a victim goes unwritten as soon as there is no other."""
    return UNWRITTEN_SECONDS if config.writeback == "on_evict" else 0.0


class Departures:
    """Blocks that were put off, in the order in which they were to leave.

    Args:
        limit_bytes: no further block is put off once they take so much of DRAM. May be changed.
        patience_seconds: how long a block waits before it may leave unwritten, if there is need.
    """

    def __init__(self, limit_bytes: int, patience_seconds: float) -> None:
        self.waiting_bytes = 0
        self.limit_bytes = limit_bytes
        self._patience_seconds = patience_seconds
        self._waiting: dict[Block, tuple[float, int]] = {}
        """Since when, and its bytes then."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, block: Block) -> bool:
        return block in self._waiting

    @property
    def is_full(self) -> bool:
        return self.waiting_bytes >= max(self.limit_bytes, 1)

    @property
    def is_patient(self) -> bool:
        """Whether a block waits although there is need."""
        return self._patience_seconds > 0

    def put_off(self, block: Block, now: float) -> None:
        assert block not in self._waiting
        self._waiting[block] = (now, block.dram_bytes)
        self.waiting_bytes += block.dram_bytes
        block.stays |= UNWRITTEN

    def end(self, block: Block) -> bool:
        """The block waits no longer: written, given up, or gone. False if it did not wait."""
        entry = self._waiting.pop(block, None)
        if entry is None:
            return False
        self.waiting_bytes -= entry[1]
        block.stays &= ~UNWRITTEN
        return True

    def overdue(self, now: float, is_wanted: Callable[[Block], bool]) -> Block | None:
        """The first of the wanted blocks, if it has waited for as long as it should. O(waiting)."""
        for block, (since, _) in self._waiting.items():
            if now - since < self._patience_seconds:
                return None
            if is_wanted(block):
                return block
        return None

    def check_integrity(self, blocks: Iterable[Block]) -> None:
        """Assert that exactly the blocks put off are marked so, and that the bytes add up.

        Args:
            blocks: all that the catalog holds.
        """
        marked = {block for block in blocks if block.stays & UNWRITTEN}
        assert marked == set(self._waiting), "blocks put off and marks on blocks differ"
        assert self.waiting_bytes == sum(size for _, size in self._waiting.values())
        for block in self._waiting:
            assert any(block.slots), "a block that has left DRAM is put off"
