"""Which block goes next: least recently used first, but never before its children. Pure.

The queue holds each candidate once, under the access number it had when it was queued. A touch
only raises the block's number; the queue notices at the front and moves it back then. So a touch
is O(1) and choosing a victim costs O(log n) for each block that was touched or evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emberkv_proto.types import NamespaceId
from store_daemon.catalog import Block, BlockCatalog
from store_daemon.tiers.slots import Extent, SizeClass


@dataclass(order=True, slots=True)
class _Entry:
    access: int
    serial: int
    block: Block


class EvictionQueue:
    """Candidates by namespace. `is_evictable` is asked again before a block is named."""

    def __init__(self) -> None:
        self._heaps: dict[NamespaceId, list[_Entry]] = {}
        self._serial = 0
        self._clock = 0

    def next_access(self) -> int:
        """A number larger than all before; blocks touched together share one."""
        self._clock += 1
        return self._clock

    def offer(self, block: Block) -> None:
        """Queue a block that has become a candidate."""
        assert not block.is_queued
        block.is_queued = True
        self._serial += 1
        entry = _Entry(block.access, self._serial, block)
        heapq.heappush(self._heaps.setdefault(block.namespace.id, []), entry)

    def oldest(
        self, namespace_id: NamespaceId, is_evictable: Callable[[Block], bool]
    ) -> Block | None:
        """The namespace's next victim. It stays queued; evicting it is the caller's."""
        heap = self._heaps.get(namespace_id, [])
        while heap:
            entry = heap[0]
            block = entry.block
            if not is_evictable(block):
                # It is offered again when its last pin, writer or child goes.
                heapq.heappop(heap).block.is_queued = False
            elif block.access != entry.access:
                self._serial += 1
                heapq.heapreplace(heap, _Entry(block.access, self._serial, block))
            else:
                return block
        return None

    def oldest_of_all(self, is_evictable: Callable[[Block], bool]) -> Block | None:
        """The next victim whatever its namespace. O(namespaces)."""
        found = (self.oldest(namespace_id, is_evictable) for namespace_id in self._heaps)
        return min((b for b in found if b is not None), key=lambda b: b.access, default=None)

    def check_integrity(self) -> None:
        """Assert that each candidate is queued once and marked so."""
        seen: set[int] = set()
        for heap in self._heaps.values():
            for entry in heap:
                assert entry.block.is_queued
                assert id(entry.block) not in seen, "a block is queued twice"
                assert entry.access <= entry.block.access
                seen.add(id(entry.block))


def choose_extent(
    extents: Iterable[Extent], wanted: SizeClass, catalog: BlockCatalog
) -> Extent | None:
    """The least recently used extent of another class whose blocks can all go at once.

    O(slots) of the extents examined; an extent is left at its first block that must stay.
    """
    best: Extent | None = None
    best_access = 0
    for extent in extents:
        if extent.size_class == wanted or len(extent.occupants) != extent.used_slots:
            continue
        if not _can_go_together(set(extent.occupants.values()), catalog):
            continue
        access = max(block.access for block in extent.occupants.values())
        if best is None or access < best_access:
            best, best_access = extent, access
    return best


def _can_go_together(blocks: set[Block], catalog: BlockCatalog) -> bool:
    if any(block.pins or block.writers for block in blocks):
        return False
    inside: dict[bytes, int] = {}
    for block in blocks:
        if block.leans and block.parent is not None:
            inside[block.parent] = inside.get(block.parent, 0) + 1
    return all(catalog.children(b.hash) == inside.get(b.hash, 0) for b in blocks)
