"""What of the DRAM pool can be allocated, and why the rest cannot. Pure.

For each size class: how many slots a writer of a new chain gets now, and how many when all goes
that may. A claim holds as long as nobody else takes or holds room meanwhile, and tenants' quotas
allow it. The bytes of the whole pool are each counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from emberkv_proto.shm_layout import slots_per_extent
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import BlockCatalog
from store_daemon.tiers.slots import SizeClass, Slot, SlotAllocator


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Slots of one size class that can be taken without evicting, one after the other."""

    size_class: SizeClass
    carved: int
    """In extents carved for this class; of no use to another."""
    now: int
    """Those, and what the stock can be carved into."""


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """Every byte of the extents, by what can become of it."""

    stock_bytes: int
    """In extents that any class may carve."""
    free_slot_bytes: int
    """Free slots of carved extents: for blocks of their own class only."""
    evictable_bytes: int
    """Slots of blocks that may go, leaf by leaf; some only once their SSD copy is written."""
    held_bytes: int
    """Slots of blocks that readers, moves or pins hold, and of their ancestors."""
    filling_bytes: int
    """Slots that sessions, moves or peers write."""
    resting_bytes: int
    """Slots that a writer who was cut off may still write; free when their rest is over."""
    doomed_bytes: int
    """Slots of unlinked blocks that wait for their last reader."""
    overhead_bytes: int
    """Headers, and what no whole slot fits in."""
    slots_with_eviction: dict[SizeClass, int]
    """Slots that can be taken when every block goes that nobody holds."""


def free_slots(slots: SlotAllocator, size_class: SizeClass) -> FreeSlots:
    """O(extents of the class that are not full)."""
    carved = slots.free_slots(size_class)
    fit = slots_per_extent(slots.extent_bytes, size_class.payload_bytes)
    return FreeSlots(size_class, carved, carved + slots.stock_extents * fit)


def largest_free_bytes(slots: SlotAllocator) -> int:
    """The longest payload that can be allocated without evicting. O(classes)."""
    if slots.stock_extents:
        return slots.largest_payload
    return max((size_class.payload_bytes for size_class in slots.open_classes()), default=0)


def measure_room(
    slots: SlotAllocator,
    catalog: BlockCatalog,
    size_classes: Iterable[SizeClass],
    resting: Iterable[Slot],
) -> PoolRoom:
    """Look at every extent and each block in DRAM. O(those); for operators, not for each call."""
    held = _held_blocks(slots, catalog)
    evictable: Counter[SizeClass] = Counter()
    whole: Counter[SizeClass] = Counter()
    free_bytes = evictable_bytes = held_bytes = used_bytes = overhead_bytes = 0
    for extent in slots.extents():
        going = sum(block not in held for block in extent.occupants.values())
        evictable[extent.size_class] += going
        whole[extent.size_class] += going == extent.used_slots
        free_bytes += len(extent.free) * extent.slot_bytes
        evictable_bytes += going * extent.slot_bytes
        held_bytes += (len(extent.occupants) - going) * extent.slot_bytes
        used_bytes += (extent.used_slots - len(extent.occupants)) * extent.slot_bytes
        overhead_bytes += slots.extent_bytes - extent.slot_count * extent.slot_bytes
    resting_bytes = sum(slot.extent.slot_bytes for slot in resting)
    doomed_bytes = sum(slot.extent.slot_bytes for slot in catalog.doomed_slots())
    with_eviction = {}
    for size_class in size_classes:
        fit = slots_per_extent(slots.extent_bytes, size_class.payload_bytes)
        others = whole.total() - whole[size_class]
        free = free_slots(slots, size_class)
        with_eviction[size_class] = free.now + evictable[size_class] + others * fit
    return PoolRoom(
        stock_bytes=slots.stock_extents * slots.extent_bytes,
        free_slot_bytes=free_bytes,
        evictable_bytes=evictable_bytes,
        held_bytes=held_bytes,
        filling_bytes=used_bytes - resting_bytes - doomed_bytes,
        resting_bytes=resting_bytes,
        doomed_bytes=doomed_bytes,
        overhead_bytes=overhead_bytes,
        slots_with_eviction=with_eviction,
    )


def blocks_now(slots: SlotAllocator, namespace: StoredNamespace) -> int:
    """How many whole blocks of a namespace can be allocated without evicting. O(parts log n)."""
    free = [slots.free_slots(size_class) for size_class in namespace.size_classes]
    each = [slots_per_extent(slots.extent_bytes, c.payload_bytes) for c in namespace.size_classes]

    def extents_for(blocks: int) -> int:
        lacking = (max(0, blocks - have) for have in free)
        return sum(-(-want // fit) for want, fit in zip(lacking, each, strict=True))

    low, high = 0, max(h + slots.stock_extents * fit for h, fit in zip(free, each, strict=True))
    while low < high:
        middle = (low + high + 1) // 2
        if extents_for(middle) <= slots.stock_extents:
            low = middle
        else:
            high = middle - 1
    return low


def _held_blocks(slots: SlotAllocator, catalog: BlockCatalog) -> set[Block]:
    """Blocks in DRAM that cannot go, whatever else goes first: those held, and their ancestors."""
    here = {block for extent in slots.extents() for block in extent.occupants.values()}
    children = Counter(block.parent for block in here if block.leans)
    held: set[Block] = set()
    for block in here:
        # A child that is not here is one being written.
        is_held = (
            block.pins
            or block.writers
            or block.stays
            or catalog.children(block.hash) > children[block.hash]
        )
        current: Block | None = block if is_held else None
        while current is not None and current not in held:
            held.add(current)
            parent = current.parent if current.leans else None
            current = catalog.blocks.get(parent) if parent is not None else None
    return held
