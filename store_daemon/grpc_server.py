"""gRPC carrier of the daemon: events for the index, leases for peers, status for operators."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from client_sdk.index_client import ERROR_METADATA_KEY, MAX_MESSAGE_BYTES
from emberkv_proto.convert import (
    batch_to_wire,
    hashes_from_wire,
    namespace_id_from_wire,
    page_to_wire,
    report_to_wire,
    u64s_to_wire,
)
from emberkv_proto.errors import EmberError, InvalidRequestError, UnavailableError
from emberkv_proto.events import EventBatch
from emberkv_proto.types import Incarnation, NodeReport, Seq
from emberkv_proto.v1 import common_pb2, index_pb2, index_pb2_grpc, store_pb2, store_pb2_grpc
from store_daemon.config import DaemonSection
from store_daemon.ports import PeerStore
from store_daemon.publisher import Published, Publisher
from store_daemon.transport.base import TransportAddress
from store_daemon.transport.tcp import join_host_port

log = logging.getLogger(__name__)

MAX_LEASE_SECONDS = 120.0
MAX_NODE_ID_BYTES = 253
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """What the daemon answers operators with, over any carrier."""

    status: Callable[[], Awaitable[store_pb2.StatusResponse]]
    check: Callable[[], Awaitable[list[str]]]
    """Describe every invariant that does not hold; nothing when all do."""


class GrpcServer:
    """Serves Events, Peer and Operator on `grpc_host:grpc_port`. Make it on its event loop.

    A failed call carries the error's gRPC code, its message and, as trailing metadata, its type.
    """

    def __init__(
        self,
        settings: DaemonSection,
        publisher: Publisher,
        peer_store: PeerStore,
        transport: TransportAddress,
        operator: OperatorCalls,
    ) -> None:
        self._settings = settings
        self._publisher = publisher
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Two daemons on one port must fail, not share its connections.
                ("grpc.so_reuseport", 0),
            )
        )
        index_pb2_grpc.add_EventsServicer_to_server(_Events(publisher), self._server)  # type: ignore[no-untyped-call]
        store_pb2_grpc.add_PeerServicer_to_server(_Peer(peer_store, transport), self._server)  # type: ignore[no-untyped-call]
        store_pb2_grpc.add_OperatorServicer_to_server(_Operator(operator), self._server)  # type: ignore[no-untyped-call]

    async def start(self) -> str:
        """Listen; return host:port for others to connect to. Raises UnavailableError."""
        wanted = join_host_port(self._settings.grpc_host, self._settings.grpc_port)
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise UnavailableError(f"cannot serve gRPC on {wanted}: {error}") from None
        await self._server.start()
        return join_host_port(self._settings.advertised_host or self._settings.grpc_host, port)

    async def stop(self, grace_seconds: float) -> None:
        """End the event streams, let other calls finish for `grace_seconds`, then cut them."""
        self._publisher.close()
        await self._server.stop(grace_seconds)


class _Events(index_pb2_grpc.EventsServicer):
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def Subscribe(  # noqa: N802
        self, request: index_pb2.SubscribeRequest, context: _Context
    ) -> None:
        stream = self._publisher.subscribe(Incarnation(request.incarnation), Seq(request.from_seq))
        async with _errors_answered(context), aclosing(stream):
            async for published in stream:
                await context.write(_published_to_wire(published))

    async def Snapshot(  # noqa: N802
        self, request: index_pb2.SnapshotRequest, context: _Context
    ) -> None:
        pages = self._publisher.snapshot_pages()
        async with _errors_answered(context), aclosing(pages):
            async for page in pages:
                await context.write(page_to_wire(page))


class _Peer(store_pb2_grpc.PeerServicer):
    def __init__(self, store: PeerStore, transport: TransportAddress) -> None:
        self._store = store
        self._transport = transport

    async def Acquire(  # noqa: N802
        self, request: store_pb2.PeerAcquireRequest, context: _Context
    ) -> store_pb2.PeerAcquireResponse:
        async with _errors_answered(context):
            hashes = hashes_from_wire(request.hashes)
            seconds = request.lease_seconds
            if not hashes:
                raise InvalidRequestError("peer acquire without hashes")
            if not (math.isfinite(seconds) and 0 < seconds <= MAX_LEASE_SECONDS):
                raise InvalidRequestError(
                    f"lease_seconds {seconds} is not in 0..{MAX_LEASE_SECONDS}"
                )
            if not 0 < len(request.requester) <= MAX_NODE_ID_BYTES:
                raise InvalidRequestError("requester must be a node id")
            grant = await self._store.peer_acquire(
                namespace_id_from_wire(request.namespace_id), hashes, seconds, request.requester
            )
            return store_pb2.PeerAcquireResponse(
                lease_id=grant.lease_id,
                incarnation=self._transport.incarnation,
                transport=self._transport.transport,
                transport_address=self._transport.address,
                usable_blocks=grant.usable_blocks,
                parts=grant.parts,
                offsets=u64s_to_wire([part.offset for part in grant.ranges]),
                lengths=u64s_to_wire([part.length for part in grant.ranges]),
                checksums=u64s_to_wire(grant.checksums),
            )
        raise AssertionError("unreachable: an error aborts the call")

    async def Release(  # noqa: N802
        self, request: store_pb2.PeerReleaseRequest, context: _Context
    ) -> common_pb2.Empty:
        async with _errors_answered(context):
            self._store.peer_release(request.lease_id)
        return common_pb2.Empty()


class _Operator(store_pb2_grpc.OperatorServicer):
    def __init__(self, calls: OperatorCalls) -> None:
        self._calls = calls

    async def Status(  # noqa: N802
        self, request: store_pb2.StatusRequest, context: _Context
    ) -> store_pb2.StatusResponse:
        async with _errors_answered(context):
            return await self._calls.status()
        raise AssertionError("unreachable: an error aborts the call")

    async def Check(  # noqa: N802
        self, request: store_pb2.CheckRequest, context: _Context
    ) -> store_pb2.CheckResponse:
        async with _errors_answered(context):
            return store_pb2.CheckResponse(problems=await self._calls.check())
        raise AssertionError("unreachable: an error aborts the call")


@asynccontextmanager
async def _errors_answered(context: _Context) -> AsyncIterator[None]:
    """Turn an EmberError of the body into the call's status. Other errors are gRPC's to log."""
    try:
        yield
    except EmberError as error:
        await context.abort(
            _STATUS_CODES[error.code],
            str(error),
            trailing_metadata=((ERROR_METADATA_KEY, type(error).__name__),),
        )


def _published_to_wire(published: Published) -> index_pb2.EventMessage:
    match published:
        case EventBatch():
            return index_pb2.EventMessage(batch=batch_to_wire(published))
        case NodeReport():
            return index_pb2.EventMessage(report=report_to_wire(published))
        case _:
            needed = index_pb2.SnapshotNeeded(incarnation=published.incarnation, seq=published.seq)
            return index_pb2.EventMessage(snapshot_needed=needed)
