"""A whole peer: memory store, TCP transport and gRPC server, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emberkv_proto.layout import Namespace
from emberkv_proto.types import Incarnation, NodeId
from emberkv_proto.v1 import store_pb2
from store_daemon.config import DaemonSection
from store_daemon.grpc_server import GrpcServer, OperatorCalls
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


async def _status() -> store_pb2.StatusResponse:
    return store_pb2.StatusResponse(node_id="peer", state="serving")


async def _check() -> list[str]:
    return ["one thing", "another"]


@contextmanager
def peer_node(namespace: Namespace, incarnation: int = 3) -> Iterator[PeerNode]:
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
            address = transport.serve(store.may_read)
            settings = DaemonSection(grpc_port=0)
            server = GrpcServer(settings, publisher, store, address, OperatorCalls(_status, _check))
            grpc_address = await server.start()
            loop = asyncio.get_running_loop()
            nodes.append(PeerNode(store, transport, publisher, residency, grpc_address, loop))
            stopping.append(asyncio.Event())
            started.set()
            await stopping[0].wait()
            await server.stop(0.1)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="peer-node")
        thread.start()
        assert started.wait(10)
        try:
            yield nodes[0]
        finally:
            nodes[0].loop.call_soon_threadsafe(stopping[0].set)
            thread.join()
            transport.shutdown()
