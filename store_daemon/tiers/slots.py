"""Which slot of which extent is free. Pure: the pool file is `pool`'s to write.

An extent is carved for one size class (namespace, part) and returns to the common stock when its
last slot is given back, so room moves between classes by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.shm_layout import (
    EXTENT_HEADER_BYTES,
    POOL_HEADER_BYTES,
    SLOT_HEADER_BYTES,
    align_up,
    slots_offset,
    slots_per_extent,
)
from emberkv_proto.types import NamespaceId
from store_daemon.tiers.extent_ages import ExtentAges

if TYPE_CHECKING:
    from store_daemon.block import Block


class SizeClass(NamedTuple):
    """Blocks' parts that are interchangeable in size and never share an extent with others.

    A key of the allocator, looked up for each slot: a tuple hashes at a tenth of the cost.
    """

    namespace_id: NamespaceId
    part: int
    payload_bytes: int

    @property
    def slot_bytes(self) -> int:
        return align_up(self.payload_bytes)


class Witness(NamedTuple):
    """A block for which its extent cannot be emptied."""

    block: Block
    inside: int
    """How many of its children lie in the same extent."""


@dataclass(eq=False, slots=True)
class Extent:
    """A carved extent. `occupants` names the blocks whose committed parts lie in it."""

    number: int
    size_class: SizeClass
    slot_count: int
    generation: int
    base: int
    """Offset of the extent in the pool file."""
    free: list[int]
    occupants: dict[int, Block] = field(default_factory=dict)
    floor: int = 0
    order: int = 0
    ticket: int = 0
    witness: Witness | None = None
    is_searched: bool = False
    """All five are `ExtentAges`'s. The witness is why it had to stay when it was last searched."""
    slot_bytes: int = field(init=False)
    headers_offset: int = field(init=False)
    payloads_offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.slot_bytes = self.size_class.slot_bytes
        self.headers_offset = self.base + EXTENT_HEADER_BYTES
        self.payloads_offset = self.base + slots_offset(self.slot_count)

    @property
    def used_slots(self) -> int:
        return self.slot_count - len(self.free)


@dataclass(eq=False, slots=True)
class Slot:
    """One part's place. `offset` is where the payload begins in the pool file."""

    extent: Extent
    number: int
    offset: int
    checksum: int = 0

    @property
    def payload_bytes(self) -> int:
        return self.extent.size_class.payload_bytes

    @property
    def header_offset(self) -> int:
        return self.extent.headers_offset + self.number * SLOT_HEADER_BYTES


class SlotAllocator:
    """Slots over extents. O(1) per call."""

    def __init__(self, extent_bytes: int, extent_count: int) -> None:
        self.extent_bytes = extent_bytes
        self.extent_count = extent_count
        self._stock = list(range(extent_count - 1, -1, -1))
        self._extents: dict[int, Extent] = {}
        self._open: dict[SizeClass, dict[int, Extent]] = {}
        self._carved_bytes = 0
        self.ages = ExtentAges()
        self.used_bytes = 0
        self.generation = 0

    @property
    def total_bytes(self) -> int:
        """Of all extents, headers and remainders included."""
        return self.extent_count * self.extent_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slots can take as the extents are carved now."""
        return self._carved_bytes + len(self._stock) * self.extent_bytes

    @property
    def usage(self) -> float:
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 1.0

    @property
    def stock_extents(self) -> int:
        """Extents that are carved for no class."""
        return len(self._stock)

    @property
    def largest_payload(self) -> int:
        """The longest part that fits an extent. O(log n)."""
        low, high = 0, self.extent_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if slots_per_extent(self.extent_bytes, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def free_slots(self, size_class: SizeClass) -> int:
        """Of the class's extents. O(those that are not full)."""
        return sum(len(extent.free) for extent in self._open.get(size_class, {}).values())

    @property
    def free_slot_bytes(self) -> int:
        """In carved extents. O(extents that are not full)."""
        return sum(
            len(extent.free) * extent.slot_bytes
            for extents in self._open.values()
            for extent in extents.values()
        )

    def open_classes(self) -> list[SizeClass]:
        """Those that have free slots."""
        return [size_class for size_class, extents in self._open.items() if extents]

    def classes(self) -> set[SizeClass]:
        """Those that have extents. O(extents)."""
        return {extent.size_class for extent in self._extents.values()}

    def extents(self) -> Iterator[Extent]:
        yield from self._extents.values()

    def has_extent_of(self, size_class: SizeClass) -> bool:
        return any(e.size_class == size_class for e in self._extents.values())

    def check_fits(self, size_class: SizeClass) -> None:
        """Raises InvalidRequestError when no extent can hold even one such slot."""
        if slots_per_extent(self.extent_bytes, size_class.payload_bytes) == 0:
            raise InvalidRequestError(
                f"a part of {size_class.payload_bytes} bytes does not fit an extent of"
                f" {self.extent_bytes}; raise dram.extent_bytes"
            )

    def take(self, size_class: SizeClass) -> Slot | None:
        """A free slot of an extent already carved for the class."""
        extents = self._open.get(size_class)
        if not extents:
            return None
        extent = next(iter(extents.values()))
        return self._take_from(extent, extent.free.pop())

    def take_run(self, size_class: SizeClass, count: int) -> list[Slot]:
        """Up to `count` free slots of extents already carved, neighbours as far as there are."""
        taken: list[Slot] = []
        extents = self._open.get(size_class)
        while extents and len(taken) < count:
            extent = next(iter(extents.values()))
            first = max(0, len(extent.free) - (count - len(taken)))
            numbers = sorted(extent.free[first:])
            del extent.free[first:]
            if not extent.free:
                del extents[extent.number]
            if extent.is_searched:
                self.ages.reset(extent)
            base, step = extent.payloads_offset, extent.slot_bytes
            self.used_bytes += len(numbers) * step
            taken += [Slot(extent, number, base + number * step) for number in numbers]
        return taken

    def carve(self, size_class: SizeClass) -> Extent | None:
        """Give an extent of the stock to the class. Its headers are the caller's to write."""
        if not self._stock:
            return None
        self.generation += 1
        return self._carve(self._stock.pop(), size_class, self.generation)

    def adopt(self, number: int, size_class: SizeClass, generation: int) -> Extent:
        """Take an extent over as an earlier daemon carved it; all its slots count as free."""
        self._stock.remove(number)
        self.generation = max(self.generation, generation)
        return self._carve(number, size_class, generation)

    def take_numbers(self, extent: Extent, numbers: Sequence[int]) -> list[Slot]:
        """Take certain free slots of an adopted extent. O(its slots)."""
        wanted = set(numbers)
        free = [number for number in extent.free if number not in wanted]
        assert len(extent.free) - len(free) == len(numbers), "a slot that is not free is taken"
        extent.free = free
        if not free:
            self._open[extent.size_class].pop(extent.number, None)
        size, first = extent.slot_bytes, extent.payloads_offset
        self.used_bytes += size * len(numbers)
        return [Slot(extent, number, first + number * size) for number in numbers]

    def give_back(self, slot: Slot) -> None:
        extent = slot.extent
        assert slot.number not in extent.occupants, "a slot is unlinked before it is freed"
        free = extent.free
        free.append(slot.number)
        self.used_bytes -= extent.slot_bytes
        if len(free) == extent.slot_count:
            self.retire(extent)
            return
        if extent.is_searched:
            self.ages.reset(extent)
        if len(free) == 1:
            self._open[extent.size_class][extent.number] = extent

    def give_back_run(self, run: Sequence[Slot]) -> None:
        """`give_back` for some slots of one extent."""
        extent = run[0].extent
        free, was_full = extent.free, not extent.free
        numbers = [slot.number for slot in run]
        assert extent.occupants.keys().isdisjoint(numbers), "a slot is unlinked before it is freed"
        free += reversed(numbers)  # so that the next ones taken, from the end, are neighbours too
        self.used_bytes -= len(numbers) * extent.slot_bytes
        if len(free) == extent.slot_count:
            self.retire(extent)
            return
        if extent.is_searched:
            self.ages.reset(extent)
        if was_full:
            self._open[extent.size_class][extent.number] = extent

    def retire(self, extent: Extent) -> None:
        """Return an extent without used slots to the stock."""
        assert extent.used_slots == 0
        self._open[extent.size_class].pop(extent.number, None)
        del self._extents[extent.number]
        self._carved_bytes -= extent.slot_count * extent.slot_bytes
        self.ages.retire(extent)
        self._stock.append(extent.number)

    def check_integrity(self) -> None:
        """Assert that every extent is in the stock or carved, and that counters agree."""
        assert sorted([*self._stock, *self._extents]) == list(range(self.extent_count))
        self.ages.check_integrity([*self._extents.values()])
        used = carved = 0
        for extent in self._extents.values():
            assert len(set(extent.free)) == len(extent.free), "a slot is free twice"
            assert not set(extent.free) & set(extent.occupants), "an occupied slot is free"
            assert (extent.number in self._open[extent.size_class]) == bool(extent.free)
            used += extent.used_slots * extent.slot_bytes
            carved += extent.slot_count * extent.slot_bytes
        assert used == self.used_bytes, f"used {self.used_bytes} != {used}"
        assert carved == self._carved_bytes, f"carved {self._carved_bytes} != {carved}"

    def _carve(self, number: int, size_class: SizeClass, generation: int) -> Extent:
        count = slots_per_extent(self.extent_bytes, size_class.payload_bytes)
        assert count > 0, "check_fits() comes first"
        base = POOL_HEADER_BYTES + number * self.extent_bytes
        free = list(range(count - 1, -1, -1))
        extent = Extent(number, size_class, count, generation, base, free)
        self._extents[number] = extent
        self._open.setdefault(size_class, {})[number] = extent
        self._carved_bytes += count * size_class.slot_bytes
        self.ages.add(extent)
        return extent

    def _take_from(self, extent: Extent, number: int) -> Slot:
        if not extent.free:
            del self._open[extent.size_class][extent.number]
        if extent.is_searched:
            self.ages.reset(extent)
        self.used_bytes += extent.slot_bytes
        return Slot(extent, number, extent.payloads_offset + number * extent.slot_bytes)
