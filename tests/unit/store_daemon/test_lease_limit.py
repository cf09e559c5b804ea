from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberkv_proto.errors import PoolFullError
from emberkv_proto.types import AcquirePolicy, StageState
from store_daemon.config import DaemonSection
from store_daemon.leases import PEERS
from tests.helpers.store import SmallStore, chain, small_namespace

SPACE = small_namespace(5000)
SLOTS = 6 * 65536 // 8192
NOW = AcquirePolicy.BEST_EFFORT


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    """A session may lease a quarter of the pool's 48 slots' worth of bytes: 12 blocks."""
    settings = DaemonSection(data_dir=tmp_path / "data", lease_share=0.25)
    small = SmallStore(tmp_path, settings=settings)
    yield small
    small.check_integrity()
    await small.close()


async def test_a_session_gets_shorter_hits_and_then_none_at_its_limit(small: SmallStore) -> None:
    session, other = small.open(SPACE), small.open(SPACE)
    hashes, more = chain(SPACE, 10, 1), chain(SPACE, 10, 2)
    small.put(session, hashes)
    small.put(session, more)
    first = small.store.acquire(session, hashes, NOW, 1.0)
    second = small.store.acquire(session, more, NOW, 1.0)
    assert first is not None
    assert second is not None
    assert (first.usable, second.usable) == (10, 2)
    counters = small.store.holdings.counters
    assert counters["lease_limited_blocks"] == 8
    for _ in range(50):  # heartbeats keep what it has, and get it no more
        small.clock.now += 5.0
        small.store.heartbeat(session)
        small.store.tick()
    with pytest.raises(PoolFullError, match=r"98304 bytes.*daemon\.lease_share"):
        small.store.acquire(session, more[2:], NOW, 1.0)
    assert counters["lease_limited_blocks"] == 16
    theirs = small.store.acquire(other, more, NOW, 1.0)
    assert theirs is not None
    assert theirs.usable == 10
    small.store.release(session, [first.id])
    third = small.store.acquire(session, more, NOW, 1.0)
    assert third is not None
    assert third.usable == 10


async def test_a_prefix_that_many_leases_share_counts_once(small: SmallStore) -> None:
    session = small.open(SPACE)
    hashes = chain(SPACE, 12)
    small.put(session, hashes)
    for _ in range(20):
        lease = small.store.acquire(session, hashes, NOW, 1.0)
        assert lease is not None
        assert lease.usable == 12
    assert len(small.store.lender.leases.of(session.id)) == 20
    assert small.store.holdings.counters["lease_limited_blocks"] == 0


async def test_a_session_stages_no_more_than_its_share_until_it_commits(small: SmallStore) -> None:
    session, other = small.open(SPACE), small.open(SPACE)
    first, more = chain(SPACE, 8, 1), chain(SPACE, 8, 2)
    one = small.store.stage(session, first, None)
    assert small.store.stage(session, more, None).states == bytes([StageState.GRANTED] * 4) + bytes(
        [StageState.NO_SPACE] * 4
    )
    for _ in range(50):
        small.clock.now += 5.0
        small.store.heartbeat(session)
        small.store.tick()
    none = small.store.stage(session, more[4:], more[3])
    assert (none.stage_id, none.offsets) == (0, [0] * 4)
    assert small.put(other, more[4:], more[3]) == 4
    small.check_integrity()
    small.store.abort(session, one.stage_id)
    assert small.put(session, first) == 8


async def test_peers_are_bound_by_time_and_not_by_this_limit(small: SmallStore) -> None:
    session = small.open(SPACE)
    hashes = chain(SPACE, 20)
    small.put(session, hashes[:10])
    small.put(session, hashes[10:], hashes[9])
    grant = await small.store.peer_acquire(SPACE.id, hashes, 1.0, "node-2")
    assert grant.usable_blocks == 20
    assert len(small.store.lender.leases.of(PEERS)) == 1
    small.store.peer_release(grant.lease_id)
