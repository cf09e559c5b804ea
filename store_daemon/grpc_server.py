"""gRPC carrier of the daemon: events for the index, leases for peers, hints, operators' orders."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from client_sdk import aio
from client_sdk.index_client import MAX_MESSAGE_BYTES
from client_sdk.operator_gate import OperatorGate
from client_sdk.tls import Tls, bind
from client_sdk.transport.base import TransportAddress
from client_sdk.transport.connections import join_host_port
from emberkv_proto.convert import (
    batch_to_wire,
    bucket_choices_from_wire,
    bucket_rows_to_wire,
    page_to_wire,
    report_to_wire,
)
from emberkv_proto.errors import DeadlineError, UnavailableError
from emberkv_proto.events import BucketRows, EventBatch
from emberkv_proto.types import Incarnation, NodeReport, Seq
from emberkv_proto.v1 import common_pb2, index_pb2, index_pb2_grpc, store_pb2, store_pb2_grpc
from store_daemon.config import DaemonSection
from store_daemon.grpc_errors import Context, errors_answered
from store_daemon.hint_server import HintService
from store_daemon.lease_desk import grant_to_wire, lend
from store_daemon.life import Life
from store_daemon.operator_server import OperatorCalls, OperatorService
from store_daemon.ports import HintStore, PeerStore
from store_daemon.publisher import BucketWish, Published, Publisher
from store_daemon.session_tunnel import SessionDoor, SessionTunnel

log = logging.getLogger(__name__)

WRITE_SECONDS = 20.0
"""For one message of a stream; a reader that is stopped for longer subscribes again."""


@dataclass(frozen=True, slots=True)
class GrpcParts:
    """What a daemon that has recovered answers from."""

    publisher: Publisher
    peer_store: PeerStore
    hints: HintStore
    transport: TransportAddress
    operators: OperatorCalls
    sessions: SessionDoor | None = None
    """None: engines of other hosts are not taken."""
    ticket: bytes = b""
    """With which other daemons may ask for leases at the transport's port."""


class GrpcServer:
    """Serves Events, Peer, Hints and Operator on `grpc_host:grpc_port`. Make it on its event loop.

    It listens before the daemon has recovered: until `open_to` every call but an operator's Status
    is refused as UNAVAILABLE. A failed call carries the error's gRPC code, its message and, as
    trailing metadata, its type.
    """

    def __init__(
        self, settings: DaemonSection, life: Life, gate: OperatorGate, tls: Tls | None = None
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._door = _Door(life)
        self._operators = OperatorService(life, gate)
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Two daemons on one port must fail, not share its connections.
                ("grpc.so_reuseport", 0),
            )
        )
        index_pb2_grpc.add_EventsServicer_to_server(_Events(self._door), self._server)  # type: ignore[no-untyped-call]
        store_pb2_grpc.add_PeerServicer_to_server(_Peer(self._door), self._server)  # type: ignore[no-untyped-call]
        store_pb2_grpc.add_HintsServicer_to_server(  # type: ignore[no-untyped-call]
            HintService(lambda: self._door.enter().hints), self._server
        )
        store_pb2_grpc.add_SessionsServicer_to_server(  # type: ignore[no-untyped-call]
            SessionTunnel(lambda: self._door.enter().sessions), self._server
        )
        self._server.add_generic_rpc_handlers((self._operators.handlers(),))

    async def start(self) -> str:
        """Listen; return host:port for others to connect to. Raises UnavailableError."""
        wanted = join_host_port(self._settings.grpc_host, self._settings.grpc_port)
        try:
            port = bind(self._server, wanted, self._tls)
        except RuntimeError as error:
            raise UnavailableError(f"cannot serve gRPC on {wanted}: {error}") from None
        await self._server.start()
        return join_host_port(self._settings.advertised_host or self._settings.grpc_host, port)

    def open_to(self, parts: GrpcParts) -> None:
        """The daemon has recovered: answer everything."""
        self._operators.open_to(parts.operators)
        self._door.parts = parts

    async def stop(self, grace_seconds: float) -> None:
        """End the event streams, let other calls finish for `grace_seconds`, then cut them."""
        if self._door.parts is not None:
            self._door.parts.publisher.close()
        await self._server.stop(grace_seconds)


class _Door:
    """What the services reach the daemon's parts through."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.parts: GrpcParts | None = None

    def enter(self) -> GrpcParts:
        """Raises UnavailableError before there is anything behind it."""
        if self.parts is None:
            raise UnavailableError(f"the daemon is recovering ({self._life.doing}); try later")
        return self.parts


class _Events(index_pb2_grpc.EventsServicer):
    def __init__(self, door: _Door) -> None:
        self._door = door

    async def Subscribe(  # noqa: N802
        self, request: index_pb2.SubscribeRequest, context: Context
    ) -> None:
        async with errors_answered(context):
            publisher = self._door.enter().publisher
            wish = BucketWish(request.wants_bucket_xors, bucket_choices_from_wire(request.buckets))
            stream = publisher.subscribe(
                Incarnation(request.incarnation), Seq(request.from_seq), wish
            )
            async with aclosing(stream):
                async for published in stream:
                    await _write(context, _published_to_wire(published))

    async def Snapshot(  # noqa: N802
        self, request: index_pb2.SnapshotRequest, context: Context
    ) -> None:
        async with errors_answered(context):
            pages = self._door.enter().publisher.snapshot_pages()
            async with aclosing(pages):
                async for page in pages:
                    await _write(context, page_to_wire(page))


class _Peer(store_pb2_grpc.PeerServicer):
    def __init__(self, door: _Door) -> None:
        self._door = door

    async def Acquire(  # noqa: N802
        self, request: store_pb2.PeerAcquireRequest, context: Context
    ) -> store_pb2.PeerAcquireResponse:
        async with errors_answered(context):
            parts = self._door.enter()
            answer = grant_to_wire(await lend(parts.peer_store, request))
            answer.incarnation = parts.transport.incarnation
            answer.transport = parts.transport.transport
            answer.transport_address = parts.transport.address
            answer.ticket = parts.ticket
            return answer
        raise AssertionError("unreachable: an error aborts the call")

    async def Release(  # noqa: N802
        self, request: store_pb2.PeerReleaseRequest, context: Context
    ) -> common_pb2.Empty:
        async with errors_answered(context):
            self._door.enter().peer_store.peer_release(request.lease_id)
        return common_pb2.Empty()


async def _write(context: Context, message: Message) -> None:
    """Raises DeadlineError for a reader that takes nothing: it holds one of few snapshots."""
    try:
        async with aio.timeout(WRITE_SECONDS):
            await context.write(message)
    except asyncio.TimeoutError:
        raise DeadlineError(f"nothing was read for {WRITE_SECONDS} seconds") from None


def _published_to_wire(published: Published) -> index_pb2.EventMessage:
    match published:
        case EventBatch():
            return index_pb2.EventMessage(batch=batch_to_wire(published))
        case NodeReport():
            return index_pb2.EventMessage(report=report_to_wire(published))
        case BucketRows():
            return index_pb2.EventMessage(bucket_rows=bucket_rows_to_wire(published))
        case _:
            needed = index_pb2.SnapshotNeeded(
                incarnation=published.incarnation, seq=published.seq, node_id=published.node_id
            )
            return index_pb2.EventMessage(snapshot_needed=needed)
