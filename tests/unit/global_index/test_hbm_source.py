"""Engines whose events come over real sockets, get lost, restart or make no sense."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from client_sdk.index_client import IndexClient
from emberkv_proto.events import Keys
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineHit, EngineInfo, NamespaceId, NodeHit, NodeId, Tier
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.hbm import followers
from global_index.hbm.engines import EngineView, StreamState
from global_index.hbm.source import EngineSource, ReplayTimes
from global_index.metrics import IndexMetrics
from global_index.service import start_server
from tests.helpers.event_publisher import CLEARED, EventPublisher, removed, stored
from tests.helpers.model_daemon import ModelDaemon, ModelServer
from tests.helpers.waiting import until

SPACE = NamespaceId(b"n" * 16)
PROMPT = list(range(40))
CHAIN: Keys = index_keys(block_hashes(SPACE, PROMPT, 4))
URL = "http://127.0.0.1:8000"


def settings_of(publisher: EventPublisher, **changes: Any) -> dict[str, Any]:
    return {
        "engine_id": "e1",
        "url": URL,
        "events": publisher.events_endpoint,
        "replay": publisher.replay_endpoint,
        "block_tokens": 4,
        "namespace_id": SPACE.hex(),
        **changes,
    }


@asynccontextmanager
async def following(*engines: dict[str, Any], **changes: Any) -> AsyncIterator[GlobalIndex]:
    values: dict[str, Any] = {
        "capacity_blocks": 100_000,
        "suspect_seconds": 0.4,
        "gone_seconds": 60.0,
        "backend": "python",
        "engines": engines,
    }
    async with GlobalIndex(IndexSection(**(values | changes))) as index:
        yield index
        index.check_integrity()
    index.check_integrity()
    assert index.faults == 0


def hbm(index: GlobalIndex) -> int:
    """Blocks of the prompt that the one engine has, 0 when it is in no answer."""
    return next((hit.hbm_blocks for hit in index.hits(CHAIN).engines), 0)


def view(index: GlobalIndex) -> EngineView:
    (engine,) = index.engines()
    return engine


def is_current(index: GlobalIndex) -> bool:
    return [engine.state for engine in index.engines()] == [StreamState.CURRENT]


def blocks(first: int, count: int) -> dict[str, Any]:
    """Blocks of the prompt; the engine calls block n 100 + n."""
    return stored(
        [100 + n for n in range(first, first + count)],
        PROMPT[4 * first : 4 * (first + count)],
        99 + first if first else None,
    )


@pytest.fixture
async def publisher() -> AsyncIterator[EventPublisher]:
    async with EventPublisher() as publisher:
        yield publisher


async def test_what_was_said_before_is_asked_for_and_what_comes_is_followed(
    publisher: EventPublisher,
) -> None:
    publisher.drop(blocks(0, 3))
    async with following(settings_of(publisher)) as index:
        await until(lambda: hbm(index) == 3)
        assert index.hits(CHAIN).engines == (EngineHit("e1", 0, URL, NodeId(""), 3, 3, 0, 0),)
        await publisher.publish(blocks(3, 4), removed(106))
        await until(lambda: hbm(index) == 6)
        await publisher.publish(CLEARED)
        await until(lambda: hbm(index) == 0)
        assert is_current(index)
        assert publisher.replays == [0]
        assert view(index).streamed.gaps == 0


@pytest.mark.parametrize("is_old", [True, False])
async def test_lost_messages_are_had_again_and_cost_nothing(
    publisher: EventPublisher, is_old: bool
) -> None:
    publisher.is_old = is_old
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)
        publisher.drop(blocks(2, 2))
        publisher.drop(blocks(4, 2))
        await publisher.publish(blocks(6, 1))
        await until(lambda: hbm(index) == 7)
        counts = view(index).streamed
        assert (counts.gaps, counts.lost, counts.restarts) == (1, 0, 0)
        assert publisher.replays[-1] == 0, "asked from the newest that is known, as proof"


async def test_what_no_replay_has_empties_the_rows_but_not_the_chain(
    publisher: EventPublisher,
) -> None:
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 3))
        await until(lambda: hbm(index) == 3)
        publisher.drop(removed(100))
        publisher.buffer.clear()
        await publisher.publish(blocks(3, 1))
        await until(lambda: view(index).digest.blocks == 1)
        assert hbm(index) == 0
        await publisher.publish(blocks(0, 3))
        await until(lambda: hbm(index) == 4)
        assert view(index).streamed.lost == 1


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_restarted_engine_has_an_empty_cache(has_replay: bool) -> None:
    async with (
        EventPublisher(has_replay=has_replay) as publisher,
        following(settings_of(publisher)) as index,
    ):
        await until(lambda: is_current(index))
        await publisher.subscribed()
        for n in range(4):
            await publisher.publish(blocks(n, 1))
        await until(lambda: hbm(index) == 4)
        await publisher.restart()
        await until(lambda: view(index).streamed.connects == 2 and is_current(index))
        await publisher.subscribed()
        assert hbm(index) == 0
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)


async def test_a_restart_behind_an_open_connection_is_noticed(publisher: EventPublisher) -> None:
    """As when a proxy stands between; and the new life has come further than the old one."""
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await publisher.publish(blocks(2, 2))
        await until(lambda: hbm(index) == 4)
        publisher.forget()
        await publisher.publish(blocks(0, 1))
        await until(lambda: hbm(index) == 1)
        publisher.forget()
        for n in range(3):
            publisher.drop(blocks(n, 1))
        await publisher.publish(blocks(3, 1), removed(103))
        await until(lambda: hbm(index) == 3)
        counts = view(index).streamed
        assert (counts.restarts, counts.lost) == (2, 0)


async def test_a_lost_connection_is_out_of_answers_and_comes_back_complete(
    publisher: EventPublisher,
) -> None:
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)
        await publisher.close()
        await until(lambda: not is_current(index))
        assert hbm(index) == 0
        assert view(index).digest.blocks == 2, "kept for a while"
        publisher.drop(blocks(2, 2))
        publisher.open()
        await until(lambda: hbm(index) == 4)
        assert (view(index).streamed.restarts, view(index).streamed.lost) == (0, 0)


async def test_an_engine_that_stays_away_loses_its_rows(publisher: EventPublisher) -> None:
    async with following(settings_of(publisher), gone_seconds=0.5) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)
        await publisher.close()
        await until(lambda: view(index).digest.blocks == 0)
        assert index.size().blocks == 0
        publisher.open()
        await until(lambda: hbm(index) == 2)
        assert publisher.replays[-1] == 0


async def test_a_replay_that_is_never_answered_costs_hits_and_nothing_else(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*args: Any, **kwargs: Any) -> EngineSource:
        return EngineSource(*args, **kwargs, replay_times=ReplayTimes(0.1, 0.2))

    monkeypatch.setattr(followers, "EngineSource", impatient)
    publisher.is_mute = True
    publisher.drop(blocks(0, 2))
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 3))
        await until(lambda: hbm(index) == 3)
        assert view(index).streamed.failed_replays >= 2


async def test_nonsense_is_counted_and_passed_over(publisher: EventPublisher) -> None:
    async with following(settings_of(publisher)) as index:
        await until(lambda: is_current(index))
        await publisher.send_raw(b"one frame")
        await publisher.send_raw(b"t", b"short", b"x")
        await publisher.send_raw(*[b"many"] * 9)
        await publisher.publish(blocks(0, 1))
        publisher.next_seq += 1
        await publisher.send_raw(b"t", (1).to_bytes(8, "big"), b"\xc1 no msgpack")
        await publisher.publish(
            {"type": "BlockMoved"}, 7, blocks(1, 1), stored([1], [1] * 4, medium="CPU")
        )
        await until(lambda: hbm(index) == 2)
        counts = view(index).streamed
        text = generate_latest(IndexMetrics(index).registry).decode()
        assert 'emberkv_index_engine_malformed_messages_total{engine="/e1/0"} 4.0' in text
        assert 'emberkv_index_engine_rows{engine="/e1/0"} 2.0' in text
        assert 'emberkv_index_engine_blocks_total{engine="/e1/0",outcome="stored"} 2.0' in text
        assert counts.malformed_messages == 4
        assert (counts.unknown_events, counts.malformed_events, counts.other_media) == (1, 1, 1)


async def test_ranks_publish_on_following_ports_and_are_engines_of_their_own() -> None:
    async with EventPublisher() as first, EventPublisher() as second:
        (_, rank0), (_, rank1) = (
            IndexSection(engines=(settings_of(first, data_parallel_ranks=2),)).engines[0].infos()
        )
        port = int(first.events_endpoint.rpartition(":")[2])
        assert rank1.events_endpoint == f"tcp://127.0.0.1:{port + 1}"
        assert (rank0.dp_rank, rank1.dp_rank) == (0, 1)
        async with following(settings_of(first), settings_of(second, engine_id="e2")) as index:
            await until(lambda: len(index.engines()) == 2)
            await until(lambda: all(e.state is StreamState.CURRENT for e in index.engines()))
            await first.publish(blocks(0, 2))
            await second.publish(blocks(0, 5))
            await until(
                lambda: (
                    [(h.engine_id, h.hbm_blocks) for h in index.hits(CHAIN).engines]
                    == [("e2", 5), ("e1", 2)]
                )
            )
            await second.publish(CLEARED)
            await until(lambda: len(index.hits(CHAIN).engines) == 1)
            assert hbm(index) == 2, "a clear is of one engine only"


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    server = ModelServer(ModelDaemon("n1"))
    await server.start()
    yield server
    await server.stop()


def announced(publisher: EventPublisher, **changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "engine_id": "e1",
        "url": URL,
        "model": "m",
        "namespace_id": SPACE,
        "block_tokens": 4,
        "events_endpoint": publisher.events_endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }
    return EngineInfo(**(values | changes))


async def test_an_announced_engine_counts_what_its_node_has_between_its_own_blocks(
    publisher: EventPublisher, server: ModelServer
) -> None:
    keys = CHAIN.tolist()
    server.daemon.engines = (announced(publisher),)
    server.daemon.store(Tier.DRAM, keys[2:5])
    server.daemon.store(Tier.SSD, keys[6:8])
    async with following(nodes=(server.address,)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)
        await publisher.publish(blocks(2, 4))
        await until(lambda: hbm(index) == 6)
        await publisher.publish(removed(102, 103, 104))
        await until(lambda: hbm(index) == 3)
        expected = EngineHit("e1", 0, URL, NodeId("n1"), 8, 3, 3, 2)
        assert index.hits(CHAIN).engines == (expected,)
        assert index.hits(CHAIN).nodes == (), "the node has not its first block"
        (trace,) = index.explain_engines(CHAIN)
        assert [n for n, held in enumerate(trace.hbm) if held] == [0, 1, 5]
        server.daemon.store(Tier.DRAM, keys[:1])
        await until(lambda: index.hits(CHAIN).nodes == (NodeHit(NodeId("n1"), 1, 1, 0),))
        grpc_server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
        client = IndexClient(f"127.0.0.1:{port}")
        try:
            assert await client.hits(CHAIN) == index.hits(CHAIN)
            assert await client.query(CHAIN) == [NodeHit(NodeId("n1"), 1, 1, 0)]
        finally:
            await client.close()
            await grpc_server.stop(None)


async def test_a_node_that_falls_silent_takes_its_tiers_out_and_leaves_the_hbm(
    publisher: EventPublisher, server: ModelServer
) -> None:
    server.daemon.engines = (announced(publisher),)
    server.daemon.store(Tier.DRAM, CHAIN.tolist())
    async with following(nodes=(server.address,)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: [h.hit_blocks for h in index.hits(CHAIN).engines] == [10])
        await server.stop()
        await until(lambda: [h.hit_blocks for h in index.hits(CHAIN).engines] == [2])
        await server.start()
        await until(lambda: [h.hit_blocks for h in index.hits(CHAIN).engines] == [10])


async def test_an_engine_that_is_announced_no_longer_is_forgotten(
    publisher: EventPublisher, server: ModelServer
) -> None:
    server.daemon.engines = (announced(publisher),)
    async with following(nodes=(server.address,)) as index:
        await until(lambda: is_current(index))
        await publisher.publish(blocks(0, 2))
        await until(lambda: hbm(index) == 2)
        server.daemon.engines = ()
        await publisher.close()
        await until(lambda: not index.engines())
        await until(lambda: index.size().blocks == 0)


async def test_engines_that_come_and_go_leave_nothing_behind(
    publisher: EventPublisher, server: ModelServer
) -> None:
    publisher.drop(blocks(0, 2))
    async with following(nodes=(server.address,)) as index:
        for n in range(12):
            server.daemon.engines = (announced(publisher, engine_id=f"e{n}"),)
            await until(lambda: hbm(index) == 2)
            assert [hit.engine_id for hit in index.hits(CHAIN).engines] == [f"e{n}"]
            server.daemon.engines = ()
            await publisher.close()
            await until(lambda: not index.engines())
            publisher.open()
        await until(lambda: index.size().blocks == 0)
        assert index._directory._holders.numbers < 8


async def test_endpoints_that_are_no_ones_to_connect_to_are_refused(
    publisher: EventPublisher, server: ModelServer
) -> None:
    server.daemon.engines = tuple(
        announced(publisher, engine_id=f"e{n}", **changes)
        for n, changes in enumerate(
            (
                {"events_endpoint": "ipc:///etc/passwd"},
                {"events_endpoint": "tcp://*:5557"},
                {"events_endpoint": "tcp://h:0"},
                {"replay_endpoint": "inproc://x"},
                {"block_tokens": 0},
                {"engine_block_tokens": 3},
            )
        )
    )
    async with following(nodes=(server.address,)) as index:
        await until(lambda: index.refused_engines == 6)
        assert index.engines() == []
