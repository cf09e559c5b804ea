"""Blocks of one copy: not too many at once, and none that a GPU's driver cannot copy in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from client_sdk.attached_pool import AttachedPool
from client_sdk.engine.vllm_connector.pages import Slots

PIECE_BYTES = 2 << 20
"""About what is saved between two looks whether the save is cancelled, which waits for no more;
and little enough to be still in the cache when its checksums are computed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours among the blocks that were asked for; `slots` are theirs."""

    blocks: Sequence[int]
    offsets: Sequence[int]
    """Where the blocks are in the pool."""
    slots: Slots
    """There, or beside the pool: see `fetch` and `store`."""
    is_beside: bool

    def fetch(self, pool: AttachedPool) -> None:
        """Have the slots' bytes where they are loaded from."""
        if self.is_beside:
            self.slots.memory[:] = self._in(pool)

    def store(self, pool: AttachedPool) -> None:
        """Have the bytes that were saved in the pool."""
        if self.is_beside:
            self._in(pool)[:] = self.slots.memory

    def _in(self, pool: AttachedPool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        (offset,) = self.offsets
        return pool.mapping.array[offset : offset + pool.part_bytes]


def pieces(
    pool: AttachedPool,
    blocks: Sequence[int],
    offsets: Sequence[int],
    is_split: Callable[[int], bool],
    most_blocks: int,
) -> Iterator[Piece]:
    """Cut blocks into pieces of at most `most_blocks`.

    Args:
        offsets: where the blocks are in the pool.
        is_split: whether what lies at an offset cannot be copied in place; it becomes a piece of
            its own, beside the pool.
    """
    begin = 0
    while begin < len(blocks):
        end = begin
        while end < len(blocks) and end - begin < most_blocks and not is_split(offsets[end]):
            end += 1
        is_beside = end == begin
        end = max(end, begin + 1)
        places = offsets[begin:end]
        slots = Slots(pool.mapping.array, places)
        if is_beside:
            slots = Slots(np.empty(pool.part_bytes, np.uint8), [0])
        yield Piece(blocks[begin:end], places, slots, is_beside)
        begin = end
