"""A lease over each way its blocks can come, ended in each way at each moment.

Whatever happens: an ended lease fails its reader, slots that a thread fills are nobody else's
until it is done, and in the end nothing is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from emberkv_proto.errors import LeaseExpiredError, UnknownLeaseError
from emberkv_proto.types import AcquirePolicy, Source, StageState
from store_daemon.leases import Lease
from store_daemon.sessions import Session
from tests.helpers.gated_peer import GatedPeer
from tests.helpers.gated_ssd import GatedReads, gated_reads
from tests.helpers.store import SmallStore, chain, small_namespace
from tests.helpers.store_steps import acquire, evict_all, on_ssd_only, pins, until, wait_all

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 12)
THREADS = 2
FILLING = [AcquirePolicy.TIMEOUT, AcquirePolicy.WAIT_COMPLETE]
Make = Callable[..., SmallStore]
End = Callable[[SmallStore, Session, Lease], None]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SmallStore] = []

    def build(**options: object) -> SmallStore:
        made.append(SmallStore(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for small in made:
        small.check_integrity()
        await small.close()


def release(small: SmallStore, session: Session, lease: Lease) -> None:
    small.store.release(session, [lease.id])


def hang_up(small: SmallStore, session: Session, lease: Lease) -> None:
    small.store.end_session(session)


def cut_off(small: SmallStore, session: Session, lease: Lease) -> None:
    small.store.cut_session(session)


def run_out(small: SmallStore, session: Session, lease: Lease) -> None:
    small.clock.now += small.settings.daemon.lease_seconds
    small.store.tick()


ENDS = [release, hang_up, cut_off, run_out]
ERRORS = {
    release: UnknownLeaseError,
    hang_up: UnknownLeaseError,
    cut_off: UnknownLeaseError,
    run_out: LeaseExpiredError,
}


async def assert_ended(
    small: SmallStore, lease: Lease, waiting: Awaitable[Lease], end: End
) -> None:
    with pytest.raises(ERRORS[end]):
        await asyncio.wait_for(waiting, 20.0)
    assert lease.is_ended
    small.check_integrity()


async def assert_nothing_is_held(small: SmallStore) -> None:
    await small.store.lender.promoter.settle()
    small.check_integrity()
    assert pins(small) == 0
    assert len(small.store.lender.leases) == len(small.store.lender.prefetches) == 0


def waiter(small: SmallStore, session: Session, lease: Lease) -> asyncio.Future[Lease]:
    return asyncio.ensure_future(small.store.wait(session, lease.id, lease.ready, 30.0))


@pytest.mark.parametrize("end", ENDS)
async def test_a_local_lease_that_ended_fails_and_frees(make: Make, end: End) -> None:
    small = make(ssd_segments=0)
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    lease = acquire(small, session, HASHES)
    assert lease.is_complete
    evict_all(small)
    small.assert_readable(lease)
    end(small, session, lease)
    with pytest.raises(ERRORS[end]):
        await small.store.wait(session, lease.id, 0, 0)
    evict_all(small)
    assert small.store.holdings.pool.slots.used_bytes == 0
    await assert_nothing_is_held(small)


async def test_of_a_batch_of_releases_each_counts_for_itself(make: Make) -> None:
    small = make(ssd_segments=0)
    session, other = small.open(NAMESPACE), small.open(NAMESPACE)
    small.put(session, HASHES)
    leases = [acquire(small, session, HASHES[:n]) for n in (3, 6, 12)]
    foreign = acquire(small, other, HASHES)
    with pytest.raises(UnknownLeaseError):
        small.store.release(session, [leases[0].id, foreign.id, 999, leases[1].id])
    assert [lease.is_ended for lease in leases] == [True, True, False]
    assert not foreign.is_ended
    with pytest.raises(UnknownLeaseError):
        small.store.release(session, [leases[0].id])
    small.store.release(session, [leases[2].id])
    small.store.release(other, [foreign.id])
    await assert_nothing_is_held(small)


async def test_a_wait_is_answered_when_as_many_blocks_are_ready_as_are_wanted(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        lease = acquire(small, session, HASHES)
        waiting = [
            asyncio.ensure_future(small.store.wait(session, lease.id, 0, 30.0, wanted))
            for wanted in (0, 3, len(HASHES))
        ]
        await gate.until_begun(THREADS)
        gate.let_through(1)
        await until(lambda: lease.ready == 1, "the first block arrives")
        assert (await waiting[0]).ready == 1
        assert not any(wait.done() for wait in waiting[1:])
        assert (await small.store.wait(session, lease.id, 0, 0.01, 3)).ready == 1
        gate.let_through(2)
        assert (await waiting[1]).ready == 3
        assert not waiting[2].done()
        gate.let_through()
        assert (await waiting[2]).is_complete
    small.store.release(session, [lease.id])
    await assert_nothing_is_held(small)


@pytest.mark.parametrize("policy", FILLING)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ready", [0, 3])
async def test_an_ssd_lease_ended_in_motion(
    make: Make, policy: AcquirePolicy, end: End, ready: int
) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        lease = acquire(small, session, HASHES, policy)
        gate.let_through(ready)
        await gate.until_begun(ready + THREADS)
        await until(lambda: lease.ready == ready, "the first blocks arrive")
        small.assert_readable(lease)
        waiting = waiter(small, session, lease)
        await asyncio.sleep(0)
        end(small, session, lease)
        await assert_ended(small, lease, waiting, end)
        await assert_slots_in_motion_are_nobodys(small, gate)
        gate.let_through()
        await assert_nothing_is_held(small)
    again = small.open(NAMESPACE)
    small.assert_readable(await wait_all(small, again, acquire(small, again, HASHES)))


async def assert_slots_in_motion_are_nobodys(small: SmallStore, gate: GatedReads) -> None:
    """Hours pass and the whole pool is asked for: what the threads fill is not given out."""
    promoter = small.store.lender.promoter
    filled = {slot.offset for move in promoter._moving.values() for slot in move.slots.values()}
    assert len(filled) == promoter.in_flight == THREADS
    for _ in range(3):
        small.clock.now += 3600.0
        small.store.tick()
    writer = small.open(NAMESPACE)
    others = chain(NAMESPACE, 60, seed=9)
    staged = small.store.stage(writer, others, None)
    assert StageState.NO_SPACE in staged.states, "the pool is smaller than that"
    assert not filled & set(staged.offsets)
    assert promoter.in_flight == THREADS
    small.check_integrity()
    small.store.end_session(writer)


@pytest.mark.parametrize("policy", FILLING)
async def test_a_deadline_leaves_what_has_come(make: Make, policy: AcquirePolicy) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        lease = acquire(small, session, HASHES, policy, seconds=0.3)
        gate.let_through(3)
        await until(lambda: lease.ready == 3, "three blocks arrive")
        await until(lambda: lease.is_complete, "the deadline passes")
        assert lease.usable == 3
        assert small.store.lender.promoter.in_flight <= THREADS, "the others are called off"
        small.check_integrity()
        small.assert_readable(lease)
        gate.let_through()
        small.store.release(session, [lease.id])
        await assert_nothing_is_held(small)


@pytest.mark.parametrize("policy", FILLING)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("landed", [0, 3])
async def test_a_peer_lease_ended_in_motion(
    make: Make, policy: AcquirePolicy, end: End, landed: int
) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:4])
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    lease = acquire(small, session, HASHES, policy)
    assert list(lease.sources) == [Source.DRAM] * 4 + [Source.PEER] * 8
    peer.let_through(landed)
    await until(lambda: lease.ready == 4 + landed, "blocks land")
    small.assert_readable(lease)
    waiting = waiter(small, session, lease)
    await asyncio.sleep(0)
    end(small, session, lease)
    await assert_ended(small, lease, waiting, end)
    await until(lambda: peer.cancelled == 1, "the pull is called off")
    await assert_nothing_is_held(small)
    assert peer.landed == landed, "what had landed is kept"
    peer.let_through(100)
    again = small.open(NAMESPACE)
    lease = acquire(small, again, HASHES)
    assert lease.ready == 4 + landed
    small.assert_readable(await wait_all(small, again, lease))


@pytest.mark.parametrize("policy", FILLING)
async def test_a_peer_that_is_too_slow_leaves_what_has_landed(
    make: Make, policy: AcquirePolicy
) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:4])
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    lease = acquire(small, session, HASHES, policy, seconds=0.3)
    peer.let_through(2)
    lease = await wait_all(small, session, lease)
    assert lease.usable == 6
    small.assert_readable(lease)
    small.store.release(session, [lease.id])
    await until(lambda: peer.asked == 1, "it was asked")
    await assert_nothing_is_held(small)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_lease_over_what_a_prefetch_is_bringing(
    make: Make, end: End, is_cancelled: bool
) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    reader = small.open(NAMESPACE)
    with gated_reads(small) as gate:
        prefetch = small.store.prefetch(session, HASHES, 30.0)
        gate.let_through(3)
        await gate.until_begun(3 + THREADS)
        lease = acquire(small, reader, HASHES, AcquirePolicy.TIMEOUT)
        await until(lambda: lease.ready == 3, "what the prefetch brought is read")
        small.assert_readable(lease)
        if is_cancelled:
            small.store.cancel_prefetch(session, prefetch.prefetch_id)
        waiting = waiter(small, reader, lease)
        await asyncio.sleep(0)
        end(small, reader, lease)
        await assert_ended(small, lease, waiting, end)
        assert len(small.store.lender.prefetches) == (not is_cancelled)
        gate.let_through()
        await until(lambda: len(small.store.lender.prefetches) == 0, "the prefetch ends")
        await assert_nothing_is_held(small)
    brought = small.store.holdings.counters["promoted_blocks"]
    assert brought == (3 + THREADS if is_cancelled else 12)


async def test_best_effort_never_waits_and_what_it_started_ends_with_the_session(
    make: Make,
) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        gate.let_through(2)
        first = await wait_all(small, session, acquire(small, session, HASHES[:2]))
        lease = acquire(small, session, HASHES, AcquirePolicy.BEST_EFFORT)
        assert lease.ready == lease.usable == 2
        await gate.until_begun(2 + THREADS)
        hang_up(small, session, lease)
        assert first.is_ended
        gate.let_through()
        await assert_nothing_is_held(small)
    assert small.store.holdings.counters["promoted_blocks"] == 2 + THREADS


async def test_thousands_of_cancelled_fills_leave_nothing_behind(make: Make) -> None:
    """One after the other, ended at every depth, with no thread ever stopping."""
    small = make(extents=3)
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    for number in range(1000):
        lease = acquire(small, session, HASHES, FILLING[number % 2])
        begun = small.store.prefetch(session, HASHES, 30.0)
        if number % 5:
            await asyncio.sleep(0)
        if number % 3:
            small.store.cancel_prefetch(session, begun.prefetch_id)
        small.store.release(session, [lease.id])
        if number % 3 == 0:
            small.store.cancel_prefetch(session, begun.prefetch_id)
        if number % 50 == 0:
            small.check_integrity()
        evict_all(small)
    await assert_nothing_is_held(small)
    small.assert_readable(await wait_all(small, session, acquire(small, session, HASHES)))
