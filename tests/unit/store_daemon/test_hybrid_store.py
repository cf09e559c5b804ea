"""A model with full, window and state layers: what is lent, what may be missing, what goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from emberkv_proto.hashing import checksum
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, StageState, Tier
from store_daemon.leases import Lease
from store_daemon.ports import PullTarget
from store_daemon.sessions import Session
from tests.helpers.store import BLOCK_TOKENS, SmallStore, chain, hybrid_namespace, payload

WINDOW_BLOCKS = 2
assert BLOCK_TOKENS == 4, "the numbers below count on it"
NAMESPACE = hybrid_namespace(
    Group(GroupKind.FULL, 1, 5000),
    Group(GroupKind.SLIDING_WINDOW, 1, 3000, window_tokens=WINDOW_BLOCKS * BLOCK_TOKENS),
    Group(GroupKind.MAMBA, 1, 7000),
)
FULL, WINDOW, STATE = range(3)
HASHES = chain(NAMESPACE, 10)
BEST_EFFORT, WAIT = AcquirePolicy.BEST_EFFORT, AcquirePolicy.WAIT_COMPLETE
Make = Callable[..., SmallStore]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SmallStore] = []

    def build(**options: object) -> SmallStore:
        made.append(SmallStore(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for small in made:
        if not small.is_closed:
            small.check_integrity()
            await small.close()


class Ranks:
    """One session for each part."""

    def __init__(self, small: SmallStore) -> None:
        self.small = small
        self.sessions = [small.open(NAMESPACE, part) for part in range(NAMESPACE.parts)]

    def put(self, part: int, first: int, end: int) -> int:
        parent = HASHES[first - 1] if first else None
        return self.small.put(self.sessions[part], HASHES[first:end], parent)

    def put_all(self, length: int) -> None:
        """As an engine does that skips what no hit of this length needs."""
        self.put(FULL, 0, length)
        self.put(WINDOW, length - WINDOW_BLOCKS, length)
        self.put(STATE, length - 1, length)

    def acquire(self, policy: AcquirePolicy = WAIT, length: int = 10) -> Lease | None:
        return self.small.store.acquire(self.sessions[FULL], HASHES[:length], policy, 10.0)

    def lease(self, policy: AcquirePolicy = WAIT, length: int = 10) -> Lease:
        lease = self.acquire(policy, length)
        assert lease is not None
        return lease

    async def settled(self, lease: Lease) -> Lease:
        while not lease.is_complete:
            assert lease.ready == 0, "a part of an indivisible hit was shown"
            lease = await self.small.store.wait(self.sessions[FULL], lease.id, 0, 10.0)
        self.small.assert_readable(lease)
        return lease

    def drop(self, part: int, numbers: list[int]) -> None:
        """Make tombstones."""
        holdings = self.small.store.holdings
        for number in numbers:
            block = holdings.catalog.blocks[HASHES[number]]
            holdings.give_back(holdings.catalog.drop_part(block, part).slots)
        holdings.publish()

    def evict_all(self) -> None:
        holdings = self.small.store.holdings
        while (victim := holdings.queue.oldest_of_all(holdings.catalog.is_evictable)) is not None:
            holdings.evict(victim)
        holdings.publish()


async def test_a_hit_needs_no_window_part_before_the_window(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(10)
    lease = ranks.lease()
    assert lease.usable == lease.ready == 10
    assert lease.needs.starts == (0, 8, 9)
    small.assert_readable(lease)
    for session in ranks.sessions:
        assert small.store.probe(session, HASHES).hit_blocks == 10


async def test_the_longest_usable_hit_is_lent_and_none_without_its_state(make: Make) -> None:
    ranks = Ranks(make())
    ranks.put_all(6)
    ranks.put(FULL, 6, 10)
    assert ranks.lease().needs.starts == (0, 4, 5)
    assert ranks.lease().usable == 6
    assert ranks.acquire(length=5) is None
    probe = ranks.small.store.probe
    assert probe(ranks.sessions[STATE], HASHES).hit_blocks == 6
    assert probe(ranks.sessions[STATE], HASHES[:5]).hit_blocks == 0
    ranks.put(WINDOW, 6, 10)
    assert ranks.lease().usable == 6, "the state at 10 is not there"
    ranks.put(STATE, 9, 10)
    assert ranks.lease().usable == 10


async def test_the_index_counts_a_block_by_its_full_parts(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put(WINDOW, 0, 4)
    ranks.put(STATE, 0, 4)
    assert small.book.resident[Tier.DRAM] == set()
    ranks.put(FULL, 0, 3)
    assert len(small.book.resident[Tier.DRAM]) == 3
    ranks.drop(WINDOW, [0, 1, 2])
    assert len(small.book.resident[Tier.DRAM]) == 3
    small.check_integrity()


async def test_a_tombstone_can_be_filled_again(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    for part in (FULL, WINDOW, STATE):
        ranks.put(part, 0, 10)
    ranks.drop(WINDOW, [3, 4, 5])
    assert ranks.lease(length=10).usable == 10
    assert ranks.lease(length=6).usable == 3
    staged = small.store.stage(ranks.sessions[WINDOW], HASHES[3:7], HASHES[2])
    assert list(staged.states) == [StageState.GRANTED] * 3 + [StageState.PRESENT]
    small.store.abort(ranks.sessions[WINDOW], staged.stage_id)
    assert ranks.put(WINDOW, 4, 6) == 2
    assert ranks.lease(length=6).usable == 6


@pytest.mark.parametrize("policy", [WAIT, AcquirePolicy.TIMEOUT])
async def test_only_what_a_hit_needs_comes_back_from_ssd(make: Make, policy: AcquirePolicy) -> None:
    small = make(extents=8)
    ranks = Ranks(small)
    for part in (FULL, WINDOW, STATE):
        ranks.put(part, 0, 10)
    await small.flush()
    ranks.evict_all()
    assert ranks.acquire(BEST_EFFORT) is None
    await small.store.lender.promoter.settle()
    lease = await ranks.settled(ranks.lease(policy))
    assert lease.usable == 10
    blocks = [small.store.holdings.catalog.blocks[h] for h in HASHES]
    assert [n for n, b in enumerate(blocks) if b.slots[WINDOW] is not None] == [8, 9]
    assert [n for n, b in enumerate(blocks) if b.slots[STATE] is not None] == [9]
    shorter = await ranks.settled(ranks.lease(policy, 5))
    assert shorter.needs.starts == (0, 3, 4)
    small.check_integrity()


async def test_leases_of_two_lengths_bring_what_each_of_them_needs(make: Make) -> None:
    small = make(extents=8)
    ranks = Ranks(small)
    for part in (FULL, WINDOW, STATE):
        ranks.put(part, 0, 10)
    await small.flush()
    ranks.evict_all()
    longer = ranks.lease()
    shorter = ranks.lease(length=5)  # its last blocks are on their way without their states
    assert (await ranks.settled(shorter)).usable == 5
    assert (await ranks.settled(longer)).usable == 10


async def test_a_dropped_part_comes_back_from_ssd_into_a_block_that_stayed(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(10)
    await small.flush()
    ranks.drop(WINDOW, [8])
    ranks.drop(STATE, [9])
    lease = await ranks.settled(ranks.lease())
    assert lease.usable == 10
    assert small.store.holdings.counters["promoted_blocks"] == 2


async def test_a_part_that_comes_after_the_block_was_written_back_is_written_too(
    make: Make,
) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put(FULL, 0, 10)
    writeback = small.store.writeback
    assert writeback is not None
    writing = asyncio.ensure_future(writeback.write_batch())
    await asyncio.sleep(0)
    ranks.put(WINDOW, 8, 10)  # while the batch is in the thread
    await writing
    ranks.put(STATE, 9, 10)
    await small.flush()
    ranks.evict_all()
    assert (await ranks.settled(ranks.lease())).usable == 10
    await small.close()
    again = Ranks(make())
    assert again.small.store.holdings.blocks_of(Tier.SSD) == 10
    assert again.lease().usable == 10


async def test_a_hit_that_loses_a_block_shrinks_to_one_that_is_usable_as_a_whole(
    make: Make,
) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(4)
    ranks.put(FULL, 4, 10)
    ranks.put(WINDOW, 8, 10)
    ranks.put(STATE, 9, 10)
    await small.flush()
    ranks.evict_all()
    damage(small, HASHES[7])
    lease = ranks.lease()
    assert lease.usable == 10
    lease = await ranks.settled(lease)
    assert lease.usable == 4, "7 blocks are there, but the last state before them is at 4"
    assert lease.needs.starts == (0, 2, 3)


async def test_at_the_deadline_a_hit_is_what_is_readable_as_a_whole(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(10)
    await small.flush()
    ranks.evict_all()
    ranks.put_all(4)  # PRESENT on SSD: stays there
    lease = small.store.acquire(ranks.sessions[FULL], HASHES, WAIT, 0.001)
    assert lease is not None
    small.store.lender._freeze(lease)
    assert lease.is_complete
    assert lease.usable == 0
    await small.store.lender.promoter.settle()
    small.check_integrity()


async def test_both_tiers_recover_tombstones(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(10)
    ranks.put(STATE, 0, 1)
    await small.flush()
    image = small.settings.dram.path.read_bytes()
    await small.close()
    small.settings.dram.path.write_bytes(image)
    again = make()
    assert again.store.holdings.blocks_of(Tier.DRAM) == 10
    assert again.store.holdings.blocks_of(Tier.SSD) == 10
    ranks = Ranks(again)
    lease = await ranks.settled(ranks.lease())
    assert lease.usable == 10


async def test_writing_a_later_part_is_no_proof_of_the_parts_written_before(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put(FULL, 0, 1)
    await small.flush()
    ranks.put(WINDOW, 0, 1)
    ranks.put(STATE, 0, 1)
    slot = small.store.holdings.catalog.blocks[HASHES[0]].slots[FULL]
    assert slot is not None
    image = bytearray(small.settings.dram.path.read_bytes())
    image[slot.offset + 100] ^= 1  # by whoever wrote where they should not, before a kill
    await small.close()
    small.settings.dram.path.write_bytes(image)
    again = make()
    block = again.store.holdings.catalog.blocks[HASHES[0]]
    again.store.writeback.committed(block)  # type: ignore[union-attr]
    await again.flush()
    assert block.is_saved
    assert not block.is_verified
    ranks = Ranks(again)
    lease = ranks.lease(length=1)
    assert lease.ready == 0
    lease = await again.store.wait(ranks.sessions[FULL], lease.id, 0, 10.0)
    assert lease.usable == 0
    assert again.store.holdings.counters["corrupt_blocks"] == 1


async def test_peers_get_whole_blocks_only(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put(FULL, 0, 10)
    ranks.put(WINDOW, 0, 10)
    ranks.put(STATE, 0, 10)
    grant = await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    assert grant.usable_blocks == 10
    small.store.peer_release(grant.lease_id)
    ranks.drop(STATE, [4])
    grant = await small.store.peer_acquire(NAMESPACE.id, HASHES, 5.0, "node-2")
    assert grant.usable_blocks == 4
    assert len(grant.ranges) == 12
    small.store.peer_release(grant.lease_id)


class OnePeer:
    """Sends the first `held` blocks, and nothing after them."""

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
        with self._small.pool.view() as view:
            for number, ranges in enumerate(room.ranges):
                contents = [payload(run[number], p, r.length) for p, r in enumerate(ranges)]
                for place, content in zip(ranges, contents, strict=True):
                    view[place.offset : place.offset + place.length] = content
                room.land(number, [checksum(content) for content in contents])
        room.close()
        return len(room.ranges)


@pytest.mark.parametrize("held", [0, 3, 5, 10])
async def test_what_a_peer_sends_makes_a_longer_hit(make: Make, held: int) -> None:
    small = make(extents=8)
    ranks = Ranks(small)
    ranks.put_all(4)
    small.store.set_puller(OnePeer(small, held))
    lease = ranks.lease()
    assert lease.usable == 10
    lease = await ranks.settled(lease)
    assert lease.usable == max(4, held)
    assert lease.needs == ranks.sessions[FULL].own.needs(lease.usable)


async def test_window_parts_nobody_needs_go_before_any_block(make: Make) -> None:
    small = make(extents=8, ssd_segments=0)
    ranks = Ranks(small)
    for part in (FULL, WINDOW, STATE):
        ranks.put(part, 0, 10)
    lease = ranks.lease()
    small.store.release(ranks.sessions[FULL], [lease.id])
    holdings = small.store.holdings
    dropped = []
    while holdings.counters["evicted_blocks"] == 0:
        part = holdings.catalog.old_parts.oldest_of_all(holdings.catalog.may_lose_part)
        victim = holdings.queue.oldest_of_all(holdings.catalog.is_evictable)
        assert victim is not None
        if part is None or part.access >= victim.access:
            holdings.evict(victim)
            holdings.publish()
        else:
            dropped.append((HASHES.index(part.block.hash), part.part))
            holdings.drop_part(part)
    assert dropped == [(n, WINDOW) for n in range(8)] + [(n, STATE) for n in range(9)]
    assert holdings.counters["evicted_parts"] == 17


async def test_leased_parts_are_not_dropped(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put_all(10)
    ranks.lease()
    catalog = small.store.holdings.catalog
    assert catalog.old_parts.oldest_of_all(catalog.may_lose_part) is None


async def test_a_full_pool_makes_tombstones_before_it_takes_a_block(make: Make) -> None:
    small = make(extents=4, ssd_segments=0)
    ranks = Ranks(small)
    ranks.put(FULL, 0, 7)
    ranks.put(STATE, 6, 7)
    for number in range(7):
        assert ranks.put(WINDOW, number, number + 1) == 1
    small.store.release(ranks.sessions[FULL], [ranks.lease().id])
    window, counters = ranks.sessions[WINDOW], small.store.holdings.counters
    for number, block_hash in enumerate(chain(NAMESPACE, 60, seed=3)):
        assert small.store.stage(window, [block_hash], None).stage_id, f"no room for {number}"
        if counters["evicted_parts"] == 5:
            break
        assert counters["evicted_blocks"] == 0
        lease = ranks.lease(length=7)
        assert lease.usable == 7
        small.store.release(ranks.sessions[FULL], [lease.id])
    blocks = [small.store.holdings.catalog.blocks[h] for h in HASHES[:7]]
    assert [n for n, block in enumerate(blocks) if block.slots[WINDOW] is not None] == [5, 6]
    assert ranks.lease(length=7).usable == 7


@pytest.mark.parametrize("seed", [0, 2])
async def test_room_for_windows_is_not_taken_from_what_was_asked_for_last(
    make: Make, seed: int
) -> None:
    """Slots of a kind lie in extents, and an extent that moves to another kind is lost whole."""
    window = Group(GroupKind.SLIDING_WINDOW, 1, 4000, window_tokens=10)
    namespace = hybrid_namespace(window, window, Group(GroupKind.FULL, 1, 4000))
    small = make(extents=24, ssd_segments=0)
    sessions = [small.open(namespace, part) for part in range(3)]
    rng = random.Random(seed)

    def ask(hashes: Sequence[BlockHash]) -> int:
        """As an engine does that saves what it did not find; returns what it found."""
        lease = small.store.acquire(sessions[0], hashes, WAIT, 10.0)
        found = 0
        if lease is not None:
            found = lease.usable
            small.store.release(sessions[0], [lease.id])
        size = rng.choice([1, 2, 4, 16, 64])
        for first in range(found, len(hashes), size):
            for session in sessions:
                parent = hashes[first - 1] if first else None
                small.put(session, hashes[first : first + size], parent)
        return found

    for number in range(25):
        kept = chain(namespace, 31, seed=1000 + number // 7)
        found = ask(kept)
        assert found == 31 or number % 7 == 0, f"{found} of 31 blocks in round {number}"
        for more in range(rng.choice([1, 1, 2])):
            ask(chain(namespace, rng.choice([19, 19, 2, 10]), seed=10_000 + 2 * number + more))
    assert small.store.holdings.counters["evicted_parts"] > 0, "the pool was never full"


async def test_a_peer_that_waits_for_no_drive_is_lent_no_part_that_is_on_one(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    for part in range(NAMESPACE.parts):
        ranks.put(part, 0, 3)
    await small.flush()
    ranks.drop(WINDOW, [1])
    for ready_only, usable in ((True, 1), (False, 3)):
        grant = await small.store.peer_acquire(
            NAMESPACE.id, HASHES[:3], 5.0, "node-2", ready_only=ready_only
        )
        assert grant.usable_blocks == usable
        if grant.lease_id:
            small.store.peer_release(grant.lease_id)


async def test_a_quarantined_block_takes_no_more_parts(make: Make) -> None:
    small = make()
    ranks = Ranks(small)
    ranks.put(FULL, 0, 1)
    window: Session = ranks.sessions[WINDOW]
    staged = small.store.stage(window, HASHES[:1], None)
    block = small.store.holdings.catalog.blocks[HASHES[0]]
    small.store.holdings.quarantine(block)
    small.store.holdings.publish()
    small.check_integrity()
    assert small.store.commit(window, staged.stage_id, HASHES[:1], [1]) == 1
    assert small.store.holdings.catalog.blocks == {}
    assert small.store.holdings.pool.slots.used_bytes == 0


def damage(small: SmallStore, block_hash: BlockHash) -> None:
    row = small.store.holdings.catalog.blocks[block_hash].rows[FULL]
    assert row is not None
    assert small.ssd is not None
    with small.ssd.segment_path(row).open("r+b") as file:
        file.seek(row.offset + 4096 + 100)
        file.write(b"damage")
