"""Events over real ZMQ sockets, read with vLLM's own classes, against what the store holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from emberkv_proto.errors import PreflightError
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import AcquirePolicy, Tier
from store_daemon import kv_events, kv_outlet
from store_daemon.config import EventsSection
from store_daemon.kv_events import RemovedBlocks, StoredBlocks, StoredRun, cut, encode_message
from store_daemon.kv_outlet import KvEventOutlet
from tests.helpers.kv_listener import KvListener
from tests.helpers.store import BLOCK_TOKENS, SmallStore, chain, small_namespace
from tests.helpers.waiting import until

NAMESPACE = small_namespace()


def section(**changes: Any) -> EventsSection:
    return EventsSection(
        **{
            "zmq_endpoint": "tcp://127.0.0.1:*",
            "zmq_replay_endpoint": "tcp://127.0.0.1:*",
            **changes,
        }
    )


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    small = SmallStore(tmp_path, extents=2, ssd_segments=6)
    yield small
    if not small.is_closed:
        small.check_integrity()
        await small.close()


@asynccontextmanager
async def publishing(small: SmallStore, **changes: Any) -> AsyncIterator[KvEventOutlet]:
    holdings = small.store.holdings
    outlet = KvEventOutlet(section(**changes), holdings.catalog, holdings.counters)
    outlet.start()
    holdings.teller = outlet.tell
    try:
        yield outlet
        outlet.check_integrity()
    finally:
        holdings.teller = None
        await outlet.close()


def sent(small: SmallStore) -> int:
    return small.store.holdings.counters["kv_event_messages"]


async def quiet(small: SmallStore, outlet: KvEventOutlet) -> int:
    """Wait until all was sent; how many messages that were."""
    await until(lambda: not outlet._pending)
    return sent(small)


def keys_of(small: SmallStore, tier: Tier) -> set[int]:
    return {int(key) for key in small.store.resident_keys(tier)}


def assert_agrees(small: SmallStore, listener: KvListener) -> None:
    assert listener.resident["CPU"] == keys_of(small, Tier.DRAM)
    assert listener.resident["STORAGE"] == keys_of(small, Tier.SSD)


async def test_a_late_listener_knows_all_and_follows_what_comes(small: SmallStore) -> None:
    session = small.open(NAMESPACE)
    hashes = chain(NAMESPACE, 6)
    small.put(session, hashes[:4])
    await small.flush()
    async with publishing(small, zmq_topic="kv@h:1@m") as outlet:
        small.put(session, hashes[4:], hashes[3])
        await quiet(small, outlet)
        async with KvListener(outlet.endpoint, outlet.replay_endpoint) as listener:
            assert await listener.catch_up() == sent(small)
            assert_agrees(small, listener)
            assert (listener.clears, listener.topics, listener.sizes) == (
                1,
                {b"kv@h:1@m"},
                {BLOCK_TOKENS},
            )
            keys = index_keys(hashes).tolist()
            assert [listener.parents[key] for key in keys] == [None, *keys[:-1]]
            await small.flush()
            await small.store.operations.clear(None, None)
            await listener.follow(await quiet(small, outlet))
            assert_agrees(small, listener)
            assert listener.missed == []


async def test_stored_minus_removed_is_resident_through_eviction_and_promotion(
    small: SmallStore,
) -> None:
    choose = random.Random(7)
    session = small.open(NAMESPACE)
    chains = [chain(NAMESPACE, 6, seed) for seed in range(8)]
    async with (
        publishing(small) as outlet,
        KvListener(outlet.endpoint, outlet.replay_endpoint) as listener,
    ):
        await quiet(small, outlet)
        await listener.catch_up()
        for _ in range(60):
            hashes = choose.choice(chains)
            if choose.random() < 0.6:
                small.put(session, hashes[: choose.randrange(1, 7)])
            else:
                lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 0.2)
                await asyncio.sleep(0.02)
                if lease is not None:
                    small.store.release(session, [lease.id])
            if choose.random() < 0.3:
                await small.flush()
        await small.store.lender.promoter.settle()
        await listener.follow(await quiet(small, outlet))
        assert_agrees(small, listener)
        assert keys_of(small, Tier.SSD) - keys_of(small, Tier.DRAM), "nothing was evicted"
        assert listener.missed == []


async def test_blocks_that_sleep_after_a_restart_are_named_with_their_size(
    small: SmallStore, tmp_path: Path
) -> None:
    hashes = chain(NAMESPACE, 8)
    small.put(small.open(NAMESPACE), hashes)
    await small.flush()
    await small.close()
    again = SmallStore(tmp_path, extents=2, ssd_segments=6, boot_id=b"b" * 16)
    try:
        assert again.store.holdings.catalog.sleeping is not None
        async with (
            publishing(again) as outlet,
            KvListener(outlet.endpoint, outlet.replay_endpoint) as listener,
        ):
            await quiet(again, outlet)
            await listener.catch_up()
            assert listener.resident["STORAGE"] == set(index_keys(hashes).tolist())
            assert listener.sizes == {BLOCK_TOKENS}
    finally:
        await again.close()


async def test_a_listener_that_missed_messages_gets_them_from_where_it_asks(
    small: SmallStore,
) -> None:
    session = small.open(NAMESPACE)
    async with publishing(small) as outlet:
        for seed in range(3):
            small.put(session, chain(NAMESPACE, 2, seed))
            await quiet(small, outlet)
        last = sent(small)
        async with KvListener(outlet.endpoint, outlet.replay_endpoint) as listener:
            listener.next = last - 1
            assert await listener.catch_up(last - 1) == 1
            assert listener.resident["CPU"] == set(index_keys(chain(NAMESPACE, 2, 2)).tolist())
            assert await listener.catch_up(last) == 0
        assert small.store.holdings.counters["kv_event_replays"] == 2


async def test_only_the_newest_messages_are_kept_by_count_and_by_bytes(small: SmallStore) -> None:
    session = small.open(NAMESPACE)
    for begin, limit in ((100, {"buffer_messages": 3}), (200, {"buffer_bytes": 400})):
        async with (
            publishing(small, **limit) as outlet,
            KvListener(outlet.endpoint, outlet.replay_endpoint) as listener,
        ):
            for seed in range(8):
                small.put(session, chain(NAMESPACE, 1, begin + seed))
                await quiet(small, outlet)
            got = await listener.catch_up()
            assert 0 < got <= 3
            assert listener.missed == [0]


async def test_a_sender_that_falls_behind_clears_and_begins_anew(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_outlet, "MAX_PENDING_HASHES", 5)
    monkeypatch.setattr(kv_outlet, "BATCH_SECONDS", 0.3)
    session = small.open(NAMESPACE)
    async with (
        publishing(small) as outlet,
        KvListener(outlet.endpoint, outlet.replay_endpoint) as listener,
    ):
        for seed in range(6):
            small.put(session, chain(NAMESPACE, 2, seed))
        await quiet(small, outlet)
        await listener.catch_up()
        assert_agrees(small, listener)
        assert small.store.holdings.counters["kv_event_resyncs"] >= 1


async def test_nonsense_on_the_replay_socket_is_counted_and_answered_by_nobody(
    small: SmallStore,
) -> None:
    async with publishing(small) as outlet:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.connect(outlet.replay_endpoint)
            for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                await dealer.send_multipart(frames)
            counters = small.store.holdings.counters
            await until(lambda: counters["kv_event_bad_requests"] == 4)
            async with KvListener(outlet.endpoint, outlet.replay_endpoint) as listener:
                assert await listener.catch_up() == 1
        finally:
            context.destroy(linger=0)


async def test_a_port_that_is_taken_names_its_setting(small: SmallStore) -> None:
    async with publishing(small) as outlet:
        for name in ("zmq_endpoint", "zmq_replay_endpoint"):
            taken = {name: getattr(outlet, name.removeprefix("zmq_"))}
            second = KvEventOutlet(section(**taken), small.store.holdings.catalog, Counter())
            with pytest.raises(PreflightError, match=rf"set events\.{name}"):
                second.start()


def test_long_records_are_cut_and_a_chain_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES_PER_EVENT", 2)
    run = [*cut(StoredRun(Tier.DRAM, [1, 2, 3, 4, 5], 9, 64))]
    assert [(piece.keys, piece.parent) for piece in run if isinstance(piece, StoredRun)] == [
        ([1, 2], 9),
        ([3, 4], 2),
        ([5], 4),
    ]
    keys = np.array([1, 2, 3], np.uint64)
    loose = [*cut(StoredBlocks(Tier.SSD, keys, 64)), *cut(RemovedBlocks(Tier.SSD, keys))]
    assert [len(piece.keys) for piece in loose if not isinstance(piece, StoredRun)] == [2, 1, 2, 1]
    assert encode_message(loose, 1.0)


@pytest.mark.parametrize("endpoint", ["inproc://x", "tcp://h", "h:1", "tcp://h:1/x", "ipc://a b"])
def test_an_endpoint_that_cannot_be_bound_is_refused_in_the_settings(endpoint: str) -> None:
    with pytest.raises(ValueError, match="neither tcp"):
        EventsSection(zmq_endpoint=endpoint)
    with pytest.raises(ValueError, match="nothing is published"):
        EventsSection(zmq_replay_endpoint="tcp://127.0.0.1:1")
