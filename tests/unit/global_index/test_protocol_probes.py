"""What other indexes were seen to get wrong with events, tried on ours over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client_sdk import aio
from client_sdk.faults import INDEX_BATCH
from emberkv_proto.convert import page_to_wire
from emberkv_proto.types import IndexKey, NodeHit, NodeId, Tier
from global_index.config import IndexSection
from global_index.embedded import MAX_SNAPSHOTS, GlobalIndex
from global_index.ingest import Exactness
from global_index.membership import Liveness
from tests.helpers.faults import making
from tests.helpers.model_daemon import TIERS, ModelDaemon, ModelServer, as_keys

CHAIN = as_keys(range(1, 257))


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with aio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(*servers: ModelServer) -> AsyncIterator[GlobalIndex]:
    section = IndexSection(
        nodes=tuple(server.address for server in servers),
        capacity_blocks=100_000,
        backend="python",
        suspect_seconds=0.6,
        gone_seconds=60.0,
    )
    async with GlobalIndex(section) as index:
        yield index
    index.check_integrity()
    assert index.faults == 0


@asynccontextmanager
async def serving(count: int, kind: type[ModelServer] = ModelServer) -> AsyncIterator[list[Any]]:
    servers = [kind(ModelDaemon(f"n{number}")) for number in range(1, count + 1)]
    for server in servers:
        server.daemon.store(Tier.DRAM, range(1, 257))
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with serving(1) as (server,):
        yield server


def is_exact(index: GlobalIndex, *servers: ModelServer) -> bool:
    """Whether the index says of each daemon just what it has."""
    views = {view.node_id: view for view in index.nodes()}
    for server in servers:
        daemon, view = server.daemon, views.get(server.daemon.node_id)
        if view is None or view.exactness is not Exactness.EXACT or view.liveness is Liveness.GONE:
            return False
        if (view.incarnation, view.seq) != (daemon.incarnation, daemon.seq):
            return False
        truth = {d.tier: (d.blocks, d.xor) for d in daemon.report().tiers}
        if {d.tier: (d.blocks, d.xor) for d in view.tiers} != truth:
            return False
    return True


def counts(index: GlobalIndex) -> Any:
    (view,) = index.nodes()
    return view.counts


def hit(index: GlobalIndex) -> int:
    return max((found.hit_blocks for found in index.query(CHAIN)), default=0)


async def test_late_subscriber_asks_for_the_first_event_and_is_not_exact_before(
    server: ModelServer,
) -> None:
    for block in range(1000, 1056):
        server.daemon.store(Tier.SSD, [block])
    assert server.daemon.seq == 57
    async with following(server) as index:
        await until(lambda: bool(index.nodes()))
        while not is_exact(index, server):
            assert all(view.exactness is not Exactness.EXACT for view in index.nodes())
            await asyncio.sleep(0.001)
        assert server.subscriptions[0] == (0, 1)
        assert hit(index) == 256


async def test_lost_batch_costs_its_own_blocks_and_is_sent_again_alone(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        lost = range(101, 111)
        server.daemon.remove(Tier.DRAM, lost)
        await until(lambda: hit(index) == 100)
        sent = server.sent_events
        with making(f"{INDEX_BATCH.name}=drop@1"):
            server.daemon.store(Tier.DRAM, lost)
            await until(lambda: server.sent_events > sent)
            while counts(index).gaps == 0:
                assert hit(index) == 100, "blocks that were not lost are missed"
                await asyncio.sleep(0.001)
            await until(lambda: is_exact(index, server))
        assert hit(index) == 256, "descendants of the lost blocks are missed"
        assert server.sent_events - sent == 2, "more than the gap was sent again"
        assert (counts(index).gaps, counts(index).replays, counts(index).snapshots) == (1, 1, 1)


async def test_one_of_ten_thousand_events_lost_sends_again_only_what_followed_it(
    server: ModelServer,
) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        with making(f"{INDEX_BATCH.name}=drop@500"):
            for burst in range(1000):
                for event in range(10):
                    server.daemon.store(Tier.SSD, [1000 + 10 * burst + event])
                if burst % 100 == 99:
                    await until(lambda: is_exact(index, server))
                    assert hit(index) == 256
        # Ten events were lost; what the stream had under way behind them comes again too.
        again = server.sent_events - (server.daemon.seq - 1)
        assert 10 <= again <= 1000
        assert (counts(index).gaps, counts(index).snapshots) == (1, 1)


async def test_recovery_from_a_gap_and_a_restart_happens_once_each(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        with making(f"{INDEX_BATCH.name}=drop@1"):
            server.daemon.store(Tier.SSD, [999])
            await until(lambda: counts(index).gaps == 1 and is_exact(index, server))
        for block in range(1000, 2000):
            server.daemon.store(Tier.SSD, [block])
        await until(lambda: is_exact(index, server))
        assert (counts(index).gaps, counts(index).snapshots) == (1, 1)
        server.daemon.restart(loses=(Tier.SSD,))
        await until(lambda: is_exact(index, server))
        for block in range(3000, 4000):
            server.daemon.store(Tier.SSD, [block])
        await until(lambda: is_exact(index, server))
        assert (counts(index).gaps, counts(index).snapshots) == (1, 2)


async def test_restart_at_sequence_0_is_not_ignored(server: ModelServer) -> None:
    for block in range(1000, 1500):
        server.daemon.store(Tier.SSD, [block])
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        server.daemon.restart(loses=TIERS)
        server.daemon.store(Tier.DRAM, range(1, 11))
        assert server.daemon.seq < 500
        await until(lambda: is_exact(index, server) and hit(index) == 10)


async def test_dead_daemon_stops_scoring_and_scores_again_when_it_is_back(
    server: ModelServer,
) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        await server.stop()
        assert hit(index) == 256
        await until(lambda: hit(index) == 0)
        await server.start()
        await until(lambda: hit(index) == 256)


async def test_hashes_over_2_to_the_63_are_like_others(server: ModelServer) -> None:
    high = as_keys(range(2**64 - 40, 2**64))
    server.daemon.store(Tier.DRAM, high.tolist())
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        assert index.query(high) == [NodeHit(NodeId("n1"), 40, 40, 0)]
        server.daemon.remove(Tier.DRAM, high.tolist()[20:])
        await until(lambda: index.query(high) == [NodeHit(NodeId("n1"), 20, 20, 0)])


async def test_clear_that_was_swallowed_is_found_by_the_next_audit(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        server.daemon.rows[Tier.DRAM].clear()  # and no event says so
        await until(lambda: hit(index) == 0)
        await until(lambda: is_exact(index, server))
        assert counts(index).digest_mismatches == 1


async def test_second_index_that_comes_and_goes_costs_the_first_one_nothing(
    server: ModelServer,
) -> None:
    async with following(server) as first:
        await until(lambda: is_exact(first, server))
        for turn in range(8):
            async with following(server) as second:
                server.daemon.store(Tier.SSD, range(1000 + turn, 1010 + turn))
                await until(lambda second=second: is_exact(second, server))  # type: ignore[misc]
        await until(lambda: is_exact(first, server))
        assert (counts(first).gaps, counts(first).snapshots) == (0, 1)
        (stream,) = first.streams().values()
        assert (stream.connects, stream.losses) == (1, 0)


async def test_wiped_index_knows_every_node_again_and_a_new_one_may_join() -> None:
    async with serving(4) as servers:
        *three, fourth = servers
        async with following(*three) as index:
            await until(lambda: is_exact(index, *three))
        async with following(*three) as index:  # nothing is left of the first one
            await until(lambda: is_exact(index, *three))
            index.subscribe(fourth.address)
            await until(lambda: is_exact(index, *servers))
            assert [found.hit_blocks for found in index.query(CHAIN)] == [256] * 4


async def test_two_hundred_restarts_leave_the_table_as_large_as_one(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        for life in range(200):
            server.daemon.restart(loses=(Tier.DRAM,))
            server.daemon.store(Tier.DRAM, range(1, 257))
            if life % 20 == 0:
                await until(lambda: is_exact(index, server))
        await until(lambda: is_exact(index, server))
        await until(lambda: index._directory.swept_holders == 0)
        assert index.size().blocks == 256
        assert len(index._index.holdings(IndexKey(1))) == 1


class _SlowServer(ModelServer):
    running = 0
    most = 0

    async def Snapshot(self, request: Any, context: Any) -> None:  # noqa: N802
        _SlowServer.running += 1
        _SlowServer.most = max(_SlowServer.most, _SlowServer.running)
        try:
            for page in self.daemon.pages():
                await context.write(page_to_wire(page))
                await asyncio.sleep(0.02)
        finally:
            _SlowServer.running -= 1


async def test_snapshots_of_many_nodes_are_fetched_a_few_at_a_time() -> None:
    async with serving(12, _SlowServer) as servers, following(*servers) as index:
        await until(lambda: is_exact(index, *servers))
        assert 1 < _SlowServer.most <= MAX_SNAPSHOTS
