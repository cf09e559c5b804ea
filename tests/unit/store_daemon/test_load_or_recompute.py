"""A reader that says what computing costs is not made to wait longer than that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash
from store_daemon.leases import Lease
from store_daemon.sessions import Session
from store_daemon.tiers.segments import SsdRow
from tests.helpers.gated_peer import GatedPeer
from tests.helpers.gated_ssd import gated_reads
from tests.helpers.store import BLOCK_TOKENS, SmallStore, chain, hybrid_namespace, small_namespace
from tests.helpers.store_steps import acquire, evict_all, on_ssd_only, until, wait_all

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 12)
BLOCK_BYTES = 5000
THREADS = 2
WAIT = AcquirePolicy.WAIT_COMPLETE
Make = Callable[..., SmallStore]


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


def acquire_or_compute(small: SmallStore, session: Session, seconds: float) -> Lease | None:
    return small.store.acquire(session, HASHES, WAIT, 30.0, seconds)


def teach(small: SmallStore, seconds_per_block: float) -> None:
    """Reads took so long lately."""
    for _ in range(8):
        small.store.lender.promoter.speed.measured(BLOCK_BYTES, seconds_per_block, small.clock.now)


async def test_an_unknown_drive_is_tried_and_learnt(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    lease = acquire_or_compute(small, session, 1e-9)
    assert lease is not None
    assert lease.usable == 12
    lease = await wait_all(small, session, lease)
    assert 0 < lease.usable <= 12, "once its speed is known, it may be given up"
    speed = small.store.lender.promoter.speed
    speed.check_integrity()
    assert (speed.bytes_per_second(small.clock.now) or 0) > 0
    small.assert_readable(lease)


async def test_a_drive_slower_than_computing_is_not_waited_for(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    teach(small, 1.0)
    assert acquire_or_compute(small, session, 0.4) is None
    assert small.store.lender.promoter.in_flight == 0, "nothing is read in vain"
    assert small.store.holdings.counters["not_worth_blocks"] == 12
    lease = acquire_or_compute(small, session, 0.6)  # two at a time, a second each
    assert lease is not None
    assert lease.usable == 12
    assert small.store.lender.estimates.seconds_to_complete(lease) == pytest.approx(6.0)
    small.assert_readable(await wait_all(small, session, lease))


async def test_what_is_in_dram_is_lent_and_the_slow_rest_is_not(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    await wait_all(small, session, acquire(small, session, HASHES[:5]))
    teach(small, 1.0)
    lease = acquire_or_compute(small, session, 0.1)
    assert lease is not None
    assert (lease.usable, lease.ready, lease.is_complete) == (5, 5, True)
    small.assert_readable(lease)


async def test_a_reader_that_names_no_cost_waits(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    teach(small, 1000.0)
    lease = await wait_all(small, session, acquire(small, session, HASHES))
    assert lease.usable == 12


async def test_a_speed_of_long_ago_is_forgotten_and_the_drive_tried_again(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    teach(small, 1000.0)
    assert acquire_or_compute(small, session, 0.1) is None
    small.clock.now += 61.0
    lease = acquire_or_compute(small, session, 0.1)
    assert lease is not None
    assert lease.usable == 12
    await wait_all(small, session, lease)


async def test_a_drive_that_hangs_is_given_up_while_it_is_waited_for(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    teach(small, 1e-6)
    with gated_reads(small) as gate:
        lease = acquire_or_compute(small, session, 0.01)
        assert lease is not None
        assert lease.usable == 12
        gate.let_through(3)
        await gate.until_begun(3 + THREADS)
        await until(lambda: lease.ready == 3, "the first blocks come quickly")
        waiting = asyncio.ensure_future(small.store.wait(session, lease.id, 3, 30.0))
        deadline = time.monotonic() + 60
        while not lease.is_complete:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
            small.store.tick()
        assert (await waiting).usable == 3
        assert small.store.lender.promoter.in_flight == THREADS, "the others are called off"
        small.check_integrity()
        small.assert_readable(lease)
        gate.let_through()
        await small.store.lender.promoter.settle()


async def test_the_queue_of_others_counts(make: Make) -> None:
    """Ten blocks of others go first: five seconds of waiting for nothing of ours."""
    small = make()
    await on_ssd_only(small, NAMESPACE, chain(NAMESPACE, 10, seed=4))
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    teach(small, 1.0)
    with gated_reads(small) as gate:
        small.store.prefetch(session, chain(NAMESPACE, 10, seed=4), 30.0)
        assert acquire_or_compute(small, session, 0.6) is None
        gate.let_through()
        await until(lambda: small.store.lender.promoter.in_flight == 0, "the prefetch ends")


async def test_peers_are_measured_and_not_asked_when_they_are_too_slow(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:4])
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    peer.let_through(100)
    lease = await wait_all(small, session, acquire(small, session, HASHES))
    small.store.release(session, [lease.id])
    speed = small.store.lender.pulls.speed
    assert (speed.bytes_per_second(small.clock.now) or 0) > 0
    for _ in range(20):
        speed.measured(BLOCK_BYTES, 2.0, small.clock.now)
    evict_all(small)
    small.put(session, HASHES[:4])
    asked = peer.asked
    cheap = acquire_or_compute(small, session, 1.0)
    assert cheap is not None
    assert (cheap.usable, cheap.is_complete) == (4, True)
    small.assert_readable(cheap)
    assert peer.asked == asked
    dear = acquire_or_compute(small, session, 3.0)
    assert dear is not None
    assert (await wait_all(small, session, dear)).usable == 12
    small.assert_readable(dear)


class SlowToLease(GatedPeer):
    async def pull(self, *request: Any) -> int:
        await asyncio.sleep(0.1)
        return await super().pull(*request)


class BroughtByOthers(GatedPeer):
    async def pull(
        self, namespace: Namespace, parent: BlockHash | None, hashes: Sequence[BlockHash], *_: Any
    ) -> int:
        return len(hashes)


async def test_what_passes_before_the_first_lease_is_told_from_what_bytes_cost(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:4])
    peer = SlowToLease(small)
    small.store.set_puller(peer)
    peer.let_through(100)
    await wait_all(small, session, acquire(small, session, HASHES))
    line = small.store.lender.pulls.speed.line(small.clock.now)
    assert line is not None
    assert line.setup_seconds >= 0.1, "one pull is enough to know"


async def test_a_pull_that_others_had_begun_tells_nothing_of_what_pulls_take(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:4])
    small.store.set_puller(BroughtByOthers(small))
    await wait_all(small, session, acquire(small, session, HASHES))
    assert small.store.lender.pulls.speed.line(small.clock.now) is None


async def test_a_hybrid_hit_is_waited_for_whole_or_not_at_all(make: Make) -> None:
    namespace = hybrid_namespace(
        Group(GroupKind.FULL, 1, 5000),
        Group(GroupKind.SLIDING_WINDOW, 1, 3000, window_tokens=2 * BLOCK_TOKENS),
    )
    hashes = chain(namespace, 8)
    small = make(extents=8)
    sessions = [small.open(namespace, part) for part in range(2)]
    for session in sessions:
        assert small.put(session, hashes) == 8
    await small.flush()
    evict_all(small)
    for _ in range(8):
        small.store.lender.promoter.speed.measured(8000, 1.0, small.clock.now)
    assert small.store.acquire(sessions[0], hashes, WAIT, 30.0, 0.1) is None
    lease = small.store.acquire(sessions[0], hashes, WAIT, 30.0, 1.0)
    assert lease is not None
    assert lease.usable == 8
    small.assert_readable(await wait_all(small, sessions[0], lease))


async def test_a_slow_drive_is_measured_as_slow(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    assert small.ssd is not None
    read_into = small.ssd.read_into

    def slowly(row: SsdRow, target: memoryview) -> None:
        time.sleep(0.05)
        read_into(row, target)

    with mock.patch.object(small.ssd, "read_into", slowly):
        await wait_all(small, session, acquire(small, session, HASHES[:6]))
    speed = small.store.lender.promoter.speed
    seconds = speed.read_seconds(small.clock.now)
    assert seconds is not None
    assert seconds >= 0.05
    assert acquire_or_compute(small, session, 0.001) is not None, "six are here"
    assert small.store.holdings.counters["not_worth_blocks"] == 6
