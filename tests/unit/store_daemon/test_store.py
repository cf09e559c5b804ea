from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import pytest_asyncio

from emberkv_proto.errors import (
    DrainingError,
    InvalidRequestError,
    LeaseExpiredError,
    PoolFullError,
    UnknownLeaseError,
    UnknownNamespaceError,
    UnknownStageError,
)
from emberkv_proto.hashing import checksum
from emberkv_proto.layout import Namespace
from emberkv_proto.shm_layout import STATE_OFFSET, SlotState, pack_state
from emberkv_proto.types import AcquirePolicy, BlockHash, NamespaceId, Source, StageState, Tier
from store_daemon import leases, lending
from store_daemon.leases import Lease
from store_daemon.ports import PullTarget
from store_daemon.sessions import Session
from store_daemon.tiers.ssd import SsdRow
from tests.helpers.gated_ssd import gated_reads
from tests.helpers.store import SmallStore, chain, payload, small_namespace

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 12)
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
        if small.is_closed:
            continue
        small.check_integrity()
        await small.close()


async def on_ssd_only(small: SmallStore, hashes: Sequence[BlockHash]) -> Session:
    """Store blocks, write them back, and evict all of DRAM."""
    session = small.open(NAMESPACE)
    assert small.put(session, hashes) == len(hashes)
    await small.flush()
    holdings = small.store.holdings
    while (victim := holdings.queue.oldest_of_all(holdings.catalog.is_evictable)) is not None:
        holdings.evict(victim)
    holdings.publish()
    return session


def acquire(
    small: SmallStore, session: Session, hashes: Sequence[BlockHash], policy: AcquirePolicy = WAIT
) -> Lease:
    lease = small.store.acquire(session, hashes, policy, 10.0)
    assert lease is not None
    return lease


async def wait_all(small: SmallStore, session: Session, lease: Lease) -> Lease:
    while not lease.is_complete:
        lease = await small.store.wait(session, lease.id, lease.ready, 10.0)
    return lease


async def test_what_was_committed_is_read_back(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    lease = acquire(small, session, [*HASHES, *chain(NAMESPACE, 2, seed=5)])
    assert (lease.usable, lease.ready) == (12, 12)
    assert set(lease.sources) == {Source.DRAM}
    small.assert_readable(lease)
    small.store.release(session, [lease.id])
    with pytest.raises(UnknownLeaseError):
        small.store.release(session, [lease.id])


async def test_staged_blocks_are_nobodys_until_they_are_committed(make: Make) -> None:
    small = make()
    writer, reader = small.open(NAMESPACE), small.open(NAMESPACE)
    staged = small.store.stage(writer, HASHES[:3], None)
    assert set(staged.states) == {StageState.GRANTED}
    assert small.store.acquire(reader, HASHES, WAIT, 1.0) is None
    other = small.store.stage(reader, HASHES[:3], None)
    assert other.stage_id == 0
    assert set(other.states) == {StageState.IN_PROGRESS}
    small.write(writer, HASHES, staged)
    sums = [checksum(payload(h, 0, 5000)) for h in HASHES[:2]]
    assert small.store.commit(writer, staged.stage_id, HASHES[:2], sums) == 2
    assert acquire(small, reader, HASHES).usable == 2
    small.store.abort(writer, staged.stage_id)
    assert small.store.stage(reader, HASHES[:3], None).states == bytes(
        [StageState.PRESENT, StageState.PRESENT, StageState.GRANTED]
    )


async def test_a_session_that_ends_between_stage_and_commit_leaves_nothing(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.store.stage(session, HASHES, None)
    lease_holder = small.open(NAMESPACE)
    small.store.end_session(session)
    assert small.store.holdings.catalog.blocks == {}
    assert small.store.holdings.pool.slots.used_bytes == 0
    assert small.book.events == []
    assert small.store.stage(lease_holder, HASHES, None).states == bytes(12)


async def test_slots_of_a_writer_that_was_cut_off_rest_before_they_are_used(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    offsets = set(small.store.stage(session, HASHES[:2], None).offsets)
    small.store.cut_session(session)
    other = small.open(NAMESPACE)
    assert not offsets & set(small.store.stage(other, HASHES, None).offsets)
    small.clock.now += small.settings.daemon.lease_seconds
    small.store.tick()
    small.store.end_session(other)
    assert small.store.holdings.pool.slots.used_bytes == 0


async def test_a_killed_daemon_lets_the_slots_of_a_cut_off_writer_rest_anew(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    offsets = set(small.store.stage(session, HASHES[:2], None).offsets)
    small.store.cut_session(session)
    resting = list(small.store.limbo)
    words = {state: pack_state(state) for state in SlotState}

    def state_words() -> set[bytes]:
        """The states in the pool file, which is what a new life finds."""
        view = small.store.holdings.pool._view
        starts = [slot.header_offset + STATE_OFFSET for slot in resting]
        return {bytes(view[start : start + 4]) for start in starts}

    assert {slot.offset for slot in resting} == offsets
    assert state_words() == {words[SlotState.STAGED]}
    small.clock.now += small.settings.daemon.lease_seconds
    small.store.tick()
    assert state_words() == {words[SlotState.FREE]}


@pytest.mark.parametrize(
    ("hashes", "sums", "error"),
    [
        (HASHES[:2], [1], InvalidRequestError),
        ([HASHES[0], HASHES[0]], [1, 1], InvalidRequestError),
        ([HASHES[0], HASHES[5]], [1, 1], UnknownStageError),
    ],
    ids=["too few checksums", "a hash twice", "not staged"],
)
async def test_a_wrong_commit_changes_nothing(
    make: Make, hashes: list[BlockHash], sums: list[int], error: type[Exception]
) -> None:
    small = make()
    session = small.open(NAMESPACE)
    staged = small.store.stage(session, HASHES[:2], None)
    with pytest.raises(error):
        small.store.commit(session, staged.stage_id, hashes, sums)
    assert small.store.staged_blocks == 2
    other = small.open(NAMESPACE)
    with pytest.raises(UnknownStageError):
        small.store.commit(other, staged.stage_id, HASHES[:1], [1])


async def test_a_block_of_two_parts_waits_for_both_ranks(make: Make) -> None:
    namespace = small_namespace(groups=2)
    hashes = chain(namespace, 2)
    small = make()
    ranks = [small.open(namespace, part) for part in range(2)]
    small.put(ranks[0], hashes)
    assert small.store.probe(ranks[0], hashes).hit_blocks == 0
    assert small.store.stage(ranks[0], hashes, None).states == bytes([StageState.PRESENT] * 2)
    small.put(ranks[1], hashes)
    assert small.store.probe(ranks[1], hashes).hit_blocks == 2
    small.assert_readable(acquire(small, ranks[1], hashes))


async def test_blocks_come_back_from_ssd(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    assert small.store.probe(session, HASHES).tiers == bytes([1 << Tier.SSD] * 12)
    lease = acquire(small, session, HASHES)
    assert (lease.usable, lease.ready) == (12, 0)
    assert set(lease.sources) == {Source.SSD}
    lease = await wait_all(small, session, lease)
    assert lease.ready == 12
    small.assert_readable(lease)


async def test_a_long_chain_is_moved_window_by_window(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "MOVE_WINDOW_BLOCKS", 3)
    small = make()
    session = await on_ssd_only(small, HASHES)
    lease = acquire(small, session, HASHES)
    assert small.store.lender.promoter.in_flight == 3
    small.check_integrity()
    lease = await wait_all(small, session, lease)
    assert lease.ready == 12
    small.assert_readable(lease)


async def test_a_drive_that_fails_costs_only_the_copies(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    with mock.patch.object(small.ssd, "append", side_effect=OSError(5, "Input/output error")):
        await small.flush()
    assert small.store.holdings.counters["writeback_failed_blocks"] == 12
    small.assert_readable(acquire(small, session, HASHES))


async def test_best_effort_promises_only_what_is_there_and_moves_the_rest(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    assert small.store.acquire(session, HASHES, AcquirePolicy.BEST_EFFORT, 0) is None
    await small.store.lender.promoter.settle()
    lease = acquire(small, session, HASHES, AcquirePolicy.BEST_EFFORT)
    assert lease.ready == lease.usable == 12


async def test_prefetch_brings_blocks_without_a_lease(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    assert small.store.prefetch(session, HASHES, 5.0).blocks == 12
    await small.store.lender.promoter.settle()
    assert small.store.holdings.blocks_of(Tier.DRAM) == 12
    assert all(block.pins == 0 for block in small.store.holdings.catalog.blocks.values())


async def test_a_damaged_ssd_block_ends_the_prefix_and_is_forgotten(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    block = small.store.holdings.catalog.blocks[HASHES[5]]
    row = block.rows[0]
    assert row is not None
    assert small.ssd is not None
    path = small.ssd.segment_path(row)
    with path.open("r+b") as file:
        file.seek(row.offset + 4096 + 100)
        file.write(b"damage")
    lease = await wait_all(small, session, acquire(small, session, HASHES))
    assert lease.usable == 5
    small.assert_readable(lease)
    assert small.store.holdings.counters["corrupt_blocks"] == 1
    assert HASHES[5] not in small.store.holdings.catalog.blocks
    await small.flush()
    assert small.store.stage(session, HASHES[5:6], HASHES[4]).states == bytes([StageState.GRANTED])


async def test_a_read_that_reclaim_overtakes_is_no_error_of_the_drive(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    ssd, counters = small.ssd, small.store.holdings.counters
    assert ssd is not None
    is_reclaimed, read_into = threading.Event(), ssd.read_into

    def read_late(row: SsdRow, target: memoryview) -> None:
        assert is_reclaimed.wait(60)
        read_into(row, target)

    with mock.patch.object(ssd, "read_into", read_late):
        lease = acquire(small, session, HASHES)
        with mock.patch.object(ssd._drives[0], "capacity_bytes", 0):
            gone = ssd.reclaim().gone
        is_reclaimed.set()
        lease = await wait_all(small, session, lease)
    small.store.holdings.drop_rows(gone)
    assert len(gone) >= 5
    assert lease.usable == 0
    assert counters["reclaimed_reads"] > 0
    assert (counters["ssd_read_errors"], counters["corrupt_blocks"]) == (0, 0)
    small.store.holdings.publish()


async def test_a_segment_that_somebody_removed_is_an_error_of_the_drive(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    assert small.ssd is not None
    for path in {small.ssd.segment_path(row) for row in small.ssd.recovered_rows()}:
        path.rename(path.with_suffix(".away"))
    lease = await wait_all(small, session, acquire(small, session, HASHES))
    assert lease.usable == 0
    assert small.store.holdings.counters["ssd_read_errors"] > 0
    assert small.store.holdings.counters["reclaimed_reads"] == 0
    await small.flush()


async def test_a_lease_ended_early_does_not_free_slots_that_are_being_read_into(
    make: Make,
) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    with gated_reads(small) as gate:
        lease = acquire(small, session, HASHES)
        await gate.until_begun(2)
        small.store.release(session, [lease.id])
        assert small.store.lender.promoter.in_flight == 2, "the others were not begun"
        assert small.store.holdings.pool.slots.used_bytes == 2 * 8192
        gate.let_through()
        await small.store.lender.promoter.settle()
    small.assert_readable(await wait_all(small, session, acquire(small, session, HASHES)))


async def test_a_waiting_read_fails_when_its_lease_runs_out(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES)
    lease = acquire(small, session, HASHES)
    waiting = asyncio.ensure_future(small.store.wait(session, lease.id, 12, 10.0))
    small.clock.now += small.settings.daemon.lease_seconds
    small.store.tick()
    with pytest.raises(LeaseExpiredError):
        await waiting
    small.store.release(session, [lease.id])
    await small.store.lender.promoter.settle()
    assert all(block.pins == 0 for block in small.store.holdings.catalog.blocks.values())


async def test_a_heartbeat_keeps_a_lease(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    lease = acquire(small, session, HASHES)
    for _ in range(5):
        small.clock.now += small.settings.daemon.lease_seconds * 0.9
        small.store.heartbeat(session)
        small.store.tick()
    assert (await small.store.wait(session, lease.id, 0, 0)).ready == 12


async def test_leased_blocks_are_never_evicted(make: Make) -> None:
    """Ten thousand stages against leases held, in a pool that is full all the time."""
    small = make(extents=2, ssd_segments=0)
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:6])
    held = acquire(small, session, HASHES[:6])
    for seed in range(1, 1251):
        hashes = chain(NAMESPACE, 8, seed=seed)
        staged = small.store.stage(session, hashes, None)
        assert staged.stage_id
        own = [h for h, offset in zip(hashes, staged.offsets, strict=True) if offset]
        assert len(own) == 8
        small.store.commit(session, staged.stage_id, own, [1] * len(own))
        assert held.ready == 6
    small.assert_readable(held)
    assert small.store.holdings.counters["evicted_blocks"] >= 1250 * 8 - 14


async def test_a_pool_full_of_leases_says_no_space_and_recovers(make: Make) -> None:
    small = make(extents=1, ssd_segments=0)
    session = small.open(NAMESPACE)
    assert small.put(session, HASHES) == 7
    lease = acquire(small, session, HASHES)
    other = chain(NAMESPACE, 3, seed=3)
    assert set(small.store.stage(session, other, None).states) == {StageState.NO_SPACE}
    assert small.store.holdings.counters["staged_no_space"] == 5 + 3
    small.store.release(session, [lease.id])
    assert small.put(session, other) == 3


async def test_room_moves_between_namespaces(make: Make) -> None:
    small = make(extents=2, ssd_segments=0)
    wide = small_namespace(20000, model="wide")
    first, second = small.open(NAMESPACE), small.open(wide)
    small.put(first, HASHES)
    assert small.put(second, chain(wide, 2)) == 2
    assert small.store.holdings.counters["moved_extents"] == 1


async def test_a_new_namespace_finds_room_though_a_chain_ties_the_extents_together(
    make: Make,
) -> None:
    small = make(extents=2, ssd_segments=0)  # of 7 slots each
    session = small.open(NAMESPACE)
    old, tied = chain(NAMESPACE, 3, seed=1), chain(NAMESPACE, 10, seed=2)
    small.put(session, old)  # into extent 0
    small.put(session, tied[:7])  # into 0 and 1
    small.put(session, chain(NAMESPACE, 4, seed=3))  # fills 1
    small.put(session, tied[7:], tied[6])  # where `old` was: 0 needs 1, and 1 needs 0
    wide = small_namespace(20000, model="wide")
    assert small.put(small.open(wide), chain(wide, 2)) == 2
    small.check_integrity()


async def test_trimming_stops_at_the_low_watermark(make: Make) -> None:
    small = make(extents=4, ssd_segments=0)
    session = small.open(NAMESPACE)
    small.put(session, chain(NAMESPACE, 28))
    assert small.store.holdings.pool.slots.usage == 1.0
    small.store.holdings.trim()
    small.store.holdings.publish()
    assert 0.85 < small.store.holdings.pool.slots.usage <= 0.9


async def test_both_tiers_survive_a_kill_and_are_announced_again(make: Make) -> None:
    small = make()
    session = await on_ssd_only(small, HASHES[:6])
    small.put(session, HASHES[6:], HASHES[5])
    small.store.stage(session, chain(NAMESPACE, 3, seed=7), None)
    image = small.settings.dram.path.read_bytes()
    await small.close()
    small.settings.dram.path.write_bytes(image)
    again = make()
    assert again.store.probe(again.open(NAMESPACE), HASHES).hit_blocks == 12
    assert len(again.book.resident[Tier.DRAM]) == 6
    assert len(again.book.resident[Tier.SSD]) == 6
    reader = again.open(NAMESPACE)
    lease = await wait_all(again, reader, acquire(again, reader, HASHES))
    assert lease.ready == 12
    again.assert_readable(lease)


async def test_a_recovered_block_with_wrong_bytes_is_never_served(make: Make) -> None:
    small = make(ssd_segments=0)
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    slot = small.store.holdings.catalog.blocks[HASHES[4]].slots[0]
    assert slot is not None
    await small.close()
    with small.settings.dram.path.open("r+b") as file:
        file.seek(slot.offset + 7)
        file.write(b"x")
    again = make(ssd_segments=0)
    reader = again.open(NAMESPACE)
    assert again.store.acquire(reader, HASHES[4:5], AcquirePolicy.BEST_EFFORT, 0) is None
    lease = await wait_all(again, reader, acquire(again, reader, HASHES))
    assert lease.usable == 4
    again.assert_readable(lease)
    assert HASHES[4] not in again.store.holdings.catalog.blocks


async def test_the_ssd_tier_stays_within_its_capacity(make: Make) -> None:
    small = make(ssd_segments=3)
    session = small.open(NAMESPACE)
    for seed in range(8):
        small.put(session, chain(NAMESPACE, 8, seed=seed))
        await small.flush()
        small.check_integrity()
        assert small.ssd is not None
        assert small.ssd.used_bytes <= small.ssd.capacity_bytes
    assert 0 < small.store.holdings.blocks_of(Tier.SSD) < 64


class OnePeer:
    """A puller whose peer holds the chain up to `held` blocks."""

    def __init__(self, small: SmallStore, held: int) -> None:
        self._small = small
        self._held = set(HASHES[:held])

    async def pull(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        await asyncio.sleep(0)
        run = [h for h in hashes if h in self._held]
        room = target.allot(namespace, parent, run)
        landed = 0
        with self._small.pool.view() as view:
            for number, ranges in enumerate(room.ranges):
                for part, place in enumerate(ranges):
                    view[place.offset : place.offset + place.length] = payload(
                        run[number], part, place.length
                    )
                room.land(
                    number,
                    [checksum(payload(run[number], p, r.length)) for p, r in enumerate(ranges)],
                )
                landed += 1
        room.close()
        return landed


@pytest.mark.parametrize("held", [0, 5, 12])
async def test_missing_blocks_come_from_a_peer_as_far_as_it_has_them(make: Make, held: int) -> None:
    small = make()
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:2])
    small.put(session, HASHES[7:9], HASHES[6])
    small.store.set_puller(OnePeer(small, held))
    lease = acquire(small, session, HASHES)
    assert lease.usable == 12
    assert lease.ready == 2
    assert list(lease.sources[1:4]) == [Source.DRAM, Source.PEER, Source.PEER]
    lease = await wait_all(small, session, lease)
    assert lease.usable == max(2, held)
    small.assert_readable(lease)
    small.store.release(session, [lease.id])


async def test_a_peer_reads_only_what_it_leases_and_only_in_time(make: Make) -> None:
    small = make()
    await on_ssd_only(small, HASHES)
    grant = await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    assert grant.usable_blocks == 12
    place = grant.ranges[3]
    may_read = small.store.may_read
    assert may_read(grant.lease_id, place.offset, place.length)
    assert not may_read(grant.lease_id, place.offset, place.length + 1)
    assert not may_read(grant.lease_id, place.offset - 4096, place.length)
    assert not may_read(grant.lease_id + 1, place.offset, place.length)
    assert not may_read(grant.lease_id, place.offset, -1)
    small.clock.now += 5.0
    assert not may_read(grant.lease_id, place.offset, place.length)
    small.store.tick()
    assert len(small.store.lender.leases) == 1, "a read that has begun may still be going on"
    small.clock.now += small.settings.daemon.peer_timeout_seconds
    small.store.tick()
    assert len(small.store.lender.leases) == 0
    small.store.peer_release(grant.lease_id)


async def test_leases_that_a_holder_never_ends_are_limited(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 3)
    small = make()
    session, other = small.open(NAMESPACE), small.open(NAMESPACE)
    small.put(session, HASHES[:2])
    held = [acquire(small, session, HASHES) for _ in range(3)]
    assert [len(lease.hashes) for lease in held] == [2, 2, 2], "misses are not kept"
    with pytest.raises(PoolFullError, match="release those not needed"):
        acquire(small, session, HASHES)
    assert small.store.lender.leases
    acquire(small, other, HASHES)
    for _ in range(3):
        await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    with pytest.raises(PoolFullError):
        await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    small.store.release(session, [held[0].id])
    acquire(small, session, HASHES)


async def test_a_namespace_that_cannot_be_kept_is_refused_and_the_others_go_on(
    make: Make,
) -> None:
    small = make()
    session = small.open(NAMESPACE)
    with (
        mock.patch("store_daemon.files.os.write", side_effect=OSError(28, "No space left")),
        pytest.raises(PoolFullError, match="No space left; free space there"),
    ):
        small.open(small_namespace(model="new"))
    assert len(small.store.sessions) == 1
    assert small.put(session, HASHES) == 12
    small.open(small_namespace(model="new"))


async def test_a_peer_asking_for_nothing_we_have_gets_no_lease(make: Make) -> None:
    small = make()
    small.open(NAMESPACE)
    grant = await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    assert (grant.lease_id, grant.usable_blocks) == (0, 0)
    with pytest.raises(UnknownNamespaceError):
        await small.store.peer_acquire(NamespaceId(bytes(16)), HASHES, 5.0, "node-2")


async def test_a_full_writeback_queue_skips_and_counts(make: Make) -> None:
    small = make()
    assert small.store.writeback is not None
    small.store.writeback._limit = 4
    small.put(small.open(NAMESPACE), HASHES)
    assert len(small.store.writeback) == 4
    assert small.store.holdings.counters["writeback_skipped_blocks"] == 8


async def test_a_draining_store_refuses_new_work_and_finishes_the_old(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    staged = small.store.stage(session, HASHES[:2], None)
    small.write(session, HASHES, staged)
    small.store.drain()
    for call in (
        lambda: small.open(NAMESPACE),
        lambda: small.store.stage(session, HASHES[2:], HASHES[1]),
        lambda: small.store.acquire(session, HASHES, WAIT, 1.0),
    ):
        with pytest.raises(DrainingError):
            call()
    sums = [checksum(payload(h, 0, 5000)) for h in HASHES[:2]]
    assert small.store.commit(session, staged.stage_id, HASHES[:2], sums) == 2


async def test_an_impossible_namespace_is_refused_with_the_numbers(make: Make) -> None:
    small = make(extents=2)
    with pytest.raises(InvalidRequestError, match=r"raise dram\.extent_bytes"):
        small.open(small_namespace(70000, model="huge"))
    with pytest.raises(InvalidRequestError, match="need as many extents"):
        small.open(small_namespace(groups=3, model="many"))
    with pytest.raises(InvalidRequestError, match="part 1 is not in"):
        small.open(NAMESPACE, part=1)
