"""What the owner of blocks does for other nodes: waits for blocks to come, reads SSD through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from emberkv_proto.types import AcquirePolicy, Tier
from store_daemon.expected import MAX_WAITING, Expected
from tests.helpers.store import SmallStore, chain, small_namespace
from tests.helpers.store_steps import on_ssd_only

SPACE = small_namespace(part_bytes=15000)  # three blocks an extent of 64 KiB
HASHES = chain(SPACE, 4)


@pytest_asyncio.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    store = SmallStore(tmp_path, extents=3)
    yield store
    store.check_integrity()
    await store.close()


async def ask(small: SmallStore, wait_seconds: float, first: int = 0) -> int:
    """How many blocks a peer is lent."""
    grant = await small.store.peer_acquire(SPACE.id, HASHES[first:], 5.0, "node-2", wait_seconds)
    if grant.lease_id:
        small.store.peer_release(grant.lease_id)
    return grant.usable_blocks


async def test_peer_that_waits_gets_a_block_when_it_is_committed(small: SmallStore) -> None:
    session = small.open(SPACE)
    small.put(session, HASHES[:1])
    asking = asyncio.create_task(ask(small, 20.0, first=1))
    await asyncio.sleep(0.02)
    assert not asking.done()
    small.check_integrity()
    small.put(session, HASHES[1:3], parent=HASHES[0])
    assert await asking >= 1


async def test_peer_does_not_wait_for_longer_than_it_said(small: SmallStore) -> None:
    small.open(SPACE)
    assert await ask(small, 0.05) == 0
    assert await ask(small, 0.0) == 0


async def test_peer_that_goes_away_while_it_waits_leaves_nothing(small: SmallStore) -> None:
    small.open(SPACE)
    asking = asyncio.create_task(ask(small, 20.0))
    await asyncio.sleep(0.02)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    small.check_integrity()
    small.put(small.open(SPACE), HASHES)
    assert await ask(small, 0.0) == 4


async def test_no_more_wait_than_are_allowed() -> None:
    expected = Expected()
    waiting = [asyncio.create_task(expected.wait(HASHES[0], 20.0)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    expected.check_integrity()
    await asyncio.wait_for(expected.wait(HASHES[1], 20.0), 30)
    expected.arrived(HASHES[0])
    await asyncio.gather(*waiting)
    expected.check_integrity()


async def test_blocks_read_for_a_peer_leave_dram_with_its_lease_when_room_is_scarce(
    small: SmallStore,
) -> None:
    session = await on_ssd_only(small, SPACE, HASHES)
    mine = chain(SPACE, 4, seed=1)
    small.put(session, mine)
    await small.flush()
    holdings = small.store.holdings
    grant = await small.store.peer_acquire(SPACE.id, HASHES, 5.0, "node-2")
    assert grant.usable_blocks == 4
    small.put(session, chain(SPACE, 1, seed=2))
    assert holdings.is_over_low_watermark
    small.store.peer_release(grant.lease_id)
    assert holdings.counters["read_through_blocks"] == 4
    blocks = holdings.catalog.blocks
    assert not any(blocks[h].in_dram for h in HASHES)
    assert all(blocks[h].in_dram for h in mine)
    assert holdings.blocks_of(Tier.SSD) == 8, "they are on SSD still"


async def test_blocks_read_for_a_peer_stay_while_there_is_room(small: SmallStore) -> None:
    await on_ssd_only(small, SPACE, HASHES)
    assert await ask(small, 0.0) == 4
    assert all(small.store.holdings.catalog.blocks[h].in_dram for h in HASHES)
    assert small.store.holdings.counters["read_through_blocks"] == 0


async def test_peer_that_wants_what_is_ready_waits_for_no_drive(small: SmallStore) -> None:
    session = await on_ssd_only(small, SPACE, HASHES)
    grant = await small.store.peer_acquire(SPACE.id, HASHES, 5.0, "node-2", ready_only=True)
    assert (grant.lease_id, grant.usable_blocks) == (0, 0)
    assert not any(small.store.holdings.catalog.blocks[h].in_dram for h in HASHES)
    mine = chain(SPACE, 2, seed=1)
    small.put(session, mine)
    grant = await small.store.peer_acquire(SPACE.id, mine, 5.0, "node-2", ready_only=True)
    assert grant.usable_blocks == 2
    small.store.peer_release(grant.lease_id)
    small.check_integrity()


async def test_block_that_somebody_reads_here_too_stays(small: SmallStore) -> None:
    session = await on_ssd_only(small, SPACE, HASHES)
    small.put(session, chain(SPACE, 4, seed=1))
    grant = await small.store.peer_acquire(SPACE.id, HASHES, 5.0, "node-2")
    lease = small.store.lender.acquire(
        session.id,
        session.own,
        HASHES[:2],
        AcquirePolicy.BEST_EFFORT,
        0.0,
        small.store.replica_arrivals,
    )
    assert lease is not None
    small.put(session, chain(SPACE, 1, seed=2))
    small.store.peer_release(grant.lease_id)
    assert [small.store.holdings.catalog.blocks[h].in_dram for h in HASHES] == [
        True,
        True,
        False,
        False,
    ]
    small.store.release(session, [lease.id])
