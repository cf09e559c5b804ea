"""Slots that an engine on another host writes: who may begin, and when they come back."""

from __future__ import annotations

import random

from emberkv_proto.types import NamespaceId
from store_daemon.placements import MAX_WRITES, Placement, Placements
from store_daemon.ports import PoolRange
from store_daemon.tiers.slots import SizeClass, Slot, SlotAllocator

SIZE_CLASS = SizeClass(NamespaceId(bytes(16)), 0, 3000)


def take(slots: SlotAllocator, count: int) -> list[Slot]:
    taken = []
    for _ in range(count):
        slot = slots.take(SIZE_CLASS)
        if slot is None:
            assert slots.carve(SIZE_CLASS) is not None
            slot = slots.take(SIZE_CLASS)
        assert slot is not None
        taken.append(slot)
    return taken


def test_only_what_a_stage_covers_is_written() -> None:
    table, (own, other) = Placements(), take(SlotAllocator(65536, 1), 2)
    table.allow(5, [own])
    for stage_id, offset, length in (
        (5, own.offset, 3001),
        (5, own.offset - 1, 2),
        (5, other.offset, 10),
        (6, own.offset, 10),
    ):
        assert table.begin(stage_id, [PoolRange(offset, length)], lambda: None) is None
    both = [PoolRange(own.offset, 10), PoolRange(other.offset, 10)]
    assert table.begin(5, both, lambda: None) is None
    write = table.begin(5, [PoolRange(own.offset, 3000)], lambda: None)
    assert write is not None
    write.end()
    assert table.withdraw(5, [own]) == [own]
    assert table.begin(5, [PoolRange(own.offset, 10)], lambda: None) is None
    table.check_integrity()


def test_slots_of_a_stage_that_ends_while_it_is_written_come_back_with_the_last_write() -> None:
    table, slots = Placements(), take(SlotAllocator(65536, 1), 3)
    table.allow(1, slots)
    aborted: list[int] = []
    writes = [
        table.begin(1, [PoolRange(slot.offset, 8)], lambda number=number: aborted.append(number))
        for number, slot in enumerate(slots[:2])
    ]
    assert table.is_written(1)
    assert table.withdraw(1, slots) == []
    assert aborted == [0, 1]
    assert table.kept_bytes == 3 * 3000
    for write in writes:
        assert table.settled() == []
        table.check_integrity()
        assert write is not None
        write.end()
    assert table.settled() == slots
    assert list(table) == []


def test_writes_at_once_are_bounded() -> None:
    table, (slot,) = Placements(), take(SlotAllocator(65536, 1), 1)
    table.allow(1, [slot])
    wanted = [PoolRange(slot.offset, 8)]
    writes = [table.begin(1, wanted, lambda: None) for _ in range(MAX_WRITES + 1)]
    assert writes.pop() is None
    for write in writes:
        assert write is not None
        write.end()
    assert table.begin(1, wanted, lambda: None) is not None


def test_no_slot_is_lost_or_given_back_twice_over_random_histories() -> None:
    for seed in range(50):
        random_history(random.Random(seed))


def random_history(chance: random.Random) -> None:
    table, allocator = Placements(), SlotAllocator(1 << 20, 1)
    stages: dict[int, list[Slot]] = {}
    writes: list[Placement] = []
    held = 0
    for stage_id in range(1, 60):
        match chance.randrange(4):
            case 0:
                stages[stage_id] = take(allocator, 2)
                held += 2
                table.allow(stage_id, stages[stage_id])
            case 1 if stages:
                known = chance.choice(list(stages))
                ranges = [PoolRange(slot.offset, 100) for slot in stages[known]]
                write = table.begin(known, ranges, lambda: None)
                assert write is not None
                writes.append(write)
            case 2 if writes:
                writes.pop(chance.randrange(len(writes))).end()
            case 3 if stages:
                known = chance.choice(list(stages))
                is_written = any(write.stage_id == known for write in writes)
                free = table.withdraw(known, stages.pop(known))
                assert bool(free) != is_written
                for slot in free:
                    allocator.give_back(slot)
                held -= len(free)
        for slot in table.settled():
            allocator.give_back(slot)
            held -= 1
        table.check_integrity()
        assert held == sum(map(len, stages.values())) + len(list(table))
    while writes:
        writes.pop().end()
    for slots in stages.values():
        held -= len(slots)
    assert held == len(table.settled())
