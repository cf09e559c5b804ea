"""The gRPC carrier, over a real socket."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from client_sdk.aio import timeout
from client_sdk.index_client import ERROR_METADATA_KEY, ember_error
from client_sdk.operator_gate import OperatorGate
from emberkv_proto.convert import batch_from_wire, page_from_wire, report_from_wire, u64s_from_wire
from emberkv_proto.errors import (
    InvalidRequestError,
    UnavailableError,
    UnknownNamespaceError,
)
from emberkv_proto.types import Incarnation, NodeId, Tier
from emberkv_proto.v1 import index_pb2, index_pb2_grpc, store_pb2, store_pb2_grpc
from store_daemon.config import DaemonSection
from store_daemon.grpc_server import GrpcServer
from store_daemon.life import Life
from tests.helpers.peer_doubles import chain, small_namespace
from tests.helpers.peer_node import PeerNode, peer_node

NAMESPACE = small_namespace()


@pytest.fixture
def node() -> Iterator[PeerNode]:
    with peer_node(NAMESPACE) as node:
        yield node


async def test_events_snapshots_and_reports_reach_a_subscriber(node: PeerNode) -> None:
    stored = asyncio.run_coroutine_threadsafe(_store(node, {1, 2, 3}), node.loop)
    await asyncio.wrap_future(stored)
    async with timeout(30), grpc.aio.insecure_channel(node.grpc_address) as channel:
        stub: Any = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
        refused = [m async for m in stub.Subscribe(index_pb2.SubscribeRequest(incarnation=0))]
        assert refused[0].snapshot_needed.incarnation == 3
        assert refused[0].snapshot_needed.seq == 1
        pages = [page_from_wire(p) async for p in stub.Snapshot(index_pb2.SnapshotRequest())]
        assert [(p.tier, p.keys.tolist(), p.is_last) for p in pages] == [
            (Tier.DRAM, [1, 2, 3], True)
        ]
        call = stub.Subscribe(index_pb2.SubscribeRequest(incarnation=3, from_seq=1))
        batch = batch_from_wire((await call.read()).batch)
        assert (batch.seq_first, batch.incarnation) == (1, Incarnation(3))
        report = report_from_wire((await call.read()).report)
        assert (report.seq, report.tiers[0].blocks, report.tiers[0].xor) == (1, 3, 0)
        again = report_from_wire((await call.read()).report)
        assert again.sent_unix_seconds >= report.sent_unix_seconds
        call.cancel()
        while node.publisher.subscribers:  # noqa: ASYNC110 - another loop's state
            await asyncio.sleep(0.01)


async def _store(node: PeerNode, keys: set[int]) -> None:
    node.residency.store(Tier.DRAM, keys)


async def test_peer_acquire_names_every_part_and_release_ends_the_lease(node: PeerNode) -> None:
    hashes = chain(NAMESPACE, 4)
    node.store.put(hashes[:3])
    async with timeout(30), grpc.aio.insecure_channel(node.grpc_address) as channel:
        stub: Any = store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        grant = await stub.Acquire(_acquire(hashes=b"".join(hashes)))
        assert (grant.usable_blocks, grant.parts, grant.incarnation) == (3, NAMESPACE.parts, 3)
        assert u64s_from_wire(grant.lengths) == 3 * [
            NAMESPACE.part_bytes(part) for part in range(NAMESPACE.parts)
        ]
        assert grant.transport == "tcp"
        await stub.Release(store_pb2.PeerReleaseRequest(lease_id=grant.lease_id))
        assert not node.store.leases


def _acquire(**changes: Any) -> store_pb2.PeerAcquireRequest:
    fields: dict[str, Any] = {
        "namespace_id": NAMESPACE.id,
        "hashes": chain(NAMESPACE, 1)[0],
        "lease_seconds": 5.0,
        "requester": "me",
    }
    return store_pb2.PeerAcquireRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"hashes": b""}, InvalidRequestError),
        ({"hashes": b"x" * 33}, InvalidRequestError),
        ({"hashes": b"x" * 32 * 65537}, InvalidRequestError),
        ({"namespace_id": b"short"}, InvalidRequestError),
        ({"namespace_id": b"n" * 16}, UnknownNamespaceError),
        ({"lease_seconds": 0.0}, InvalidRequestError),
        ({"lease_seconds": -1.0}, InvalidRequestError),
        ({"lease_seconds": math.nan}, InvalidRequestError),
        ({"lease_seconds": math.inf}, InvalidRequestError),
        ({"requester": ""}, InvalidRequestError),
        ({"requester": "r" * 254}, InvalidRequestError),
    ],
)
async def test_bad_acquire_is_answered_with_its_error_type(
    node: PeerNode, changes: dict[str, Any], kind: type[Exception]
) -> None:
    async with timeout(30), grpc.aio.insecure_channel(node.grpc_address) as channel:
        stub: Any = store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Acquire(_acquire(**changes))
    assert (ERROR_METADATA_KEY, kind.__name__) in tuple(caught.value.trailing_metadata())
    assert type(ember_error(caught.value, "peer")) is kind
    assert not node.store.leases


async def test_message_over_the_limit_is_refused_and_the_server_lives(node: PeerNode) -> None:
    async with timeout(60), grpc.aio.insecure_channel(node.grpc_address) as channel:
        stub: Any = store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Acquire(_acquire(hashes=bytes(17 * 1024 * 1024)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(ember_error(caught.value, "peer"), UnavailableError)
        assert (await stub.Acquire(_acquire())).usable_blocks == 0


async def test_operators_get_status_and_problems(node: PeerNode) -> None:
    async with timeout(30), grpc.aio.insecure_channel(node.grpc_address) as channel:
        stub: Any = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        assert (await stub.Status(store_pb2.StatusRequest())).state == "serving"
        assert list((await stub.Check(store_pb2.CheckRequest())).problems) == [
            "one thing",
            "another",
        ]


async def test_second_server_on_the_same_port_is_refused(node: PeerNode) -> None:
    port = int(node.grpc_address.rpartition(":")[2])
    server = GrpcServer(DaemonSection(grpc_port=port), Life(NodeId("b")), OperatorGate())
    with pytest.raises(UnavailableError, match=str(port)):
        await server.start()
    await server.stop(0)


async def test_a_daemon_that_recovers_answers_its_state_and_nothing_else() -> None:
    life = Life(NodeId("a"), doing="reading the SSD")
    server = GrpcServer(DaemonSection(grpc_port=0), life, OperatorGate())
    address = await server.start()
    try:
        async with timeout(60), grpc.aio.insecure_channel(address) as channel:
            operators: Any = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
            status = await operators.Status(store_pb2.StatusRequest())
            assert (status.node_id, status.state, status.incarnation) == ("a", "recovering", 0)
            peers: Any = store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
            events: Any = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
            refused = (
                operators.Clear(store_pb2.ClearRequest()),
                peers.Acquire(_acquire()),
                events.Subscribe(index_pb2.SubscribeRequest()).read(),
            )
            for call in refused:
                with pytest.raises(grpc.aio.AioRpcError, match="reading the SSD") as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)
