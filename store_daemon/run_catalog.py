"""The catalog's steps for many blocks at once, as a long prefix brings them. Pure.

Each does what the step for one block does, for each of them, without its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from emberkv_proto.types import BlockHash, Tier
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import BlockCatalog, Freed

if TYPE_CHECKING:
    from store_daemon.tiers.slots import Slot


class RunCatalog(BlockCatalog):
    """A catalog with steps of O(blocks) that cost little for each.

    Args:
        on_evictable, on_left, on_unlinked: as `BlockCatalog`'s.
        on_entered: as there, told of all blocks of a step together.
    """

    def __init__(
        self,
        on_evictable: Callable[[Block], None],
        on_entered: Callable[[Sequence[Block]], None],
        on_left: Callable[[Block], None],
        on_unlinked: Callable[[Block], None] = lambda block: None,
    ) -> None:
        super().__init__(on_evictable, lambda block: on_entered((block,)), on_left, on_unlinked)
        self._on_all_entered = on_entered

    def begin_run(
        self,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        part: int,
    ) -> list[Block]:
        """`begin_part` for each block of a chain run of which none exists; nobody's blocks."""
        blocks, children = self.blocks, self._children
        before = blocks.get(parent) if parent is not None else None
        root = before.depth + 1 if before is not None else 0
        turn = before.turn + (before.uses > 0) if before is not None else 0
        places, part_bit = [None] * namespace.parts, 1 << part
        begun: list[Block] = []
        for depth, block_hash in enumerate(hashes, root):
            block = Block(block_hash, namespace, parent, [*places], [*places])
            block.writers, block.takes_room = part_bit, True
            block.depth, block.turn = depth, turn
            blocks[block_hash] = block
            if block_hash in children:
                self._lean(block)  # it came after its child: this may close a ring
            elif parent != block_hash:
                block.leans = True
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
            begun.append(block)
            parent = block_hash
        self._on_all_entered(begun)
        return begun

    def commit_run(self, blocks: Sequence[Block], part: int, slots: Sequence[Slot]) -> None:
        """`commit_part` for each block of one namespace."""
        if not blocks or blocks[0].namespace.optional:
            for block, slot in zip(blocks, slots, strict=True):
                self.commit_part(block, part, slot)
            return
        resident: list[BlockHash] = []
        known, children, part_bit = self.blocks, self._children, 1 << part
        for block, slot in zip(blocks, slots, strict=True):
            assert block.writers & part_bit, "commit without begin"
            assert not block.is_doomed
            block.writers ^= part_bit
            places = block.slots
            places[part] = slot
            if not block.leans:
                self._lean(block)
            slot.extent.occupants[slot.number] = block
            if not block.in_dram and None not in places:
                block.in_dram = True
                resident.append(block.hash)
                parent = block.parent
                if parent is not None and parent not in known and not self._is_known(parent):
                    self.holes += 1
            if block.hash not in children:
                self._offer(block)
        self._book.stored(Tier.DRAM, resident)

    # ---- letting go ----

    def run_above(self, victim: Block, most: int) -> Iterator[Block]:
        """The victim, and those before it in its chain that may go as soon as it is gone.

        At most `most` blocks; none behind one that another block leans on, that is a tenant's, or
        another namespace's, as only a forged chain has one.
        """
        known, children = self.blocks, self._children
        block: Block | None = victim
        while block is not None and most > 0:
            yield block
            most -= 1
            parent = block.parent
            if parent is None or not block.leans or children[parent] > 1:
                return
            above = known.get(parent)
            if (
                above is None
                or above.namespace is not victim.namespace
                or above.pins
                or above.writers
                or above.stays
                or above.tenant is not None
                or not any(above.slots)
            ):
                return
            block = above

    def drop_run(self, run: Sequence[Block]) -> Freed:
        """`drop_dram` for a chain's end, last block first, on which nobody leans."""
        freed, gone = Freed(), []
        known, children = self.blocks, self._children
        for block in run:
            assert not block.pins
            assert not block.writers
            assert block.hash not in children
            for slot in block.slots:
                if slot is not None:
                    del slot.extent.occupants[slot.number]
                    freed.slots.append(slot)
            block.slots = [None] * len(block.slots)
            if block.in_dram:
                block.in_dram = False
                gone.append(block.hash)
            block.takes_room = False
            self._on_left(block)
            parent = block.parent
            if block.leans and parent is not None:
                left = children.pop(parent) - 1
                if left:
                    children[parent] = left
            block.leans = False
            if not any(block.rows):
                del known[block.hash]
        self._book.removed(Tier.DRAM, gone)
        parent = run[-1].parent
        if parent is not None and parent in known and parent not in children:
            self._offer(known[parent])
        return freed
