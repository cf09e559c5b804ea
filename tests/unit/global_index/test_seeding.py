"""An index that starts from another one, and an index that is watched, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc
import pytest

from client_sdk import aio
from client_sdk.index_client import IndexClient
from emberkv_proto.errors import UnavailableError
from emberkv_proto.events import SnapshotPage
from emberkv_proto.types import EngineInfo, Incarnation, NamespaceId, NodeHit, NodeId, Seq, Tier
from emberkv_proto.v1 import index_pb2
from global_index import copying, directory, service
from global_index.config import IndexSection
from global_index.directory import NodeDirectory
from global_index.embedded import GlobalIndex
from global_index.ingest import Exactness
from global_index.membership import Liveness, Membership
from global_index.memory_index import MemoryIndex
from global_index.service import start_server
from tests.helpers.model_daemon import ModelDaemon, ModelServer, as_keys
from tests.helpers.waiting import until

CHAIN = as_keys(range(1, 301))
ENGINE = EngineInfo("e1", "http://127.0.0.1:8000", "m", NamespaceId(b"n" * 16), 64)


@asynccontextmanager
async def served(
    *servers: ModelServer, seed_from: str = ""
) -> AsyncIterator[tuple[GlobalIndex, str]]:
    section = IndexSection(
        nodes=tuple(server.address for server in servers),
        capacity_blocks=100_000,
        suspect_seconds=0.6,
        gone_seconds=60.0,
        seed_from=seed_from,
    )
    index = GlobalIndex(section)
    server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
    try:
        async with index:
            yield index, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
    index.check_integrity()
    assert index.faults == 0


@pytest.fixture
async def servers() -> AsyncIterator[list[ModelServer]]:
    async with AsyncExitStack() as stack:
        found = []
        for name, blocks in (("n1", 100), ("n2", 200)):
            server = ModelServer(ModelDaemon(name))
            server.daemon.store(Tier.DRAM, range(1, blocks + 1))
            server.daemon.store(Tier.SSD, range(50, blocks + 51))
            await server.start()
            stack.push_async_callback(server.stop)
            found.append(server)
        yield found


def is_exact(index: GlobalIndex, *servers: ModelServer) -> bool:
    views = {view.node_id: view for view in index.nodes()}
    return len(views) == len(servers) and all(
        (view := views.get(server.daemon.node_id)) is not None
        and view.exactness is Exactness.EXACT
        and view.liveness is Liveness.OK
        and view.seq == server.daemon.seq
        for server in servers
    )


async def test_seeded_index_goes_on_from_the_next_event_without_a_snapshot(
    servers: list[ModelServer],
) -> None:
    async with served(*servers) as (old, address):
        await until(lambda: is_exact(old, *servers))
        taken = [server.snapshots for server in servers]
        async with served(*servers, seed_from=address) as (new, _):
            await until(lambda: is_exact(new, *servers))
            assert new.query(CHAIN) == old.query(CHAIN)
            assert new.query(CHAIN)[0] == NodeHit(NodeId("n2"), 250, 200, 50)
            assert [server.snapshots for server in servers] == taken
            assert all(server.subscriptions[-1] == (1, 3) for server in servers)
            assert (new.seed_counts.nodes, new.seed_counts.failures) == (2, 0)
            servers[0].daemon.store(Tier.DRAM, range(101, 300))
            await until(lambda: new.query(CHAIN)[0].hit_blocks == 299)


async def test_events_that_came_since_are_replayed_onto_the_seed(
    servers: list[ModelServer],
) -> None:
    async with served(*servers) as (old, address):
        await until(lambda: is_exact(old, *servers))
        pages = [page async for page in _snapshot(address)]
        servers[0].daemon.remove(Tier.SSD, range(1, 400))
        rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
        for page in pages:
            assert rows.on_seed_page(page, 0.0)
        rows.add_source("a:1")
        assert rows.position("a:1").from_seq == 1, "nobody knows yet whose address it is"
        step = rows.on_snapshot_needed("a:1", servers[0].daemon.snapshot_needed(), 0.0)
        assert step is directory.StreamStep.RESUBSCRIBE
        assert (rows.position("a:1").incarnation, rows.position("a:1").from_seq) == (1, 3)
        rows.on_stream_started("a:1")
        rows.on_batch("a:1", servers[0].daemon.batch(3, 3), 0.0, 0.0)
        rows.on_report("a:1", servers[0].daemon.report(), 0.0, 0.0)
        assert rows.query(CHAIN) == [NodeHit(NodeId("n1"), 100, 100, 0)]
        assert rows.nodes(0.0)[0].exactness is Exactness.EXACT
        rows.check_integrity()


async def _snapshot(address: str) -> AsyncIterator[SnapshotPage]:
    client = IndexClient(address, timeout_seconds=10)
    try:
        async with aclosing(client.snapshot()) as pages:
            async for page in pages:
                yield page
    finally:
        await client.close()


async def test_daemon_that_restarted_since_is_asked_for_a_snapshot(
    servers: list[ModelServer],
) -> None:
    async with served(*servers) as (old, address):
        await until(lambda: is_exact(old, *servers))
        rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
        async for page in _snapshot(address):
            rows.on_seed_page(page, 0.0)
        daemon = servers[0].daemon
        daemon.restart(loses=(Tier.DRAM,))
        rows.add_source("a:1")
        step = rows.on_snapshot_needed("a:1", daemon.snapshot_needed(), 0.0)
        assert step is directory.StreamStep.SNAPSHOT
        rows.on_snapshot_started("a:1")
        for page in daemon.pages():
            rows.on_page("a:1", page, 0.0)
        rows.on_snapshot_ended("a:1", 0.0)
        rows.on_report("a:1", daemon.report(), 0.0, 0.0)
        (view,) = rows.nodes(0.0)
        assert (view.incarnation, view.exactness) == (2, Exactness.EXACT)
        assert [digest.blocks for digest in view.tiers] == [0, 101]
        rows.check_integrity()


async def test_daemon_of_an_older_version_costs_a_snapshot_and_is_exact(
    servers: list[ModelServer],
) -> None:
    servers[0].named = ""
    async with served(*servers) as (old, address):
        await until(lambda: is_exact(old, *servers))
        async with served(*servers, seed_from=address) as (new, _):
            await until(lambda: is_exact(new, *servers))
            assert new.query(CHAIN) == old.query(CHAIN)
            assert [server.snapshots for server in servers] == [2, 1]


async def test_seed_that_is_away_costs_a_warning_and_snapshots(
    servers: list[ModelServer],
) -> None:
    async with served(*servers, seed_from="127.0.0.1:1") as (index, _):
        await until(lambda: is_exact(index, *servers))
        assert index.seed_counts.failures == 1
        assert index.query(CHAIN)[0].hit_blocks == 250


def pages_of(daemon: ModelDaemon) -> list[SnapshotPage]:
    return daemon.pages(page_keys=30)


def test_seeded_rows_are_asked_by_nobody_until_their_daemon_speaks() -> None:
    rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
    daemon = ModelDaemon("n1")
    daemon.store(Tier.DRAM, range(1, 101))
    for page in pages_of(daemon):
        assert rows.on_seed_page(page, 0.0)
    assert not rows.on_seed_page(pages_of(daemon)[0], 0.0), "it has all there is"
    assert rows.query(CHAIN) == rows.explain(CHAIN) == rows.nodes(0.0) == []
    rows.check_integrity()
    rows.add_source("a:1")
    rows.on_report("a:1", daemon.report(), 1.0, 1.0)
    assert rows.query(CHAIN) == [NodeHit(NodeId("n1"), 100, 100, 0)]
    assert not rows.on_seed_page(pages_of(daemon)[0], 1.0)
    rows.check_integrity()


def test_seed_of_a_silent_daemon_goes_after_a_while_and_half_a_seed_at_once() -> None:
    rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
    for name in ("n1", "n2"):
        daemon = ModelDaemon(name)
        daemon.store(Tier.DRAM, range(1, 101))
        for page in pages_of(daemon)[: 4 if name == "n1" else 2]:
            rows.on_seed_page(page, 0.0)
    rows.drop_seed(NodeId("n2"))
    rows.check_integrity()
    assert rows.swept_holders == 1
    rows.tick(directory.SEED_WAIT_SECONDS)
    assert rows.swept_holders == 2
    while rows.sweep():
        pass
    rows.check_integrity()


def test_node_that_was_removed_by_order_is_not_seeded() -> None:
    rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
    daemon = ModelDaemon("n1")
    daemon.store(Tier.DRAM, range(1, 101))
    rows.add_source("a:1")
    rows.on_batch("a:1", daemon.batch(1, 1), 0.0, 0.0)
    rows.remove_node(NodeId("n1"))
    assert not rows.on_seed_page(pages_of(daemon)[0], 0.0)
    empty = SnapshotPage(NodeId(""), Incarnation(1), Seq(0), Tier.DRAM, as_keys(()), True)
    assert not rows.on_seed_page(empty, 0.0)
    rows.check_integrity()


async def test_only_exact_rows_are_given_away_and_only_of_the_nodes_named(
    servers: list[ModelServer],
) -> None:
    async with served(*servers) as (index, address):
        await until(lambda: is_exact(index, *servers))
        client = IndexClient(address, timeout_seconds=10)
        try:
            named = [page async for page in client.snapshot([NodeId("n2"), NodeId("nobody")])]
            assert {page.node_id for page in named} == {"n2"}
            assert [page.is_last for page in named] == [False, True]
            assert {page.tier: len(page.keys) for page in named} == {Tier.DRAM: 200, Tier.SSD: 201}
        finally:
            await client.close()
    rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
    daemon = servers[0].daemon
    rows.add_source("a:1")
    rows.on_batch("a:1", daemon.batch(1, 2), 0.0, 0.0)
    assert [page async for page in copying.copied_pages(rows, [NodeId("n1")])] != []
    rows.tick(31.0)  # silent for long: its DRAM rows went without an event
    assert [page async for page in copying.copied_pages(rows, [NodeId("n1")])] == []


async def test_rows_replaced_during_the_copy_are_copied_anew() -> None:
    rows = NodeDirectory(MemoryIndex(10_000), Membership(3.0, 30.0))
    daemon = ModelDaemon("n1")
    daemon.store(Tier.DRAM, range(1, 101))
    rows.add_source("a:1")
    rows.on_batch("a:1", daemon.batch(1, 1), 0.0, 0.0)
    copy = rows.begin_copy(NodeId("n1"))
    assert copy is not None
    while copy.step():
        pass
    daemon.restart()
    daemon.store(Tier.SSD, range(1, 11))
    rows.on_snapshot_needed("a:1", daemon.snapshot_needed(), 0.0)
    rows.on_snapshot_started("a:1")
    for page in daemon.pages():
        rows.on_page("a:1", page, 0.0)
    rows.on_snapshot_ended("a:1", 0.0)
    assert rows.settle_copy(NodeId("n1"), copy) is None
    rows.end_copy(NodeId("n1"), copy)
    pages = [page async for page in copying.copied_pages(rows, [NodeId("n1")])]
    assert {(page.incarnation, page.seq, page.tier, len(page.keys)) for page in pages} == {
        (2, 2, Tier.DRAM, 100),
        (2, 2, Tier.SSD, 10),
    }


async def test_watch_tells_of_nodes_that_come_fall_silent_and_change(
    servers: list[ModelServer],
) -> None:
    async with served(*servers) as (index, address):
        await until(lambda: is_exact(index, *servers))
        client = IndexClient(address)
        try:
            async with aclosing(client.watch()) as changes, aio.timeout(30):
                whole = await changes.__anext__()
                assert whole.is_whole
                assert {(node.node_id, node.state) for node in whole.nodes} == {
                    ("n1", "ok"),
                    ("n2", "ok"),
                }
                servers[0].daemon.engines = (ENGINE,)
                servers[1].is_mute = True
                states = {node.node_id: node for node in whole.nodes}
                while states[NodeId("n1")].engines == () or states[NodeId("n2")].state == "ok":
                    change = await changes.__anext__()
                    assert not change.is_whole
                    states |= {node.node_id: node for node in change.nodes}
                assert states[NodeId("n1")].engines == (ENGINE,)
                assert states[NodeId("n2")].state == "suspect"
                await index.remove_node(NodeId("n2"))
                while True:
                    change = await changes.__anext__()
                    if change.removed:
                        assert change.removed == ("n2",)
                        break
            await until(lambda: index.watch.watchers == 0)
        finally:
            await client.close()


class StalledContext:
    """Of a call whose reader takes nothing."""

    def __init__(self) -> None:
        self.aborted: list[object] = []

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: object, *details: object) -> None:
        self.aborted.append(code)


async def test_reader_that_takes_nothing_loses_its_place(
    servers: list[ModelServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TAKE_SECONDS", 0.05)
    async with served(*servers) as (index, _):
        await until(lambda: is_exact(index, *servers))
        servicer = service.IndexServicer(index, lambda _: None)
        contexts = [StalledContext() for _ in range(service.MAX_COPIES + 2)]
        async with aio.timeout(60):
            request = index_pb2.CopyRequest()
            await asyncio.gather(*(servicer.Snapshot(request, c) for c in contexts))  # type: ignore[arg-type]
            watching = StalledContext()
            await servicer.Watch(index_pb2.WatchRequest(), watching)  # type: ignore[arg-type]
        for context in (*contexts, watching):
            assert context.aborted == [grpc.StatusCode.DEADLINE_EXCEEDED]
        assert index.watch.watchers == 0


async def test_watch_of_an_index_that_goes_ends_in_an_error(servers: list[ModelServer]) -> None:
    index = GlobalIndex(IndexSection(capacity_blocks=10_000))
    server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
    client = IndexClient(f"127.0.0.1:{port}")
    try:
        async with aclosing(client.watch()) as changes, aio.timeout(60):
            assert (await changes.__anext__()).is_whole
            await server.stop(None)
            with pytest.raises(UnavailableError):
                await changes.__anext__()
    finally:
        await client.close()
        await server.stop(None)
