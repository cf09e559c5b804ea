"""The extent that moves, found by looking at all of them: the oracle for `choose_extent`."""

from __future__ import annotations

from store_daemon.block import Block
from store_daemon.catalog import BlockCatalog
from store_daemon.tiers.slots import Extent, SizeClass, SlotAllocator


def naive_choice(slots: SlotAllocator, wanted: SizeClass, catalog: BlockCatalog) -> Extent | None:
    best: Extent | None = None
    best_access = 0
    for extent in slots.extents():
        if extent.size_class == wanted or len(extent.occupants) != extent.used_slots:
            continue
        blocks = set(extent.occupants.values())
        if not _can_go_together(blocks, catalog):
            continue
        access = max(block.access for block in blocks)
        if best is None or access < best_access:
            best, best_access = extent, access
    return best


def _can_go_together(blocks: set[Block], catalog: BlockCatalog) -> bool:
    if any(block.pins or block.writers or block.stays for block in blocks):
        return False
    inside: dict[bytes, int] = {}
    for block in blocks:
        if block.leans and block.parent is not None:
            inside[block.parent] = inside.get(block.parent, 0) + 1
    return all(catalog.children(b.hash) == inside.get(b.hash, 0) for b in blocks)
