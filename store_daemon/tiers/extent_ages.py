"""Carved extents by the age of what lies in them, for whoever must empty one. Pure.

Each extent has a floor: something in it was accessed then, or later. Accesses only grow, so a floor
stays true until a slot is taken or given back, when it falls to 0. That costs who writes or frees
blocks next to nothing, and lets a search stop at the first floor above the best it has found. An
extent that had to stay remembers why, and is not searched again while that holds.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from store_daemon.tiers.slots import Extent, SizeClass

NEVER = 1 << 63
"""Later than any access."""

MOST_SPARE_ENTRIES = 64
"""Entries that count no more, beyond half of all, that are left for the front to find."""

_Entry = tuple[int, int, int, "Extent"]
"""Floor, order number and ticket; it counts only while the extent has that ticket."""


class Look(NamedTuple):
    """What was found in an extent."""

    youngest: int
    """The last access to anything in it, or a floor of that."""
    may_go: bool


class ExtentAges:
    """A heap for each size class."""

    def __init__(self) -> None:
        self._heaps: dict[SizeClass, list[_Entry]] = {}
        self._last = 0
        self._live: Counter[SizeClass] = Counter()

    def add(self, extent: Extent) -> None:
        """The extent was carved."""
        self._last += 1
        extent.order = self._last
        self._live[extent.size_class] += 1
        self._push(extent)

    def reset(self, extent: Extent) -> None:
        """A slot was taken or given back: nothing is known of the extent any more."""
        extent.is_searched = False
        extent.witness = None
        if extent.floor:
            extent.floor = 0
            self._push(extent)

    def retire(self, extent: Extent) -> None:
        """The extent went back to the stock; its entry goes when it is met."""
        extent.ticket = 0
        extent.witness = None
        self._live[extent.size_class] -= 1

    def oldest_but(
        self, wanted: SizeClass, look: Callable[[Extent, int], Look | None]
    ) -> Extent | None:
        """Of other classes' extents that may be emptied the one that was needed least lately.

        `look` gets an extent and the least access found so far; one that was needed later need not
        be searched. It gives None when nothing can be said now. Of equals, the one carved first.
        O(log n) for each extent that is looked at.
        """
        best: tuple[int, int, Extent] | None = None
        for size_class, heap in list(self._heaps.items()):
            if size_class == wanted:
                continue
            seen: list[Extent] = []
            while heap and (best is None or heap[0][0] <= best[0]):
                _, _, ticket, extent = heapq.heappop(heap)
                if extent.ticket != ticket:
                    continue  # retired, or queued anew
                seen.append(extent)
                found = look(extent, best[0] if best is not None else NEVER)
                if found is None:
                    continue
                extent.floor = found.youngest
                extent.is_searched = True
                if found.may_go and (best is None or (found.youngest, extent.order) < best[:2]):
                    best = (found.youngest, extent.order, extent)
            for extent in seen:
                self._push(extent)
            if not heap:
                del self._heaps[size_class], self._live[size_class]
        return best[2] if best is not None else None

    def check_integrity(self, extents: list[Extent]) -> None:
        """Assert that each carved extent is queued once, under a floor that holds."""
        queued = [
            extent
            for heap in self._heaps.values()
            for floor, _, ticket, extent in heap
            if extent.ticket == ticket and extent.floor == floor
        ]
        assert sorted(e.number for e in queued) == sorted(e.number for e in extents)
        for extent in extents:
            if len(extent.occupants) == extent.used_slots:
                assert extent.floor <= max(block.access for block in extent.occupants.values())

    def _push(self, extent: Extent) -> None:
        self._last += 1
        extent.ticket = self._last
        heap = self._heaps.setdefault(extent.size_class, [])
        heapq.heappush(heap, (extent.floor, extent.order, extent.ticket, extent))
        if len(heap) > 2 * self._live[extent.size_class] + MOST_SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[3].ticket == entry[2]]
            heapq.heapify(heap)
