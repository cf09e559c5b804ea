"""Which pulled blocks stay like our own, and how much room the others take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from emberkv_proto.hashing import checksum
from emberkv_proto.types import AcquirePolicy, BlockHash, Tier
from store_daemon.replicas import MAX_REMEMBERED, MOST_GONE, ReplicaLimits, Replicas
from store_daemon.staged_run import StagedRun
from tests.helpers.store import FakeClock, SmallStore, chain, payload, small_namespace

SPACE = small_namespace(part_bytes=15000)  # three blocks an extent of 64 KiB


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    store = SmallStore(tmp_path, clock=FakeClock())
    yield store
    store.check_integrity()
    await store.close()


def arrive(small: SmallStore, hashes: Sequence[BlockHash], parent: BlockHash | None = None) -> int:
    """What a pull does; the number of blocks for which there was room."""
    return land(small, small.store.replica_arrivals.allot(SPACE, parent, hashes), hashes)


def land(small: SmallStore, room: StagedRun, hashes: Sequence[BlockHash]) -> int:
    for number, places in enumerate(room.ranges):
        contents = [payload(hashes[number], p, r.length) for p, r in enumerate(places)]
        with small.pool.view() as view:
            for place, content in zip(places, contents, strict=True):
                view[place.offset : place.offset + place.length] = content
        room.land(number, [checksum(content) for content in contents])
    room.close()
    return len(room.ranges)


def set_limits(small: SmallStore, blocks: int, pulls: int = 2) -> None:
    slot = small.store.holdings.pool.slots
    small.store.holdings.replicas.limits = ReplicaLimits(blocks * 16384, pulls, 600.0)
    assert slot.total_bytes > blocks * 16384


def in_dram(small: SmallStore, hashes: Sequence[BlockHash]) -> list[bool]:
    blocks = small.store.holdings.catalog.blocks
    return [h in blocks and blocks[h].in_dram for h in hashes]


def on_ssd(small: SmallStore) -> int:
    return small.store.holdings.blocks_of(Tier.SSD)


def test_block_is_wanted_when_it_was_pulled_often_enough_within_the_time() -> None:
    clock = FakeClock()
    replicas = Replicas(ReplicaLimits(1 << 20, pulls_to_keep=3, memory_seconds=10.0), clock)
    block = BlockHash(bytes(32))
    assert [replicas.is_wanted(block) for _ in range(3)] == [False, False, True]
    clock.now += 10.1
    assert not replicas.is_wanted(block), "earlier pulls lie too far back"


def test_pulls_are_counted_of_a_bounded_number_of_blocks() -> None:
    replicas = Replicas(ReplicaLimits(1 << 20), FakeClock())
    for number in range(MAX_REMEMBERED + 1):
        replicas.is_wanted(BlockHash(number.to_bytes(32, "little")))
    replicas.check_integrity()
    assert not replicas.is_wanted(BlockHash(bytes(32))), "the oldest is forgotten"
    assert replicas.is_wanted(BlockHash((9).to_bytes(32, "little")))


async def test_block_pulled_once_is_served_and_gets_no_ssd_copy(small: SmallStore) -> None:
    set_limits(small, 8)
    hashes = chain(SPACE, 4)
    assert arrive(small, hashes) == 4
    assert all(in_dram(small, hashes))
    assert small.store.holdings.replicas.bytes == 4 * 16384
    small.put(small.open(SPACE), chain(SPACE, 2, seed=7))
    await small.flush()
    assert on_ssd(small) == 2
    assert not any(small.store.holdings.catalog.blocks[h].in_ssd for h in hashes)


async def test_block_that_is_used_again_here_becomes_our_own(small: SmallStore) -> None:
    set_limits(small, 8)
    hashes = chain(SPACE, 4)
    arrive(small, hashes)
    session = small.open(SPACE)
    small.clock.now += 2.0
    lease = small.store.acquire(session, hashes[:3], AcquirePolicy.BEST_EFFORT, 0.0)
    assert lease is not None
    small.store.release(session, [lease.id])
    await small.flush()
    assert on_ssd(small) == 3
    counters = small.store.holdings.counters
    assert counters["kept_replicas"] == 3
    assert small.store.holdings.replicas.bytes == 16384


async def test_prefix_that_is_pulled_again_is_kept(small: SmallStore) -> None:
    set_limits(small, 4)
    hot, other = chain(SPACE, 4), chain(SPACE, 4, seed=1)
    arrive(small, hot)
    arrive(small, other)  # more than the share: the first one goes
    assert in_dram(small, hot) == [False] * 4
    assert small.store.holdings.counters["shed_replicas"] == 4
    arrive(small, hot)
    assert small.store.holdings.counters["kept_replicas"] == 4
    for seed in range(2, 6):
        arrive(small, chain(SPACE, 4, seed=seed))
    assert all(in_dram(small, hot)), "it makes room for replicas no more"
    assert small.store.holdings.replicas.bytes <= 4 * 16384
    await small.flush()
    assert on_ssd(small) == 4


async def test_replicas_make_room_among_themselves_from_the_end_of_the_oldest_run(
    small: SmallStore,
) -> None:
    set_limits(small, 6)
    mine = chain(SPACE, 4, seed=9)
    small.put(small.open(SPACE), mine)
    first, second = chain(SPACE, 4), chain(SPACE, 3, seed=1)
    arrive(small, first)
    arrive(small, second)
    assert in_dram(small, first) == [True, True, True, False]
    assert all(in_dram(small, second))
    assert all(in_dram(small, mine)), "our own blocks made room for a replica"


async def test_run_in_several_windows_goes_from_its_end_too(small: SmallStore) -> None:
    set_limits(small, 6)
    hashes = chain(SPACE, 6)
    arrive(small, hashes[:3])
    arrive(small, hashes[3:], parent=hashes[2])
    arrive(small, chain(SPACE, 2, seed=1))
    assert in_dram(small, hashes) == [True] * 4 + [False] * 2


async def test_replicas_that_are_being_read_stay_and_go_when_they_can(small: SmallStore) -> None:
    set_limits(small, 4)
    hashes = chain(SPACE, 4)
    arrive(small, hashes)
    session = small.open(SPACE)
    lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 0.0)
    assert lease is not None
    arrive(small, chain(SPACE, 4, seed=1))
    assert all(in_dram(small, hashes))
    assert small.store.holdings.replicas.surplus_bytes == 4 * 16384
    small.store.release(session, [lease.id])
    small.store.tick()
    assert small.store.holdings.replicas.surplus_bytes == 0


async def test_run_that_lands_after_others_made_room_makes_room_too(small: SmallStore) -> None:
    set_limits(small, 3)
    held, slow = chain(SPACE, 2), chain(SPACE, 2, seed=1)
    arrive(small, held)
    session = small.open(SPACE)
    lease = small.store.acquire(session, held, AcquirePolicy.BEST_EFFORT, 0.0)
    assert lease is not None
    room = small.store.replica_arrivals.allot(SPACE, None, slow)
    arrive(small, chain(SPACE, 2, seed=2))
    land(small, room, slow)
    small.check_integrity()
    arrive(small, chain(SPACE, 2, seed=3))
    arrive(small, chain(SPACE, 2, seed=4))
    assert not any(in_dram(small, slow)), "nobody finds it any more"
    small.store.release(session, [lease.id])


async def test_blocks_that_left_by_other_ways_are_remembered_no_longer(small: SmallStore) -> None:
    small.put(small.open(SPACE), chain(SPACE, 4))
    blocks = list(small.store.holdings.catalog.blocks.values())
    replicas = Replicas(ReplicaLimits(1 << 30), FakeClock())
    for number in range(MOST_GONE):
        run = replicas.begin_run()
        for block in blocks[: number % 5]:
            replicas.add(run, block)
        replicas.check_integrity()
        for block in blocks:
            replicas.forget(block)
    assert len(replicas._runs) <= MOST_GONE // 2
    replicas.check_integrity()


async def test_what_arrives_from_a_followed_node_is_no_replica(small: SmallStore) -> None:
    room = small.store.arrivals.allot(SPACE, None, chain(SPACE, 1))
    content = payload(chain(SPACE, 1)[0], 0, 15000)
    with small.pool.view() as view:
        place = room.ranges[0][0]
        view[place.offset : place.offset + place.length] = content
    room.land(0, [checksum(content)])
    room.close()
    assert small.store.holdings.replicas.bytes == 0
    await small.flush()
    assert on_ssd(small) == 1
