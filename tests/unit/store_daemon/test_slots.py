from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NamespaceId
from store_daemon.tiers.slots import SizeClass, Slot, SlotAllocator

CLASSES = [SizeClass(NamespaceId(bytes([n]) * 16), 0, 3000 * (n + 1)) for n in range(3)]


def take(slots: SlotAllocator, size_class: SizeClass) -> Slot | None:
    slot = slots.take(size_class)
    if slot is None and slots.carve(size_class) is not None:
        slot = slots.take(size_class)
    return slot


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=120))
def test_slots_never_overlap_and_books_balance(steps: list[tuple[int, bool]]) -> None:
    slots = SlotAllocator(65536, 3)
    held: list[Slot] = []
    for number, is_take in steps:
        if is_take:
            slot = take(slots, CLASSES[number])
            if slot is not None:
                held.append(slot)
        elif held:
            slots.give_back(held.pop(number % len(held)))
        slots.check_integrity()
        ranges = sorted((s.offset, s.offset + s.payload_bytes) for s in held)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert all(s.offset % 4096 == 0 for s in held)
    for slot in held:
        slots.give_back(slot)
    assert slots.used_bytes == 0
    assert list(slots.extents()) == [], "empty extents return to the stock"


def test_room_moves_to_another_class_when_an_extent_empties() -> None:
    slots = SlotAllocator(65536, 1)
    slot = take(slots, CLASSES[0])
    assert slot is not None
    assert take(slots, CLASSES[1]) is None
    slots.give_back(slot)
    assert take(slots, CLASSES[1]) is not None


def test_a_part_that_no_extent_can_hold_is_refused_with_the_fix() -> None:
    slots = SlotAllocator(65536, 1)
    with pytest.raises(InvalidRequestError, match=r"raise dram.extent_bytes"):
        slots.check_fits(SizeClass(NamespaceId(bytes(16)), 0, 65536))
