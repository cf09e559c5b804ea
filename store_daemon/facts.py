"""What the store can tell of itself beyond its counters: measured speeds, and room in DRAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from store_daemon.bandwidth import ReadSpeed
from store_daemon.room import PoolRoom, free_slots, largest_free_bytes, measure_room
from store_daemon.store import BlockStore
from store_daemon.tiers.slots import SizeClass


@dataclass(frozen=True, slots=True)
class SourceSpeed:
    """How fast a source of blocks was lately. 0 when nothing came from it."""

    source: str
    bytes_per_second: float
    """Of one read, while others went on beside it."""
    read_seconds: float


def source_speeds(store: BlockStore, now: float) -> list[SourceSpeed]:
    """Of SSD and peers; `now` is the store's monotonic clock."""
    speeds: dict[str, ReadSpeed] = {
        "ssd": store.lender.promoter.speed,
        "peer": store.lender.pulls.speed,
    }
    return [
        SourceSpeed(name, speed.bytes_per_second(now) or 0.0, speed.read_seconds(now) or 0.0)
        for name, speed in speeds.items()
    ]


def room_bytes(room: PoolRoom) -> dict[str, int]:
    """The pool's bytes by what can become of them; they add up to its size."""
    return {
        "stock": room.stock_bytes,
        "free_slots": room.free_slot_bytes,
        "evictable": room.evictable_bytes,
        "held": room.held_bytes,
        "filling": room.filling_bytes,
        "resting": room.resting_bytes,
        "doomed": room.doomed_bytes,
        "overhead": room.overhead_bytes,
    }


def class_name(size_class: SizeClass) -> str:
    """For operators: the namespace's first digits, and the part."""
    return f"{size_class.namespace_id.hex()[:8]}_{size_class.part}"


def status_facts(store: BlockStore, now: float) -> Iterator[tuple[str, float]]:
    """Names and values for operators, beside the counters. O(blocks in DRAM)."""
    for speed in source_speeds(store, now):
        yield f"{speed.source}_read_bytes_per_second", speed.bytes_per_second
        yield f"{speed.source}_read_seconds", speed.read_seconds
    holdings = store.holdings
    slots = holdings.pool.slots
    classes = sorted(slots.classes())
    room = measure_room(slots, holdings.catalog, classes, store.limbo)
    if holdings.pool.huge_bytes is not None:
        yield "dram_huge_bytes", float(holdings.pool.huge_bytes)
    yield "dram_largest_free_bytes", float(largest_free_bytes(slots))
    yield "dram_departing_bytes", float(holdings.departures.waiting_bytes)
    for state, count in room_bytes(room).items():
        yield f"dram_{state}_bytes", float(count)
    for size_class in classes:
        name = class_name(size_class)
        yield f"dram_free_slots_{name}", float(free_slots(slots, size_class).now)
        yield f"dram_free_slots_{name}_evicting", float(room.slots_with_eviction[size_class])
