"""A run of blocks is staged and committed in one pass, and ends as block by block it would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberkv_proto.types import BlockHash, StageState, Tier
from store_daemon.sessions import Session
from tests.helpers.store import SmallStore, chain, small_namespace

NAMESPACE = small_namespace()
SLOT_BYTES = 8192


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    store = SmallStore(tmp_path, ssd_segments=0)
    yield store
    store.store.check_integrity()
    await store.close()


@pytest.fixture
def session(small: SmallStore) -> Session:
    return small.open(NAMESPACE)


async def test_a_fresh_run_gets_neighbouring_slots(small: SmallStore, session: Session) -> None:
    hashes = chain(NAMESPACE, 5)
    staged = small.store.stage(session, hashes, None)
    assert staged.states == bytes([StageState.GRANTED]) * 5
    assert staged.offsets == [staged.offsets[0] + n * SLOT_BYTES for n in range(5)]
    small.store.check_integrity()
    small.store.commit(session, staged.stage_id, hashes, [7] * 5)
    assert small.store.probe(session, hashes).hit_blocks == 5


async def test_a_run_evicted_and_written_anew_gets_neighbours_again(
    small: SmallStore, session: Session
) -> None:
    hashes = chain(NAMESPACE, 6)
    small.put(session, hashes)
    for block in [small.store.holdings.catalog.blocks[h] for h in reversed(hashes)]:
        small.store.holdings.evict(block)
    staged = small.store.stage(session, hashes, None)
    assert staged.offsets == [staged.offsets[0] + n * SLOT_BYTES for n in range(6)]


async def test_a_run_with_holes_is_granted_where_it_is_absent(
    small: SmallStore, session: Session
) -> None:
    hashes = chain(NAMESPACE, 6)
    small.put(session, hashes[:2])
    small.store.stage(small.open(NAMESPACE), hashes[:4], None)
    staged = small.store.stage(session, hashes, None)
    present, written, granted = (
        StageState.PRESENT,
        StageState.IN_PROGRESS,
        StageState.GRANTED,
    )
    assert list(staged.states) == [present, present, written, written, granted, granted]
    assert [offset > 0 for offset in staged.offsets] == [False] * 4 + [True] * 2
    assert len(set(staged.offsets[4:])) == 2


async def test_a_run_larger_than_the_pool_gets_what_there_is(
    small: SmallStore, session: Session
) -> None:
    slots = small.store.holdings.pool.slots
    capacity = slots.extent_count * 7
    hashes = chain(NAMESPACE, capacity + 3)
    staged = small.store.stage(session, hashes, None)
    granted = staged.states.count(StageState.GRANTED)
    assert staged.states == bytes([StageState.GRANTED]) * granted + bytes([StageState.NO_SPACE]) * (
        len(hashes) - granted
    )
    assert 0 < granted < len(hashes)
    small.store.check_integrity()


async def test_a_run_that_names_its_own_tail_as_ancestor_leans_on_nobody_there(
    small: SmallStore, session: Session
) -> None:
    first, second, third = chain(NAMESPACE, 3)
    small.put(session, [third], parent=second)
    small.put(session, [first, second], parent=third)  # forged: second -> third -> second
    small.store.check_integrity()
    blocks = small.store.holdings.catalog.blocks
    assert not all(blocks[block_hash].leans for block_hash in (first, second, third))
    evicted: list[BlockHash] = []
    while (
        victim := small.store.holdings.queue.oldest_of_all(
            small.store.holdings.catalog.is_evictable
        )
    ) is not None:
        evicted.append(victim.hash)
        small.store.holdings.evict(victim)
    small.store.holdings.publish()
    assert set(evicted) == {first, second, third}


async def test_a_commit_of_some_leaves_the_others_staged(
    small: SmallStore, session: Session
) -> None:
    hashes = chain(NAMESPACE, 4)
    staged = small.store.stage(session, hashes, None)
    small.store.commit(session, staged.stage_id, hashes[1:3], [1, 2])
    small.store.check_integrity()
    assert small.store.probe(session, hashes).tiers == bytes([0, 4, 4, 0])
    small.store.commit(session, staged.stage_id, [hashes[0], hashes[3]], [3, 4])
    assert small.store.probe(session, hashes).hit_blocks == 4
    assert len(small.book.resident[Tier.DRAM]) == 4
