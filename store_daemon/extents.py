"""Which extent moves to another size class. Pure."""

from __future__ import annotations

from emberkv_proto.types import BlockHash
from store_daemon.block import Block
from store_daemon.catalog import BlockCatalog
from store_daemon.tiers.extent_ages import Look
from store_daemon.tiers.slots import Extent, SizeClass, SlotAllocator, Witness


def choose_extent(slots: SlotAllocator, wanted: SizeClass, catalog: BlockCatalog) -> Extent | None:
    """The least recently used extent of another class whose blocks can all go at once."""

    def look(extent: Extent, least: int) -> Look | None:
        if len(extent.occupants) != extent.used_slots:
            return None  # a slot is being written, or rests
        witness = extent.witness
        if witness is not None and _must_stay(witness.block, witness.inside, catalog):
            return Look(extent.floor, may_go=False)
        blocks = set(extent.occupants.values())
        youngest = max([block.access for block in blocks])
        if youngest > least:
            return Look(youngest, may_go=False)
        extent.witness = _find_witness(blocks, catalog)
        return Look(youngest, may_go=extent.witness is None)

    return slots.ages.oldest_but(wanted, look)


def _find_witness(blocks: set[Block], catalog: BlockCatalog) -> Witness | None:
    """A block of these that must stay, whatever the others do."""
    inside: dict[BlockHash | None, int] = {}
    for block in blocks:
        if block.leans:
            inside[block.parent] = inside.get(block.parent, 0) + 1
    for block in blocks:
        if _must_stay(block, inside.get(block.hash, 0), catalog):
            return Witness(block, inside.get(block.hash, 0))
    return None


def _must_stay(block: Block, children_inside: int, catalog: BlockCatalog) -> bool:
    """Whether somebody holds the block, or a child that lies elsewhere would be orphaned."""
    return bool(
        block.pins or block.writers or block.stays or catalog.children(block.hash) > children_inside
    )
