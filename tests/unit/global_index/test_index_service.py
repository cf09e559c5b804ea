"""The whole index against real gRPC daemons that stop, restart, fall silent or talk nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from client_sdk import aio
from client_sdk.index_client import IndexClient
from emberkv_proto.convert import u64s_to_wire
from emberkv_proto.types import EngineInfo, NamespaceId, NodeHit, NodeId, Tier
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from global_index.app import serve
from global_index.config import IndexSection, IndexSettings
from global_index.directory import NodeDirectory
from global_index.embedded import GlobalIndex
from global_index.ingest import Exactness
from global_index.membership import Liveness
from global_index.metrics import IndexMetrics
from global_index.service import start_server
from global_index.views import NodeView
from tests.helpers.model_daemon import ModelDaemon, ModelServer, as_keys

CHAIN = as_keys(range(1, 201))
ENGINE = EngineInfo("e1", "http://127.0.0.1:8000", "m", NamespaceId(b"n" * 16), 64)


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with aio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def following(*servers: ModelServer, **changes: Any) -> AsyncIterator[GlobalIndex]:
    values: dict[str, Any] = {
        "nodes": tuple(server.address for server in servers),
        "capacity_blocks": 100_000,
        "suspect_seconds": 0.6,
        "gone_seconds": 60.0,
    }
    async with GlobalIndex(IndexSection(**(values | changes))) as index:
        yield index
    index.check_integrity()
    assert index.faults == 0


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    server = ModelServer(ModelDaemon("n1"))
    server.daemon.store(Tier.DRAM, range(1, 101))
    server.daemon.store(Tier.SSD, range(1, 151))
    server.daemon.engines = (ENGINE,)
    await server.start()
    yield server
    await server.stop()


def view(index: GlobalIndex, node_id: str = "n1") -> NodeView | None:
    return next((node for node in index.nodes() if node.node_id == node_id), None)


def is_exact(index: GlobalIndex, server: ModelServer) -> bool:
    node, daemon = view(index, server.daemon.node_id), server.daemon
    return (
        node is not None
        and (node.incarnation, node.seq) == (daemon.incarnation, daemon.seq)
        and node.exactness is Exactness.EXACT
        and node.liveness is Liveness.OK
        and [digest.blocks for digest in node.tiers] == [len(r) for r in daemon.rows.values()]
    )


@pytest.mark.parametrize("backend", ["numba", "python"])
async def test_rows_engines_and_capacity_of_a_daemon_arrive(
    server: ModelServer, backend: str
) -> None:
    async with following(server, backend=backend) as index:
        await until(lambda: is_exact(index, server) and bool(view(index).engines))  # type: ignore[union-attr]
        assert index.query(CHAIN) == [NodeHit(NodeId("n1"), 150, 100, 50)]
        node = view(index)
        assert node is not None
        assert node.engines == (ENGINE,)
        assert node.grpc_address == server.address
        assert node.tiers[0].capacity_bytes == 1 << 30
        assert 0 <= node.lag_seconds < 5
        server.daemon.remove(Tier.SSD, range(121, 151))
        await until(lambda: index.query(CHAIN)[0].hit_blocks == 120)
        assert server.snapshots == 1


async def test_restarted_daemon_is_followed_into_its_new_life(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        await server.stop()
        server.daemon.restart(loses=(Tier.DRAM,))
        assert index.query(CHAIN)[0].hit_blocks == 150, "rows serve on until the swap"
        await server.start()
        await until(lambda: is_exact(index, server))
        assert index.query(CHAIN) == [NodeHit(NodeId("n1"), 150, 0, 150)]


async def test_broken_connection_resumes_where_it_was_without_a_snapshot(
    server: ModelServer,
) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        seen = server.daemon.seq
        await server.stop()
        server.daemon.store(Tier.DRAM, range(101, 111))
        await server.start()
        await until(lambda: is_exact(index, server))
        assert server.subscriptions[-1] == (1, seen + 1)
        assert server.snapshots == 1


async def test_ring_overrun_ends_in_one_snapshot(server: ModelServer) -> None:
    server.daemon.ring_events = 5
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        before = server.snapshots
        await server.stop()
        for block in range(300, 320):
            server.daemon.store(Tier.DRAM, [block])
        await server.start()
        await until(lambda: is_exact(index, server))
        assert server.snapshots == before + 1


async def test_dead_daemon_fades_while_the_other_one_serves_on(server: ModelServer) -> None:
    other = ModelServer(ModelDaemon("n2"))
    other.daemon.store(Tier.SSD, range(1, 11))
    await other.start()
    try:
        async with following(server, other, gone_seconds=1.5) as index:
            await until(lambda: is_exact(index, server) and is_exact(index, other))
            assert [hit.node_id for hit in index.query(CHAIN)] == ["n1", "n2"]
            await server.stop()
            await until(lambda: [hit.node_id for hit in index.query(CHAIN)] == ["n2"])
            await until(lambda: view(index).liveness is Liveness.GONE)  # type: ignore[union-attr]
            assert [d.blocks for d in view(index).tiers] == [0, 150]  # type: ignore[union-attr]
            await server.start()
            await until(lambda: is_exact(index, server))
            assert index.query(CHAIN)[0] == NodeHit(NodeId("n1"), 150, 100, 50)
    finally:
        await other.stop()


async def test_daemon_that_hangs_is_suspect_and_comes_back(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        server.is_mute = True
        await until(lambda: index.query(CHAIN) == [])
        assert view(index).liveness is Liveness.SUSPECT  # type: ignore[union-attr]
        server.is_mute = False
        await until(lambda: is_exact(index, server))


async def test_rows_that_take_long_to_go_do_not_keep_silence_from_being_noticed(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        with monkeypatch.context() as endless:
            endless.setattr(NodeDirectory, "sweep", lambda _: True)
            server.is_mute = True
            await until(lambda: index.query(CHAIN) == [])


async def test_two_daemons_under_load_and_a_removed_node(server: ModelServer) -> None:
    other = ModelServer(ModelDaemon("n2"))
    await other.start()
    try:
        async with following(server, other) as index:
            for step in range(100):
                other.daemon.store(Tier.DRAM, range(step, step + 20, 1) if step else [1])
                other.daemon.remove(Tier.DRAM, range(step * 2, step * 2 + 3))
                if step % 20 == 0:
                    await asyncio.sleep(0.03)
            await until(lambda: is_exact(index, other) and is_exact(index, server))
            await index.remove_node(NodeId("n1"))
            assert [n.node_id for n in index.nodes()] == ["n2"]
            assert all(hit.node_id == "n2" for hit in index.query(CHAIN))
            index.subscribe(server.address)
            await asyncio.sleep(0.3)
            assert view(index) is None, "removed by order, and still in the same life"
            index.readmit(NodeId("n1"))
            await until(lambda: is_exact(index, server))
            await index.unsubscribe(server.address)
            await until(lambda: view(index).liveness is Liveness.SUSPECT)  # type: ignore[union-attr]
    finally:
        await other.stop()


class _NonsenseServer(ModelServer):
    async def Subscribe(self, request: Any, context: Any) -> None:  # noqa: N802
        stored = index_pb2.BlocksStored(tier=2, keys=b"seven b")
        batch = index_pb2.EventBatch(
            node_id="n1", incarnation=1, seq_first=1, events=[index_pb2.Event(stored=stored)]
        )
        await context.write(index_pb2.EventMessage(batch=batch))
        await asyncio.sleep(5)


async def test_malformed_events_are_counted_and_hurt_nobody_else(server: ModelServer) -> None:
    bad = _NonsenseServer(ModelDaemon("bad"))
    await bad.start()
    try:
        async with following(server, bad) as index:
            await until(lambda: index.streams()[bad.address].malformed >= 2)
            await until(lambda: is_exact(index, server))
            assert [node.node_id for node in index.nodes()] == ["n1"]
    finally:
        await bad.stop()


async def test_service_answers_queries_and_refuses_bad_ones(server: ModelServer) -> None:
    async with following(server) as index:
        metrics = IndexMetrics(index)
        observed = metrics.query_seconds.observe
        grpc_server, port = await start_server(index, "127.0.0.1", 0, observed)
        try:
            await until(lambda: is_exact(index, server))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = index_pb2_grpc.IndexStub(channel)
                answer = await stub.Query(
                    index_pb2.QueryRequest(keys=u64s_to_wire(CHAIN)), timeout=90
                )
                assert [hit.hit_blocks for hit in answer.hits] == [150]
                nodes = (await stub.Nodes(index_pb2.NodesRequest(), timeout=90)).nodes
                assert (nodes[0].node_id, nodes[0].state, nodes[0].exactness) == (
                    "n1",
                    "ok",
                    "exact",
                )
                for broken in (b"odd", b"\0" * 8, u64s_to_wire([1] * 65537)):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.Query(index_pb2.QueryRequest(keys=broken), timeout=90)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            sample = metrics.registry.get_sample_value
            assert sample("emberkv_index_query_seconds_count") == 1
            assert sample("emberkv_index_rows", {"node": "n1", "tier": "ssd"}) == 150
            assert sample("emberkv_index_node_exact", {"node": "n1"}) == 1
            assert sample("emberkv_index_snapshots_total", {"node": "n1"}) == 1
            assert (sample("emberkv_index_lag_seconds", {"node": "n1"}) or 0) < 5
        finally:
            await grpc_server.stop(None)


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with aio.timeout(30):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_served_alone_it_has_metrics_health_and_ends_when_told(
    server: ModelServer, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port, metrics_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    section = IndexSection(
        port=port, metrics_port=metrics_port, nodes=(server.address,), capacity_blocks=10_000
    )
    stop = asyncio.Event()
    task = asyncio.create_task(serve(IndexSettings(index=section), stop))
    client = IndexClient(f"127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 30
        body = b""
        while b'emberkv_index_rows{node="n1",tier="dram"} 100.0' not in body:
            assert time.monotonic() < deadline, body[-500:]
            await asyncio.sleep(0.05)
            try:
                body = await _get(metrics_port, "/metrics")
            except OSError:
                continue
        assert (await _get(metrics_port, "/ready")).startswith(b"HTTP/1.1 200")
        assert (await _get(metrics_port, "/health")).startswith(b"HTTP/1.1 200")
        assert (await _get(metrics_port, "/nothing")).startswith(b"HTTP/1.1 404")
        assert await client.query(CHAIN) == [NodeHit(NodeId("n1"), 150, 100, 50)]
    finally:
        await client.close()
        stop.set()
        async with aio.timeout(30):
            await task


async def drift(index: GlobalIndex, server: ModelServer) -> None:
    (node,) = index._directory._nodes.values()
    assert node.visible is not None
    index._index.apply_removed(node.visible.holder, Tier.DRAM, as_keys([5]))
    assert index.query(CHAIN)[0].hit_blocks == 150, "SSD has it too"
    assert not is_exact(index, server)


async def test_row_that_vanished_is_brought_back_by_its_bucket(server: ModelServer) -> None:
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        await drift(index, server)
        await until(lambda: is_exact(index, server))
        assert (server.snapshots, server.sent_buckets) == (1, 1)


async def test_older_daemon_repairs_by_a_snapshot(server: ModelServer) -> None:
    server.knows_buckets = False
    async with following(server) as index:
        await until(lambda: is_exact(index, server))
        await drift(index, server)
        await until(lambda: is_exact(index, server))
        assert (server.snapshots, server.sent_buckets) == (2, 0)
