"""What is claimed to be allocatable can be allocated; every byte of the pool is counted once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv_proto.types import Incarnation
from store_daemon.block import Block, StoredNamespace
from store_daemon.config import DramSection
from store_daemon.extents import choose_extent
from store_daemon.facts import room_bytes
from store_daemon.holdings import Holdings
from store_daemon.limbo import Limbo
from store_daemon.room import blocks_now, free_slots, largest_free_bytes, measure_room
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.slots import SizeClass, Slot
from tests.helpers.naive_extents import naive_choice
from tests.helpers.store import EventBook, FakeClock, chain, small_namespace

NAMESPACES = [
    StoredNamespace.of(small_namespace(5000)),
    StoredNamespace.of(small_namespace(13000, model="wide")),
    StoredNamespace.of(small_namespace(20000, groups=2, model="two")),
]
CLASSES = [size_class for namespace in NAMESPACES for size_class in namespace.size_classes]
CHAINS = [[chain(ns.namespace, 8, seed) for seed in range(3)] for ns in NAMESPACES]
EXTENT_BYTES = 65536


@dataclass
class Room:
    """Holdings over a small pool, and what the test does to them."""

    holdings: Holdings
    limbo: Limbo
    staged: list[tuple[Block, int, Slot]] = field(default_factory=list)
    pinned: list[Block] = field(default_factory=list)

    def put(self, ns: int, seed: int, start: int, count: int, keeps: int) -> None:
        """Stage a run of a chain; commit but for the last `keeps` parts, which stay staged."""
        namespace = NAMESPACES[ns]
        run = CHAINS[ns][seed][start : start + count]
        parent = CHAINS[ns][seed][start - 1] if start else None
        self.holdings.queue.next_access()
        for block_hash in run:
            if block_hash in self.holdings.catalog.blocks:
                parent = block_hash
                continue
            slots = self.holdings.take_all(namespace, range(namespace.parts))
            if slots is None:
                break
            for part, slot in slots.items():
                block = self.holdings.catalog.begin_part(namespace, block_hash, parent, part)
                self.staged.append((block, part, slot))
            parent = block_hash
        for block, part, slot in self.staged[: len(self.staged) - keeps]:
            self.holdings.commit_part(block, part, slot, 0)
        del self.staged[: len(self.staged) - keeps]
        self.holdings.publish()

    def cut_off(self) -> None:
        """The writer of the staged parts went away."""
        for block, part, slot in self.staged:
            self.holdings.abort_part(block, part)
            self.limbo.rest([slot], 1.0)
        self.staged.clear()
        self.holdings.publish()

    def block(self, ns: int, seed: int, number: int) -> Block | None:
        block = self.holdings.catalog.blocks.get(CHAINS[ns][seed][number])
        return block if block is not None and block.in_dram else None

    def pin(self, ns: int, seed: int, number: int) -> None:
        block = self.block(ns, seed, number)
        if block is not None:
            self.holdings.catalog.pin(block)
            self.pinned.append(block)

    def quarantine(self, ns: int, seed: int, number: int) -> None:
        block = self.block(ns, seed, number)
        if block is not None and not block.writers:
            self.holdings.quarantine(block)
            self.holdings.publish()

    def touch(self, ns: int, seed: int, count: int) -> None:
        found = self.holdings.catalog.usable_prefix(NAMESPACES[ns], CHAINS[ns][seed][:count])
        self.holdings.queue.touch(found)

    def unpin(self) -> None:
        if self.pinned:
            self.holdings.unpin([self.pinned.pop(0)])

    def check(self) -> None:
        self.holdings.check_integrity()
        self.limbo.check_integrity()

    def take_until_none(self, size_class: SizeClass) -> list[Slot]:
        taken: list[Slot] = []
        while (slot := self.holdings.take(size_class)) is not None:
            taken.append(slot)
        self.holdings.publish()
        return taken


@contextlib.contextmanager
def small_room(extents: int = 5) -> Iterator[Room]:
    with tempfile.TemporaryDirectory(prefix="ember-room-") as directory:
        config = DramSection(
            path=Path(directory) / "pool",
            capacity_bytes=extents * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            populate=False,
        )
        pool = Pool.open(config, "node", Incarnation(1), lambda size_class: False, bytes(16))
        holdings = Holdings(config, pool, FakeClock())
        holdings.sink = EventBook()
        try:
            yield Room(holdings, Limbo())
        finally:
            pool.close()


NS, SEED = st.integers(0, 2), st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), NS, SEED, st.integers(0, 6), st.integers(1, 8), st.integers(0, 2)
        ),
        st.tuples(st.just("pin"), NS, SEED, st.integers(0, 7)),
        st.tuples(st.just("quarantine"), NS, SEED, st.integers(0, 7)),
        st.tuples(st.just("touch"), NS, SEED, st.integers(1, 8)),
        st.tuples(st.just("unpin")),
        st.tuples(st.just("cut_off")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, wanted=st.sampled_from(CLASSES))
def test_what_is_claimed_can_be_taken_and_no_more(
    steps: list[tuple[str, int]], wanted: SizeClass
) -> None:
    with small_room() as room:
        holdings, slots = room.holdings, room.holdings.pool.slots
        for name, *args in steps:
            getattr(room, name)(*args)
            room.check()
            chosen = choose_extent(slots, wanted, holdings.catalog)
            assert chosen is naive_choice(slots, wanted, holdings.catalog)
        measured = measure_room(slots, holdings.catalog, CLASSES, room.limbo)
        assert sum(room_bytes(measured).values()) == slots.extent_count * EXTENT_BYTES
        assert min(room_bytes(measured).values()) >= 0
        free = free_slots(slots, wanted)
        largest = largest_free_bytes(slots)
        assert (free.now == 0) or largest >= wanted.payload_bytes

        evictions = holdings.counters["evicted_blocks"]
        taken = [holdings.take(wanted) for _ in range(free.now)]
        assert all(taken), "a free slot could not be taken"
        assert holdings.counters["evicted_blocks"] == evictions, "that took an eviction"
        rest = room.take_until_none(wanted)
        assert len(taken) + len(rest) == measured.slots_with_eviction[wanted]
        room.check()
        after = measure_room(slots, holdings.catalog, CLASSES, room.limbo)
        assert after.slots_with_eviction[wanted] == 0
        assert after.held_bytes == measured.held_bytes, "what is held went"
        holdings.give_back(slot for slot in [*taken, *rest] if slot is not None)
        room.check()


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, ns=NS)
def test_whole_blocks_are_counted_over_their_parts(steps: list[tuple[str, int]], ns: int) -> None:
    with small_room() as room:
        holdings, namespace = room.holdings, NAMESPACES[ns]
        for name, *args in steps:
            getattr(room, name)(*args)
        claimed = blocks_now(holdings.pool.slots, namespace)
        evictions = holdings.counters["evicted_blocks"]
        for _ in range(claimed):
            assert holdings.take_all(namespace, range(namespace.parts)) is not None
        assert holdings.counters["evicted_blocks"] == evictions
        assert blocks_now(holdings.pool.slots, namespace) == 0
        slots = holdings.take_all(namespace, range(namespace.parts))
        assert slots is None or holdings.counters["evicted_blocks"] > evictions


def test_free_bytes_say_why_they_are_not_to_be_had() -> None:
    """Half the pool is free, and none of it for the wide class."""
    with small_room(extents=2) as room:
        for seed in range(2):
            room.put(0, seed, 0, 7, 0)
        room.pin(0, 0, 0)
        room.pin(0, 1, 0)
        catalog, slots = room.holdings.catalog, room.holdings.pool.slots
        for seed in range(2):
            for number in range(6, 0, -1):
                room.holdings.evict(catalog.blocks[CHAINS[0][seed][number]])
        room.holdings.publish()
        measured = measure_room(slots, catalog, CLASSES, room.limbo)
        assert measured.free_slot_bytes == 12 * 8192
        assert (measured.stock_bytes, measured.evictable_bytes) == (0, 0)
        assert measured.slots_with_eviction[CLASSES[0]] == 12
        assert measured.slots_with_eviction[CLASSES[1]] == 0
        assert largest_free_bytes(slots) == 5000
        assert room.take_until_none(CLASSES[1]) == []
        room.unpin()
        measured = measure_room(slots, catalog, CLASSES, room.limbo)
        assert measured.slots_with_eviction[CLASSES[1]] == 3
        assert len(room.take_until_none(CLASSES[1])) == 3


def test_a_child_that_is_being_written_holds_its_parent() -> None:
    with small_room(extents=2) as room:
        room.put(0, 0, 0, 3, 0)
        room.put(0, 0, 3, 1, 1)
        measured = measure_room(
            room.holdings.pool.slots, room.holdings.catalog, CLASSES, room.limbo
        )
        assert (measured.held_bytes, measured.evictable_bytes) == (3 * 8192, 0)
        assert measured.filling_bytes == 8192
        room.cut_off()
        measured = measure_room(
            room.holdings.pool.slots, room.holdings.catalog, CLASSES, room.limbo
        )
        assert (measured.held_bytes, measured.evictable_bytes) == (0, 3 * 8192)
        assert (measured.filling_bytes, measured.resting_bytes) == (0, 8192)


def test_a_quarantined_block_waits_for_its_readers() -> None:
    with small_room(extents=2) as room:
        room.put(0, 0, 0, 2, 0)
        room.pin(0, 0, 1)
        room.quarantine(0, 0, 1)
        slots, catalog = room.holdings.pool.slots, room.holdings.catalog
        assert measure_room(slots, catalog, CLASSES, room.limbo).doomed_bytes == 8192
        room.unpin()
        assert measure_room(slots, catalog, CLASSES, room.limbo).doomed_bytes == 0
