"""Carved extents by the age of what lies in them, for whoever must empty one. Pure.

Each extent has a floor: no block in it was accessed before. Accesses only grow and blocks only
leave, so a floor stays true until a slot is taken, when it falls to 0. That costs the writers of
blocks next to nothing, and lets a search stop at the first floor above the best it has found.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store_daemon.tiers.slots import Extent, SizeClass

RETIRED = -1

_Entry = tuple[int, int, "Extent"]
"""Floor and order number; counts only while the extent has that floor."""


class ExtentAges:
    """A heap for each size class."""

    def __init__(self) -> None:
        self._heaps: dict[SizeClass, list[_Entry]] = {}
        self._last = 0

    def add(self, extent: Extent) -> None:
        """The extent was carved."""
        self._last += 1
        extent.order = self._last
        self.reset(extent)

    def reset(self, extent: Extent) -> None:
        """A slot was taken: the block that comes may be of any age."""
        extent.floor = 0
        self._push(extent)

    def retire(self, extent: Extent) -> None:
        """The extent went back to the stock; its entry goes when it is met."""
        extent.floor = RETIRED

    def oldest_but(
        self, wanted: SizeClass, youngest_access: Callable[[Extent, int | None], int | None]
    ) -> Extent | None:
        """Of other classes' extents that may be emptied the one that was needed least lately.

        `youngest_access` gets an extent and the least found so far (None: nothing yet); it says
        when the extent was needed last, or None when it must stay or was needed later than that.
        Of equals, the one carved first. O(log n) for each extent that is looked at.
        """
        best: tuple[int, int, Extent] | None = None
        for size_class, heap in list(self._heaps.items()):
            if size_class == wanted:
                continue
            seen: list[Extent] = []
            while heap and (best is None or heap[0][0] <= best[0]):
                floor, _, extent = heapq.heappop(heap)
                if extent.floor != floor:
                    continue  # retired, or queued anew
                access = youngest_access(extent, best[0] if best is not None else None)
                if access is not None and (best is None or (access, extent.order) < best[:2]):
                    best = (access, extent.order, extent)
                seen.append(extent)
            for extent in seen:
                if len(extent.occupants) == extent.used_slots:
                    extent.floor = min(block.access for block in extent.occupants.values())
                self._push(extent)
            if not heap:
                del self._heaps[size_class]
        return best[2] if best is not None else None

    def check_integrity(self, extents: list[Extent]) -> None:
        """Assert that each carved extent is queued once, under a floor that holds."""
        queued = [
            extent
            for heap in self._heaps.values()
            for floor, _, extent in heap
            if extent.floor == floor
        ]
        assert sorted(e.number for e in queued) == sorted(e.number for e in extents)
        for extent in extents:
            assert all(extent.floor <= block.access for block in extent.occupants.values())

    def _push(self, extent: Extent) -> None:
        heap = self._heaps.setdefault(extent.size_class, [])
        heapq.heappush(heap, (extent.floor, extent.order, extent))
