"""Leases that are asked for at the transport's port: who may, what is sent, what is given back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from client_sdk.transport.base import BusyHereError, Cancellation, Segment, TransportAddress
from client_sdk.transport.connections import Link, PeerConnections, ReadLimits, exchange_hellos
from client_sdk.transport.frames import (
    ANSWER_BYTES,
    LEASE_MAGIC,
    MAX_LEASE_BYTES,
    MAX_READ_BYTES,
    REQUEST_BYTES,
    AnswerHeader,
    LeaseAnswer,
    LeaseRequest,
    Status,
)
from client_sdk.transport.timed_socket import TimedSocket
from emberkv_proto.errors import (
    AccessDeniedError,
    FrameError,
    InvalidRequestError,
    UnavailableError,
)
from emberkv_proto.hashing import checksum
from emberkv_proto.types import BlockHash, Incarnation, NodeId
from emberkv_proto.v1 import store_pb2
from store_daemon.peer_client import RemoteGrant, grant_from_wire, lease_request
from store_daemon.peer_transfer import PeerTransfers, TransferLimits
from store_daemon.ports import PoolRange
from store_daemon.transport.base import FirstBytes, Lent
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.tcp_leases import answer_lease
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.peer_doubles import MemoryTarget, chain, part_payload, small_namespace
from tests.helpers.peer_node import PeerNode, peer_node
from tests.helpers.waiting import wait_until

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 8)
MIB = 1 << 20


@pytest.fixture
def owner() -> Iterator[PeerNode]:
    with peer_node(NAMESPACE) as node:
        node.store.put(HASHES)
        yield node


def request(owner: PeerNode, hashes: list[BlockHash] = HASHES) -> store_pb2.PeerAcquireRequest:
    asked = lease_request(NodeId("here"), NAMESPACE, hashes, 5.0)
    asked.ticket = owner.desk.ticket
    return asked


def test_what_is_lent_is_what_grpc_lends_and_the_first_blocks_are_named(owner: PeerNode) -> None:
    lent = owner.desk.lend(request(owner).SerializeToString(), 3)
    answer = store_pb2.PeerAcquireResponse.FromString(lent.answer)
    grant = grant_from_wire(answer, NAMESPACE, len(HASHES))
    assert grant.usable_blocks == len(HASHES)
    assert list(lent.first) == list(grant.ranges[: 3 * NAMESPACE.parts])
    assert owner.store.leases[lent.lease_id] == grant.ranges
    lent.give_back()
    wait_until(lambda: not owner.store.leases)
    lent.give_back()  # it has ended already
    lent = owner.desk.lend(request(owner).SerializeToString(), 1 << 40)
    assert len(lent.first) == len(HASHES) * NAMESPACE.parts
    lent.give_back()
    wait_until(lambda: not owner.store.leases)
    owner.desk.check_integrity()


def test_nothing_is_lent_without_the_ticket_of_this_life(owner: PeerNode) -> None:
    asked = request(owner)
    for ticket in (b"", bytes(16), owner.desk.ticket[:-1], owner.desk.ticket + b"\0"):
        asked.ticket = ticket
        with pytest.raises(AccessDeniedError):
            owner.desk.lend(asked.SerializeToString(), 0)
    assert not owner.store.leases


def test_requests_are_checked_as_grpc_s_are(owner: PeerNode) -> None:
    with pytest.raises(InvalidRequestError, match="parsed"):
        owner.desk.lend(b"\xff" * 40, 0)
    for change in ("hashes", "lease_seconds", "requester"):
        asked = request(owner)
        asked.ClearField(change)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError):
            owner.desk.lend(asked.SerializeToString(), 0)
    asked = request(owner)
    asked.wait_seconds = float("nan")
    with pytest.raises(InvalidRequestError):
        owner.desk.lend(asked.SerializeToString(), 0)


def test_a_closed_desk_lends_nothing(owner: PeerNode) -> None:
    owner.loop.call_soon_threadsafe(owner.desk.close)
    wait_until(lambda: owner.desk.is_closed)
    with pytest.raises(UnavailableError):
        owner.desk.lend(request(owner).SerializeToString(), 0)
    owner.desk.check_integrity()


# ---- over the wire ----


@contextmanager
def reading() -> Iterator[tuple[TcpTransport, memoryview]]:
    with AnonymousPool(MIB) as pool:
        transport = TcpTransport(Incarnation(8), read_limits=ReadLimits(progress_seconds=20.0))
        transport.register(pool.view)
        try:
            yield transport, pool.view
            transport.check_integrity()
        finally:
            transport.shutdown()


def test_first_bytes_come_behind_the_lease_and_the_connection_reads_on(owner: PeerNode) -> None:
    asked = request(owner).SerializeToString()
    with reading() as (transport, view):
        peer = transport.connect(owner.address)
        for _ in range(3):
            reply = transport.ask_lease(peer, asked, 2, 30.0, Cancellation())
            message = store_pb2.PeerAcquireResponse.FromString(reply.answer)
            grant = grant_from_wire(message, NAMESPACE, len(HASHES))
            first = reply.first
            assert first is not None
            segments, at = [], 0
            for place in grant.ranges[: 2 * grant.parts]:
                segments.append(Segment(at, place.offset, place.length))
                at += place.length
            assert first.byte_count == at
            sums = first.take(segments, 30.0, Cancellation())
            assert list(sums) == list(grant.checksums[: len(sums)])
            with pytest.raises(UnavailableError):
                first.take(segments, 30.0, Cancellation())
            first.abandon()  # no more than once
            rest = grant.ranges[-1]
            segment = Segment(at, rest.offset, rest.length)
            (found,) = transport.read(peer, grant.lease_id, [segment], 30.0, Cancellation())
            assert found == grant.checksums[-1] == checksum(view[at : at + rest.length])
            payload = part_payload(HASHES[0], 0, NAMESPACE.part_bytes(0))
            assert view[: len(payload)] == payload
        assert len(owner.transport.server._connections) == 1  # type: ignore[union-attr]


def test_first_bytes_that_nobody_takes_die_with_their_connection(owner: PeerNode) -> None:
    asked = request(owner).SerializeToString()
    with reading() as (transport, view):
        peer = transport.connect(owner.address)
        replies = [transport.ask_lease(peer, asked, 8, 30.0, Cancellation()) for _ in range(2)]
        assert transport.is_busy(peer)
        for reply in replies:
            assert reply.first is not None
            reply.first.abandon()
            with pytest.raises(UnavailableError):
                reply.first.take([Segment(0, 0, 1)], 30.0, Cancellation())
        assert not transport.is_busy(peer)
        assert bytes(view) == bytes(MIB)
        wait_until(lambda: not owner.transport.server._connections)  # type: ignore[union-attr]


async def test_first_bytes_wait_for_no_thread_that_waits_for_their_connection(
    owner: PeerNode,
) -> None:
    def asked(hashes: list[BlockHash]) -> bytes:
        return request(owner, hashes).SerializeToString()

    with reading() as (transport, view):
        peer = transport.connect(owner.address)
        target = MemoryTarget(view, NAMESPACE)
        transfers = PeerTransfers(view, transport, TransferLimits(threads=1), time.monotonic)

        async def run(hashes: list[BlockHash], answer: bytes, first: FirstBytes | None) -> None:
            message = store_pb2.PeerAcquireResponse.FromString(answer)
            grant = grant_from_wire(message, NAMESPACE, len(hashes))
            remote = RemoteGrant(grant, owner.address, b"", first)
            room = target.allot(NAMESPACE, None, hashes)
            try:
                deadline = time.monotonic() + 30.0
                await transfers.run(peer, remote, room, hashes, deadline, lambda block: None)
            finally:
                room.close()

        runs = [HASHES[:2], HASHES[2:4], HASHES[4:6]]
        replies = [
            transport.ask_lease(peer, asked(hashes), 2, 30.0, Cancellation()) for hashes in runs[1:]
        ]
        assert transport.is_busy(peer)
        await asyncio.gather(
            run(runs[0], owner.desk.lend(asked(runs[0]), 0).answer, None),
            *(
                run(h, reply.answer, reply.first)
                for h, reply in zip(runs[1:], replies, strict=True)
            ),
        )
        transfers.close()
        target.check()
        assert set(target.landed) == set(HASHES[:6])


def test_a_request_waits_hardly_for_a_connection_that_reads_hold(owner: PeerNode) -> None:
    asked = request(owner).SerializeToString()
    with reading() as (transport, _):
        peer = transport.connect(owner.address)
        held = [transport.ask_lease(peer, asked, 8, 30.0, Cancellation()) for _ in range(2)]
        began = time.monotonic()
        with pytest.raises(BusyHereError):
            transport.ask_lease(peer, asked, 8, 30.0, Cancellation())
        assert time.monotonic() - began < 15.0
        for reply in held:
            assert reply.first is not None
            reply.first.abandon()


def test_a_lease_outlives_first_bytes_that_were_abandoned(owner: PeerNode) -> None:
    asked = request(owner).SerializeToString()
    go_on = owner.store.hold_reads(HASHES)
    with reading() as (transport, _):
        peer = transport.connect(owner.address)
        leased = owner.desk.lend(asked, 0)
        segments = [Segment(0, owner.store.leases[leased.lease_id][0].offset, 100)]
        # Held before its first byte: the answer goes out, and then the reader.
        reply = transport.ask_lease(peer, asked, 8, 30.0, Cancellation())
        assert reply.first is not None
        reply.first.abandon()
        go_on.set()
        wait_until(lambda: not owner.transport.server._connections)  # type: ignore[union-attr]
        lease_id = store_pb2.PeerAcquireResponse.FromString(reply.answer).lease_id
        transport.read(peer, lease_id, segments, 30.0, Cancellation())
    assert sorted(owner.store.leases) == [leased.lease_id, lease_id]


def test_a_lease_whose_answer_cannot_be_sent_is_given_back(owner: PeerNode) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    connection = TimedSocket(ours, 20.0, time.monotonic)
    body = request(owner).SerializeToString()
    header = LeaseRequest(8, 0).pack()
    lent = owner.desk.lend(body, 8)
    with pytest.raises(UnavailableError):
        answer_lease(connection, header, lambda raw, blocks: lent, send_range)
    connection.close()
    wait_until(lambda: not owner.store.leases)


def test_a_lease_whose_asker_has_gone_meanwhile_is_given_back(owner: PeerNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    connection = TimedSocket(ours, 20.0, time.monotonic)
    body = request(owner).SerializeToString()

    def lend(raw: bytes, blocks: int) -> Lent:
        lent = owner.desk.lend(body, blocks)
        theirs.close()
        wait_until(lambda: not connection.is_quiet())
        return lent

    with pytest.raises(UnavailableError):
        answer_lease(connection, LeaseRequest(8, 0).pack(), lend, send_range)
    connection.close()
    wait_until(lambda: not owner.store.leases)


def send_range(connection: TimedSocket, lease_id: int, wanted: PoolRange) -> None:
    raise AssertionError("bytes behind an answer that was not sent")


def test_first_bytes_for_other_ranges_than_asked_are_refused(owner: PeerNode) -> None:
    asked = request(owner).SerializeToString()
    with reading() as (transport, view):
        peer = transport.connect(owner.address)
        for segments in ([Segment(0, 0, 1)], [Segment(MIB, 0, 1)]):
            reply = transport.ask_lease(peer, asked, 1, 30.0, Cancellation())
            assert reply.first is not None
            with pytest.raises(InvalidRequestError):
                reply.first.take(segments, 30.0, Cancellation())
        assert bytes(view) == bytes(MIB)
        assert not transport.is_busy(peer)


def test_an_owner_s_error_leaves_the_connection_as_it_was(owner: PeerNode) -> None:
    with reading() as (transport, _):
        peer = transport.connect(owner.address)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="AccessDeniedError"):
                transport.ask_lease(peer, b"", 1, 30.0, Cancellation())
        assert len(owner.transport.server._connections) == 1  # type: ignore[union-attr]
        asked = request(owner, chain(NAMESPACE, 2, seed=9)).SerializeToString()
        reply = transport.ask_lease(peer, asked, 4, 30.0, Cancellation())
        assert reply.first is None, "bytes of nothing"


def test_an_owner_that_lends_only_by_grpc_ends_the_connection(owner: PeerNode) -> None:
    with AnonymousPool(MIB) as pool, reading() as (transport, _):
        plain = TcpTransport(Incarnation(3))
        plain.register(pool.view)
        try:
            peer = transport.connect(plain.serve(lambda lease, offset, length: True))
            with pytest.raises((FrameError, UnavailableError)):
                transport.ask_lease(peer, b"", 0, 30.0, Cancellation())
        finally:
            plain.shutdown()


@pytest.mark.parametrize(
    "frame",
    [
        LeaseRequest(0, MAX_LEASE_BYTES + 1).pack(),
        LEASE_MAGIC[:-1] + b"!" + bytes(REQUEST_BYTES - len(LEASE_MAGIC)),
    ],
)
def test_requests_out_of_bounds_are_malformed(owner: PeerNode, frame: bytes) -> None:
    address: TransportAddress = owner.address

    def greet(connection: TimedSocket) -> Link:
        exchange_hellos(connection, address)
        return Link(connection)

    links = PeerConnections(address, ReadLimits(), time.monotonic, greet)
    with links.connection(30.0, Cancellation()) as link:
        link.sock.send(frame)
        assert AnswerHeader.unpack(link.sock.receive(ANSWER_BYTES)).status is Status.MALFORMED
        with pytest.raises(UnavailableError, match="closed"):
            link.sock.receive(1)
    links.close()


def test_answers_out_of_bounds_are_no_frames() -> None:
    good = LeaseAnswer(Status.OK, 5, 7)
    assert LeaseAnswer.unpack(good.pack()) == good
    for bad in (
        LeaseAnswer(Status.OK, MAX_LEASE_BYTES + 1, 0),
        LeaseAnswer(Status.OK, 0, MAX_READ_BYTES + 1),
    ):
        with pytest.raises(FrameError):
            LeaseAnswer.unpack(bad.pack())
    with pytest.raises(FrameError):
        LeaseAnswer.unpack(AnswerHeader(Status.OK, 0).pack())
