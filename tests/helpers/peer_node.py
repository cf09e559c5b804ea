"""A whole peer: memory store, TCP transport and gRPC server, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from client_sdk.operator_gate import OperatorGate
from client_sdk.tls import Tls
from client_sdk.transport.base import TransportAddress
from emberkv_proto.errors import UnknownNamespaceError
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, Incarnation, NamespaceId, NodeId
from emberkv_proto.v1 import store_pb2
from store_daemon.config import DaemonSection
from store_daemon.grpc_server import GrpcParts, GrpcServer
from store_daemon.lease_desk import LeaseDesk
from store_daemon.life import Life
from store_daemon.operator_server import OperatorCalls
from store_daemon.ports import Followed, Hinted
from store_daemon.publisher import Publisher
from store_daemon.transport.tcp import TcpTransport
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.peer_doubles import MemoryPeerStore, MemoryResidency

MIB = 1 << 20


@dataclass
class PeerNode:
    store: MemoryPeerStore
    transport: TcpTransport
    publisher: Publisher
    residency: MemoryResidency
    grpc_address: str
    loop: asyncio.AbstractEventLoop
    desk: LeaseDesk
    address: TransportAddress


async def _status(request: store_pb2.StatusRequest) -> Message:
    return store_pb2.StatusResponse(node_id="peer", state="serving")


async def _check(request: store_pb2.CheckRequest) -> Message:
    return store_pb2.CheckResponse(problems=["one thing", "another"])


OPERATORS: OperatorCalls = {"Status": _status, "Check": _check}


class NoHints:
    """Implements `ports.HintStore`: nothing is known here."""

    def hint(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        followed: Followed | None,
    ) -> Hinted:
        raise UnknownNamespaceError(f"namespace {namespace_id.hex()} is not here")


@contextmanager
def peer_node(
    namespace: Namespace, incarnation: int = 3, tls: Tls | None = None
) -> Iterator[PeerNode]:
    """Serve until the body ends; then everything is stopped and joined."""
    residency = MemoryResidency()
    publisher = Publisher(
        NodeId("peer"), Incarnation(incarnation), residency, heartbeat_seconds=0.05
    )
    residency.sink = publisher
    started = threading.Event()
    nodes: list[PeerNode] = []
    with AnonymousPool(4 * MIB) as pool:
        transport = TcpTransport(Incarnation(incarnation))
        transport.register(pool.view)
        store = MemoryPeerStore(pool.view, namespace)
        stopping: list[asyncio.Event] = []

        async def serve() -> None:
            desk = LeaseDesk(store)
            address = transport.serve(store.may_read, desk.lend)
            settings = DaemonSection(grpc_port=0)
            ticket = desk.ticket if tls is None else b""
            server = GrpcServer(settings, Life(NodeId("peer")), OperatorGate(), tls)
            grpc_address = await server.start()
            server.open_to(
                GrpcParts(publisher, store, NoHints(), address, OPERATORS, ticket=ticket)
            )
            loop = asyncio.get_running_loop()
            nodes.append(
                PeerNode(store, transport, publisher, residency, grpc_address, loop, desk, address)
            )
            stopping.append(asyncio.Event())
            started.set()
            await stopping[0].wait()
            desk.close()
            desk.check_integrity()
            await server.stop(0.1)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="peer-node")
        thread.start()
        assert started.wait(60)
        try:
            yield nodes[0]
        finally:
            nodes[0].loop.call_soon_threadsafe(stopping[0].set)
            thread.join()
            transport.shutdown()
