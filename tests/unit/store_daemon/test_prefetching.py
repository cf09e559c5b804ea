from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, Tier
from store_daemon import prefetching
from store_daemon.ports import PullTarget
from tests.helpers.gated_ssd import gated_reads
from tests.helpers.store import SmallStore, chain, small_namespace
from tests.helpers.store_steps import acquire, on_ssd_only, pins, until, wait_all

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 12)
THREADS = 2
"""That read from the SSD in a SmallStore."""
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


async def settled(small: SmallStore) -> None:
    """All moves have ended, and nothing is held any more."""
    await small.store.lender.promoter.settle()
    small.check_integrity()
    assert len(small.store.lender.prefetches) == 0
    assert pins(small) == 0


async def test_a_prefetch_brings_the_chain_and_lets_go_of_it(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    begun = small.store.prefetch(session, HASHES, 30.0)
    assert (begun.blocks, begun.prefetch_id > 0) == (12, True)
    small.check_integrity()
    await until(lambda: len(small.store.lender.prefetches) == 0, "the prefetch ends")
    await settled(small)
    assert small.store.holdings.counters["prefetched_blocks"] == 12
    assert acquire(small, session, HASHES).ready == 12
    again = small.store.prefetch(session, HASHES, 30.0)
    assert (again.blocks, again.prefetch_id) == (0, 0), "nothing is left to bring"


async def test_cancelling_stops_what_no_thread_has_begun(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    slots = small.store.holdings.pool.slots
    with gated_reads(small) as gate:
        begun = small.store.prefetch(session, HASHES, 30.0)
        await gate.until_begun(THREADS)
        assert slots.used_bytes == 12 * 8192
        small.store.cancel_prefetch(session, begun.prefetch_id)
        small.check_integrity()
        assert small.store.lender.promoter.in_flight == THREADS
        assert slots.used_bytes == THREADS * 8192, "those that a thread writes stay"
        small.store.cancel_prefetch(session, begun.prefetch_id)  # once more is no error
        gate.let_through()
        await settled(small)
        assert len(gate.begun) == THREADS
    assert small.store.holdings.blocks_of(Tier.DRAM) == THREADS, "what was begun is kept"
    assert small.store.holdings.counters["withdrawn_moves"] == 12 - THREADS
    assert small.store.holdings.counters["cancelled_prefetches"] == 1


async def test_the_deadline_cancels_the_rest(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        small.store.prefetch(session, HASHES, 0.02)
        await gate.until_begun(THREADS)
        await until(lambda: len(small.store.lender.prefetches) == 0, "the deadline passes")
        assert small.store.lender.promoter.in_flight <= THREADS
        small.check_integrity()
        gate.let_through()
        await settled(small)
    assert small.store.holdings.counters["expired_prefetches"] == 1


async def test_only_a_window_of_a_prefetch_is_in_motion(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "PREFETCH_WINDOW_BLOCKS", 3)
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        assert small.store.prefetch(session, HASHES, 30.0).blocks == 12
        assert small.store.lender.promoter.in_flight == 3
        gate.let_through(1)
        await gate.until_begun(3)
        await until(lambda: small.store.lender.promoter.in_flight == 3, "the next moves")
        small.check_integrity()
        gate.let_through()
        await until(lambda: len(small.store.lender.prefetches) == 0, "the prefetch ends")
    assert small.store.holdings.blocks_of(Tier.DRAM) == 12


async def test_blocks_that_others_want_go_on_moving(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        first = small.store.prefetch(session, HASHES, 30.0)
        small.store.prefetch(session, HASHES[:8], 30.0)
        lease = acquire(small, session, HASHES[:4])
        await gate.until_begun(THREADS)
        small.store.cancel_prefetch(session, first.prefetch_id)
        assert small.store.lender.promoter.in_flight == 8
        small.store.release(session, [lease.id])
        assert small.store.lender.promoter.in_flight == 8
        small.check_integrity()
        gate.let_through()
        await until(lambda: len(small.store.lender.prefetches) == 0, "the second one ends")
    assert [bool(b.in_dram) for b in small.store.holdings.catalog.blocks.values()].count(True) == 8


async def test_a_lease_gets_its_blocks_though_their_prefetch_is_cancelled(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        begun = small.store.prefetch(session, HASHES, 30.0)
        lease = acquire(small, session, HASHES[:6])
        await gate.until_begun(THREADS)
        small.store.cancel_prefetch(session, begun.prefetch_id)
        gate.let_through()
        lease = await wait_all(small, session, lease)
    assert lease.ready == 6
    small.assert_readable(lease)


async def test_a_prefetch_ends_with_its_session_and_only_its_session_can_cancel_it(
    make: Make,
) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    other = small.open(NAMESPACE)
    with gated_reads(small) as gate:
        begun = small.store.prefetch(session, HASHES, 30.0)
        await gate.until_begun(THREADS)
        small.store.cancel_prefetch(other, begun.prefetch_id)
        assert len(small.store.lender.prefetches) == 1
        small.store.end_session(session)
        assert len(small.store.lender.prefetches) == 0
        assert small.store.lender.promoter.in_flight == THREADS
        gate.let_through()
        await settled(small)


async def test_a_prefetch_never_evicts_its_own_blocks(make: Make) -> None:
    """Twelve blocks into seven slots: the first seven stay."""
    small = make(extents=1)
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    small.store.prefetch(session, HASHES, 30.0)
    await until(lambda: small.store.lender.promoter.in_flight == 0, "all moves end")
    await settled(small)
    found = small.store.holdings.catalog.blocks
    assert [found[h].in_dram for h in HASHES] == [True] * 7 + [False] * 5
    assert small.store.holdings.counters["no_space_promotions"] == 1


async def test_a_session_may_have_only_so_many(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "MAX_PREFETCHES", 2)
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    other = small.open(NAMESPACE)
    with gated_reads(small):
        assert all(small.store.prefetch(session, HASHES, 30.0).prefetch_id for _ in range(2))
        assert small.store.prefetch(session, HASHES, 30.0).prefetch_id == 0
        assert small.store.holdings.counters["refused_prefetches"] == 1
        assert small.store.prefetch(other, HASHES, 30.0).prefetch_id


async def test_asking_again_and_again_for_what_is_not_there_yet_starts_one_move(
    make: Make,
) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    with gated_reads(small) as gate:
        for _ in range(5):
            assert small.store.acquire(session, HASHES, AcquirePolicy.BEST_EFFORT, 0) is None
        assert len(small.store.lender.prefetches) == 1
        gate.let_through()
        await until(lambda: len(small.store.lender.prefetches) == 0, "it ends")
    assert acquire(small, session, HASHES, AcquirePolicy.BEST_EFFORT).ready == 12


async def test_a_block_that_cannot_be_read_ends_the_prefetch(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES)
    assert small.ssd is not None
    row = small.store.holdings.catalog.blocks[HASHES[3]].rows[0]
    assert row is not None
    path = small.ssd.segment_path(row)
    with path.open("r+b") as file:
        file.seek(row.offset + 4096 + 100)
        file.write(b"damage")
    small.store.prefetch(session, HASHES, 30.0)
    await until(lambda: len(small.store.lender.prefetches) == 0, "the prefetch ends")
    await settled(small)
    assert small.store.holdings.counters["corrupt_blocks"] == 1
    lease = await wait_all(small, session, acquire(small, session, HASHES))
    assert lease.usable == 3
    small.assert_readable(lease)


class HangingPeer:
    """A puller that never gets its blocks."""

    def __init__(self) -> None:
        self.asked: list[Sequence[BlockHash]] = []
        self.cancelled = 0

    async def pull(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        self.asked.append(hashes)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 0


@pytest.mark.parametrize("how", ["cancel", "deadline", "session"])
async def test_a_pull_for_a_prefetch_is_cancelled_with_it(make: Make, how: str) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES[:4])
    peer = HangingPeer()
    small.store.set_puller(peer)
    begun = small.store.prefetch(session, HASHES, 0.02 if how == "deadline" else 30.0)
    assert begun.blocks == 12
    await until(lambda: bool(peer.asked), "the peer is asked")
    assert peer.asked == [HASHES[4:]]
    await small.store.lender.promoter.settle()
    small.check_integrity()
    if how == "cancel":
        small.store.cancel_prefetch(session, begun.prefetch_id)
    elif how == "session":
        small.store.end_session(session)
    await until(lambda: peer.cancelled == 1, "the pull is cancelled")
    await settled(small)


async def test_closing_the_store_ends_prefetches(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, NAMESPACE, HASHES[:4])
    peer = HangingPeer()
    small.store.set_puller(peer)
    small.store.prefetch(session, HASHES, 30.0)
    await until(lambda: bool(peer.asked), "the peer is asked")
    await small.store.lender.close()
    assert peer.cancelled == 1
    await settled(small)
