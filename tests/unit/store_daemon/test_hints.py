"""Chains that routers want in DRAM: from SSD, from where the index says, from who computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from emberkv_proto.errors import DrainingError, UnknownNamespaceError
from emberkv_proto.types import NamespaceId, NodeId
from store_daemon.ports import Followed
from tests.helpers.gated_peer import GatedPeer
from tests.helpers.store import SmallStore, chain, small_namespace
from tests.helpers.store_steps import on_ssd_only, until

SPACE = small_namespace()
HASHES = chain(SPACE, 12)


@pytest_asyncio.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    store = SmallStore(tmp_path)
    yield store
    store.check_integrity()
    await store.close()


async def test_hint_brings_a_chain_from_ssd_and_ends(small: SmallStore) -> None:
    await on_ssd_only(small, SPACE, HASHES)
    hinted = small.store.hint(SPACE.id, HASHES, 30.0, None)
    assert (hinted.scheduled_blocks, hinted.is_done) == (12, False)
    await hinted.ended(20.0)
    assert (hinted.readable_blocks(), hinted.is_done) == (12, True)
    again = small.store.hint(SPACE.id, HASHES, 30.0, None)
    assert (again.scheduled_blocks, again.readable_blocks(), again.is_done) == (0, 12, True)
    again.cancel()


async def test_hint_pulls_what_is_not_here_as_a_replica(small: SmallStore) -> None:
    small.put(small.open(SPACE), HASHES[:2])
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    hinted = small.store.hint(SPACE.id, HASHES, 30.0, None)
    assert hinted.scheduled_blocks == 10
    peer.let_through(10)
    await hinted.ended(20.0)
    assert hinted.readable_blocks() == 12
    assert (peer.asked, peer.followed) == (1, [])
    assert len(small.store.holdings.replicas) == 10
    assert small.store.holdings.counters["hints"] == 1


async def test_followed_chain_arrives_block_by_block_and_is_our_own(small: SmallStore) -> None:
    small.open(SPACE)
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    followed = Followed(NodeId("prefill"), 5.0)
    hinted = small.store.hint(SPACE.id, HASHES, 30.0, followed)
    peer.let_through(3)
    await until(lambda: hinted.readable_blocks() == 3, "three blocks come")
    assert not hinted.is_done
    peer.let_through(9)
    await hinted.ended(20.0)
    assert hinted.readable_blocks() == 12
    assert (peer.asked, peer.followed) == (0, [followed])
    assert len(small.store.holdings.replicas) == 0
    assert small.store.holdings.counters["handovers"] == 1


async def test_a_session_follows_a_node_too(small: SmallStore) -> None:
    session = small.open(SPACE)
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    followed = Followed(NodeId("prefill"), 5.0)
    scheduled = small.store.prefetch(session, HASHES, 30.0, followed)
    assert scheduled.blocks == 12
    peer.let_through(12)
    await until(lambda: small.store.probe(session, HASHES).hit_blocks == 12, "all blocks come")
    assert (peer.asked, peer.followed) == (0, [followed])
    assert len(small.store.holdings.replicas) == 0
    assert small.store.holdings.counters["handovers"] == 1


async def test_cancelled_hint_ends_its_pull_and_keeps_what_came(small: SmallStore) -> None:
    small.open(SPACE)
    peer = GatedPeer(small)
    small.store.set_puller(peer)
    hinted = small.store.hint(SPACE.id, HASHES, 30.0, None)
    peer.let_through(4)
    await until(lambda: peer.landed == 4, "four blocks come")
    hinted.cancel()
    await until(lambda: peer.cancelled == 1, "the pull ends")
    assert (hinted.is_done, hinted.readable_blocks()) == (True, 4)
    hinted.cancel()
    await asyncio.sleep(0)


async def test_hint_of_a_namespace_that_nobody_opened_here_is_refused(small: SmallStore) -> None:
    with pytest.raises(UnknownNamespaceError):
        small.store.hint(NamespaceId(bytes(16)), HASHES, 30.0, None)


async def test_draining_daemon_takes_no_hint(small: SmallStore) -> None:
    small.open(SPACE)
    small.store.drain()
    with pytest.raises(DrainingError):
        small.store.hint(SPACE.id, HASHES, 30.0, None)
