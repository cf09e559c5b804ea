"""When a block gets its SSD copy, and what becomes of victims and of writes that fail."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from emberkv_proto.types import AcquirePolicy, BlockHash, SaltId, StageState, Tier
from store_daemon import catalog, promotion, store
from store_daemon.block import Block, StoredNamespace
from store_daemon.departures import UNWRITTEN_SECONDS
from store_daemon.retries import LONGEST_PAUSE_SECONDS, MOST_ATTEMPTS, RETRY_BLOCKS, Retries
from store_daemon.tenants import Quota
from store_daemon.tiers import drive, open_segment
from tests.helpers.store import SmallStore, chain, small_namespace

SPACE = small_namespace(5000)
SLOT, RECORD = 8192, 8192 + 4096
SLOTS = 42
"""Of the pool: 6 extents of 7."""
ANN = SaltId(b"a" * 16)
Make = Callable[..., SmallStore]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SmallStore] = []

    def make(writeback: str, ssd_segments: int = 24) -> SmallStore:
        made.append(SmallStore(tmp_path, writeback=writeback, ssd_segments=ssd_segments))
        return made[-1]

    yield make
    for small in made:
        if not small.is_closed:
            small.check_integrity()
            await small.close()


def places(small: SmallStore, hashes: list[BlockHash]) -> str:
    """d: in DRAM, s: on SSD, b: both, -: nowhere."""
    blocks = [small.store.holdings.catalog.blocks.get(h) for h in hashes]
    return "".join(
        "-" if block is None else "b" if block.in_dram and block.in_ssd else "ds"[not block.in_dram]
        for block in blocks
    )


async def test_on_commit_evicts_blocks_that_are_written_before_those_that_wait(
    make: Make,
) -> None:
    small = make("on_commit")
    session = small.open(SPACE)
    waiting, written = chain(SPACE, 1, 1), chain(SPACE, SLOTS - 1, 2)
    small.put(session, waiting)
    small.put(session, written)
    await small.flush()
    holdings, writeback = small.store.holdings, small.store.writeback
    assert writeback is not None
    block = holdings.catalog.blocks[waiting[0]]
    holdings.lose_ssd(block)
    holdings.publish()
    assert writeback.offer(block)
    assert places(small, waiting + written) == "d" + "b" * (SLOTS - 1)
    small.put(session, chain(SPACE, 3, 3))
    small.check_integrity()
    assert places(small, waiting) == "d"  # the oldest of all, but it would be gone
    assert places(small, written) == "b" * (SLOTS - 4) + "sss"
    assert small.store.holdings.counters["evicted_blocks"] == 0
    await small.flush()
    small.put(session, chain(SPACE, 1, 4))
    assert places(small, waiting) == "s"


async def test_on_commit_never_refuses_room_because_the_drive_is_slow(make: Make) -> None:
    small = make("on_commit")
    session = small.open(SPACE)
    small.put(session, chain(SPACE, SLOTS, 1))
    assert small.put(session, chain(SPACE, 20, 2)) == 20
    counters = small.store.holdings.counters
    assert (counters["evicted_blocks"], counters["staged_no_space"]) == (20, 0)
    assert counters["unwritten_victims_lost"] == 20


async def test_on_evict_writes_a_victim_before_it_leaves_dram(make: Make) -> None:
    small = make("on_evict")
    session = small.open(SPACE)
    hashes = chain(SPACE, SLOTS, 1)
    small.put(session, hashes)
    await small.flush()
    assert places(small, hashes) == "d" * SLOTS
    # The pool is full of what is not written: this call gets nothing, and orders the writes.
    staged = small.store.stage(session, chain(SPACE, 4, 2), None)
    assert staged.states == bytes([StageState.NO_SPACE] * 4)
    small.check_integrity()
    await small.flush()
    assert places(small, hashes) == "d" * (SLOTS - 32) + "b" * 32
    assert small.put(session, chain(SPACE, 4, 2)) == 4
    assert places(small, hashes) == "d" * (SLOTS - 32) + "b" * 28 + "ssss"
    assert small.store.holdings.counters["evicted_blocks"] == 0


async def test_on_evict_a_victim_that_cannot_be_written_in_time_leaves_all_the_same(
    make: Make,
) -> None:
    small = make("on_evict")
    session = small.open(SPACE)
    small.put(session, chain(SPACE, SLOTS, 1))
    assert small.put(session, chain(SPACE, 1, 2)) == 0
    small.clock.now += UNWRITTEN_SECONDS - 0.1
    assert small.put(session, chain(SPACE, 1, 2)) == 0
    small.clock.now += 0.1
    assert small.put(session, chain(SPACE, 1, 2)) == 1
    counters = small.store.holdings.counters
    assert (counters["evicted_blocks"], counters["unwritten_victims_lost"]) == (1, 1)


async def test_on_evict_does_not_wait_for_a_drive_that_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make("on_evict")
    session = small.open(SPACE)
    small.put(session, chain(SPACE, SLOTS, 1))
    assert small.ssd is not None
    monkeypatch.setattr(small.ssd._writer, "usable_drives", list)
    assert small.put(session, chain(SPACE, 5, 2)) == 5
    assert small.store.holdings.counters["evicted_blocks"] == 5


async def test_on_evict_a_victim_that_is_read_meanwhile_stays(make: Make) -> None:
    small = make("on_evict")
    session = small.open(SPACE)
    hashes = chain(SPACE, SLOTS, 1)
    small.put(session, hashes)
    small.put(session, chain(SPACE, 1, 2))
    lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 1.0)
    assert lease is not None
    assert lease.ready == SLOTS
    await small.flush()
    assert small.put(session, chain(SPACE, 1, 2)) == 0
    small.check_integrity()
    small.store.release(session, [lease.id])
    assert small.put(session, chain(SPACE, 1, 2)) == 1
    assert places(small, hashes)[-2:] == "bs"


async def test_trimming_orders_no_more_than_it_wants_to_free(make: Make) -> None:
    small = make("on_evict")
    session = small.open(SPACE)
    for seed in range(SLOTS):
        small.put(session, chain(SPACE, 1, seed))
    holdings = small.store.holdings
    assert holdings.trim() is False
    # Down to 0.9 of 42 slots: 37.8, so that 5 must go.
    assert len(holdings.departures) == 5
    assert holdings.departures.waiting_bytes == 5 * SLOT
    assert holdings.trim() is False
    assert len(holdings.departures) == 5
    await small.flush()
    assert len(holdings.departures) == 0
    holdings.trim()
    holdings.publish()
    assert holdings.pool.slots.used_bytes == (SLOTS - 5) * SLOT
    assert holdings.counters["demoted_blocks"] == 5


@pytest.mark.parametrize("mode", ["on_evict", "on_reuse"])
async def test_what_is_pinned_for_good_is_written_in_every_mode(make: Make, mode: str) -> None:
    small = make(mode)
    hashes = chain(SPACE, 4)
    small.put(small.open(SPACE), hashes)
    small.store.operations.pin(SPACE.id, hashes[:1], 30.0)
    await small.flush()
    assert places(small, hashes) == "dddd"
    small.store.operations.pin(SPACE.id, hashes[:3], None)
    await small.flush()
    assert places(small, hashes) == "bbbd"


async def test_on_reuse_writes_what_was_asked_for_again_and_nothing_else(make: Make) -> None:
    small = make("on_reuse")
    session = small.open(SPACE)
    once, twice = chain(SPACE, 3, 1), chain(SPACE, 3, 2)
    small.put(session, once)
    small.put(session, twice)
    lease = small.store.acquire(session, twice, AcquirePolicy.BEST_EFFORT, 1.0)
    assert lease is not None
    small.store.release(session, [lease.id])
    assert len(small.store.writeback or ()) == 0  # as one use: the ranks of one engine do that
    small.clock.now += 1.0
    lease = small.store.acquire(session, twice[:2], AcquirePolicy.BEST_EFFORT, 1.0)
    assert lease is not None
    small.store.release(session, [lease.id])
    await small.flush()
    assert places(small, once + twice) == "dddbbd"


async def test_a_failed_write_is_tried_again_and_clears_the_degraded_state(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make("on_commit")
    ssd, writeback, counters = small.ssd, small.store.writeback, small.store.holdings.counters
    assert ssd is not None
    assert writeback is not None

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(open_segment, "create_segment", no_space)
        patch.setattr(drive, "try_segment", no_space)
        hashes = chain(SPACE, 3)
        small.put(small.open(SPACE), hashes)
        await small.flush()
        assert ssd.state.startswith("degraded: ")
        assert (writeback.retrying, counters["writeback_failed_blocks"]) == (3, 3)
        for _ in range(10):  # many more failures than a block may have while the drive works
            small.clock.now += LONGEST_PAUSE_SECONDS
            small.store.tick()
            await small.flush()
            assert writeback.retrying == 3
    assert places(small, hashes) == "ddd"
    small.clock.now += LONGEST_PAUSE_SECONDS
    small.store.tick()
    await small.flush()
    assert (places(small, hashes), ssd.state, writeback.retrying) == ("bbb", "ok", 0)
    assert counters["writeback_retried_blocks"] == 33
    assert counters["writeback_given_up_blocks"] == 0


async def test_a_victim_of_a_quota_counts_once_when_it_goes(make: Make) -> None:
    small = make("on_evict")
    small.store.operations.set_quota(ANN, Quota(dram_bytes=4 * SLOT))
    session, counters = small.open(SPACE), small.store.holdings.counters
    assert small.put(session, chain(SPACE, 4), salt_id=ANN) == 4
    assert small.put(session, chain(SPACE, 1, 1), salt_id=ANN) == 0
    assert counters["over_quota_blocks"] == 0
    small.check_integrity()
    await small.flush()
    assert small.put(session, chain(SPACE, 1, 1), salt_id=ANN) == 1
    (usage,) = small.store.operations.usage()
    assert (usage.dram_bytes, usage.evicted_blocks) == (4 * SLOT, 1)
    assert (counters["over_quota_blocks"], counters["demoted_blocks"]) == (1, 1)


async def test_a_tenant_over_its_ssd_quota_loses_its_oldest_copies(make: Make) -> None:
    small = make("on_commit")
    session = small.open(SPACE)
    small.store.operations.set_quota(ANN, Quota(ssd_bytes=5 * RECORD))
    others, old, new = chain(SPACE, 3), chain(SPACE, 4, 1), chain(SPACE, 3, 2)
    small.put(session, others)
    small.put(session, old, salt_id=ANN)
    await small.flush()
    small.put(session, new, salt_id=ANN)
    await small.flush()
    assert places(small, others + old + new) == "bbb" + "bbdd" + "bbb"
    usage = small.store.operations.usage()[0]
    assert (usage.ssd_bytes, usage.evicted_blocks) == (5 * RECORD, 2)
    await small.store.operations.evict(Tier.DRAM, SPACE.id, old)
    assert places(small, old) == "ss--"


async def test_copies_that_nobody_used_since_a_restart_go_before_those_used(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_WOKEN", 2)
    small = make("on_commit")
    old = [chain(SPACE, 1, seed)[0] for seed in range(6)]
    session = small.open(SPACE)
    for block_hash in old:
        small.put(session, [block_hash], salt_id=ANN)
    await small.flush()
    await small.close()
    (tmp_path / "pool").unlink()
    small = make("on_commit")
    small.store.operations.set_quota(ANN, Quota(ssd_bytes=6 * RECORD))
    session = small.open(SPACE)
    lease = small.store.acquire(session, old[:1], AcquirePolicy.WAIT_COMPLETE, 10.0)
    assert lease is not None
    await small.store.wait(session, lease.id, 0, 10.0)
    small.store.release(session, [lease.id])
    new = [chain(SPACE, 1, seed)[0] for seed in range(10, 15)]
    for block_hash in new:
        small.put(session, [block_hash], salt_id=ANN)
        await small.flush()
        small.check_integrity()
    assert places(small, [old[0], *new]) == "b" * 6
    assert [small.store.holdings.catalog.find(session.own, h) for h in old[1:]] == [None] * 5


async def test_blocks_that_an_earlier_life_left_unwritten_are_checked_and_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "VERIFY_TURN_BLOCKS", 4)
    monkeypatch.setattr(store, "RECOVERED_A_TURN", 4)
    small = make("on_commit", ssd_segments=0)
    hashes = chain(SPACE, 10, 1)
    small.put(small.open(SPACE), hashes)
    await small.close()
    small = make("on_commit")
    catalog = small.store.holdings.catalog
    assert places(small, hashes) == "d" * 10
    assert not any(catalog.blocks[h].is_verified for h in hashes)
    small.store.start()
    deadline = time.monotonic() + 60
    while places(small, hashes) != "b" * 10 or not all(
        catalog.blocks[h].is_verified for h in hashes
    ):
        assert time.monotonic() < deadline, places(small, hashes)
        await asyncio.sleep(0.01)


async def test_a_block_that_fits_in_no_ssd_quota_stays_unwritten(make: Make) -> None:
    small = make("on_commit")
    session = small.open(SPACE)
    small.store.operations.set_quota(ANN, Quota(ssd_bytes=2 * RECORD))
    hashes = chain(SPACE, 4, 1)
    small.put(session, hashes[:2], salt_id=ANN)
    await small.flush()
    small.store.operations.pin(SPACE.id, hashes[:2], None)
    small.put(session, hashes[2:], hashes[1], salt_id=ANN)
    await small.flush()
    assert places(small, hashes) == "bbdd"
    assert small.store.holdings.counters["over_quota_unwritten_blocks"] == 2


def test_retries_double_their_pause_and_end_it_with_the_first_success() -> None:
    retries, blocks = Retries(100), some_blocks(40)
    for block in blocks:
        assert retries.failed(block, 0, True, now=0.0)
    assert retries.due(0.9) == {}
    first = retries.due(1.0)
    assert list(first) == blocks[:RETRY_BLOCKS]
    assert retries.due(2.9) == {}
    retries.worked(2.9)
    assert list(retries.due(2.9)) == blocks[RETRY_BLOCKS:]
    assert len(retries) == 0
    retries.check_integrity()


def test_a_block_that_fails_on_a_working_drive_is_given_up() -> None:
    retries, block = Retries(100), some_blocks(1)[0]
    attempts, now = 0, 0.0
    while retries.failed(block, attempts, False, now):
        now += 1000.0
        attempts = retries.due(now)[block]
    assert attempts == MOST_ATTEMPTS - 1
    full = Retries(0)
    assert not full.failed(block, 0, True, now)


def some_blocks(count: int) -> list[Block]:
    space = StoredNamespace.of(SPACE)
    return [Block(h, space, None, [None], [None]) for h in chain(SPACE, count)]
