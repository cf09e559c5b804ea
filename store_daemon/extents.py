"""Which extent moves to another size class. Pure."""

from __future__ import annotations

from store_daemon.block import Block
from store_daemon.catalog import BlockCatalog
from store_daemon.tiers.slots import Extent, SizeClass, SlotAllocator


def choose_extent(slots: SlotAllocator, wanted: SizeClass, catalog: BlockCatalog) -> Extent | None:
    """The least recently used extent of another class whose blocks can all go at once."""

    def youngest_access(extent: Extent, least: int | None) -> int | None:
        if len(extent.occupants) != extent.used_slots:
            return None  # a slot is being written, or rests
        youngest = 0
        for block in extent.occupants.values():
            if block.pins or block.writers or block.stays:
                return None
            youngest = max(youngest, block.access)
            if least is not None and youngest > least:
                return None
        return youngest if _leaves_no_orphan(set(extent.occupants.values()), catalog) else None

    return slots.ages.oldest_but(wanted, youngest_access)


def _leaves_no_orphan(blocks: set[Block], catalog: BlockCatalog) -> bool:
    """Whether all their children are among them."""
    inside: dict[bytes, int] = {}
    for block in blocks:
        if block.leans and block.parent is not None:
            inside[block.parent] = inside.get(block.parent, 0) + 1
    return all(catalog.children(b.hash) == inside.get(b.hash, 0) for b in blocks)
