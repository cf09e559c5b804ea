"""Operators' pins: blocks that eviction and reclaim must leave where they are. Pure: no clock.

A soft pin ends at a given time, a hard pin when it is taken back; what hard pins keep is bounded
in bytes. A pin is no lease: it gives no right to read, and corruption ends it with its block, as
everything does that takes the block out of every tier. Soft pins end with the daemon; hard ones
are written down by the caller (`local_index`) and laid anew at the next start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emberkv_proto.types import BlockHash
from store_daemon.block import PINNED, Block


class PinBook:
    """All pins of the node. Each call is O(blocks it is given), unless it says otherwise.

    Args:
        limit_bytes: most that hard pins may keep; a block counts with all its parts as slots,
            wherever it is. May be changed: a lower limit ends no pin.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hard_bytes = 0
        self._hard: dict[BlockHash, Block] = {}
        self._soft: dict[BlockHash, tuple[Block, float]] = {}
        self._next_end = float("inf")
        """No soft pin ends before."""

    def __len__(self) -> int:
        return len(self._hard) + len(self._soft)

    def covers(self, block_hash: BlockHash) -> bool:
        """Whether a block is pinned. Safe from any thread: the SSD tier asks when it reclaims."""
        return block_hash in self._hard or block_hash in self._soft

    def is_hard(self, block: Block) -> bool:
        return block.hash in self._hard

    @property
    def hard(self) -> Mapping[BlockHash, Block]:
        return self._hard

    @property
    def soft(self) -> Mapping[BlockHash, tuple[Block, float]]:
        """The soft pins and when they end."""
        return self._soft

    def that_fit(self, blocks: Iterable[Block]) -> list[Block]:
        """The leading blocks that can be under a hard pin together."""
        room = self.limit_bytes - self.hard_bytes
        fitting: list[Block] = []
        for block in blocks:
            if block.hash not in self._hard:
                room -= block.namespace.slot_bytes
                if room < 0:
                    break
            fitting.append(block)
        return fitting

    def pin_hard(self, blocks: Iterable[Block]) -> None:
        """Keep blocks until they are unpinned. The caller gives only what fits."""
        for block in blocks:
            if block.hash not in self._hard:
                self._soft.pop(block.hash, None)
                self._hard[block.hash] = block
                self.hard_bytes += block.namespace.slot_bytes
                block.stays |= PINNED

    def pin_soft(self, blocks: Iterable[Block], until: float) -> None:
        """Keep blocks until that time, or longer where a longer pin lies on them already."""
        for block in blocks:
            if block.hash in self._hard:
                continue
            _, earlier = self._soft.get(block.hash, (block, until))
            self._soft[block.hash] = (block, max(until, earlier))
            block.stays |= PINNED
        self._next_end = min(self._next_end, until)

    def unpin(self, blocks: Iterable[Block]) -> list[Block]:
        """End the pins on these blocks; return those that had one."""
        return [block for block in blocks if self._end(block)]

    def expire(self, now: float) -> list[Block]:
        """End the soft pins whose time is over. O(soft pins) when there is one, else O(1)."""
        if now < self._next_end:
            return []
        ended = [block for block, until in self._soft.values() if now >= until]
        for block in ended:
            self._end(block)
        self._next_end = min((until for _, until in self._soft.values()), default=float("inf"))
        return ended

    def check_integrity(self, blocks: Mapping[BlockHash, Block]) -> None:
        """Assert that exactly the pinned blocks are marked so, and that the bytes add up.

        Args:
            blocks: all that the catalog holds.
        """
        pinned = {**self._hard, **{h: block for h, (block, _) in self._soft.items()}}
        assert len(pinned) == len(self), "a pin is hard and soft"
        marked = {block_hash for block_hash, block in blocks.items() if block.stays & PINNED}
        assert marked == set(pinned), "pins and marks on blocks differ"
        for block_hash, block in pinned.items():
            assert blocks.get(block_hash) is block, "a pin on a block that is gone"
        kept = sum(block.namespace.slot_bytes for block in self._hard.values())
        assert kept == self.hard_bytes, f"hard pins keep {kept} bytes, not {self.hard_bytes}"
        assert all(until >= self._next_end for _, until in self._soft.values())

    def _end(self, block: Block) -> bool:
        if self._hard.pop(block.hash, None) is not None:
            self.hard_bytes -= block.namespace.slot_bytes
        elif self._soft.pop(block.hash, None) is None:
            return False
        block.stays &= ~PINNED
        return True
