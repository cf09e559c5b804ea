"""Leases over the connections that bytes come over: the first bytes come right behind them.

What is said of a lease is not the transport's: it carries the request and the answer as they are.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from client_sdk import faults
from client_sdk.transport.base import Cancellation, ReadCancelledError, Segment
from client_sdk.transport.connections import Link, PeerConnections
from client_sdk.transport.frames import (
    ANSWER_BYTES,
    AnswerHeader,
    LeaseAnswer,
    LeaseRequest,
    Status,
)
from client_sdk.transport.timed_socket import TimedSocket
from emberkv_proto.errors import EmberError, FrameError, InvalidRequestError, UnavailableError
from store_daemon.ports import PoolRange
from store_daemon.transport.base import LeaseReply, Lend
from store_daemon.transport.ranges import checked_total, receive_segments

FREE_SECONDS = 0.05
"""How long a request waits for reads to leave it a connection; gRPC needs none of theirs."""
Borrowed = Callable[[], AbstractContextManager[memoryview]]
"""The region, which stays registered while the body runs."""
SendRange = Callable[[TimedSocket, int, PoolRange], None]


def answer_lease(
    connection: TimedSocket, raw: bytes | bytearray, lend: Lend, send_range: SendRange
) -> None:
    """The owner's side, once `raw`, the request's header, has come. Raises EmberError to end."""
    try:
        header = LeaseRequest.unpack(raw)
    except FrameError:
        connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
        raise
    body = bytes(connection.receive(header.body_bytes))
    try:
        lent = lend(body, header.first_blocks)
    except EmberError as error:
        text = f"{type(error).__name__}: {error}".encode()
        connection.send(LeaseAnswer(Status.FAILED, len(text), 0).pack() + text)
        return
    if not connection.is_quiet():  # what is sent to who has closed seems to arrive
        lent.give_back()
        raise UnavailableError("who asked for a lease has gone meanwhile")
    total = sum(wanted.length for wanted in lent.first)
    head = LeaseAnswer(Status.OK, len(lent.answer), total).pack()
    try:
        connection.send(head + lent.answer, socket.MSG_MORE if total else 0)
    except EmberError:
        lent.give_back()  # nobody knows of it; from here on it is the reader's, whatever it takes
        raise
    if lent.first and not faults.hit(faults.PEER_SERVE):
        raise UnavailableError("fault peer_serve")
    for wanted in lent.first:
        send_range(connection, lent.lease_id, wanted)


def ask_lease(
    peer: PeerConnections[Link],
    request: bytes,
    first_blocks: int,
    deadline_seconds: float,
    cancellation: Cancellation,
    region: Borrowed,
) -> LeaseReply:
    """The reader's side. As `Transport.ask_lease`."""
    where = peer.address.address
    with ExitStack() as held:
        link = held.enter_context(peer.connection(deadline_seconds, cancellation, FREE_SECONDS))
        link.sock.send(LeaseRequest(first_blocks, len(request)).pack() + request)
        head = LeaseAnswer.unpack(link.sock.receive(ANSWER_BYTES))
        answer = bytes(link.sock.receive(head.body_bytes))
        if head.status is Status.FAILED and not head.payload_bytes:
            held.close()  # the connection is as good as before
            raise UnavailableError(f"{where} does not lend here: {answer.decode(errors='replace')}")
        if head.status is not Status.OK:
            raise FrameError(f"{where} answered {head} to a lease request")
        if not head.payload_bytes:
            return LeaseReply(answer, None)
        return LeaseReply(answer, HeldBytes(link, head.payload_bytes, region, held.pop_all()))


class HeldBytes:
    """Implements `transport.base.FirstBytes`: they wait in their connection, which is held."""

    def __init__(
        self, link: Link, byte_count: int, region: Borrowed, connection: ExitStack
    ) -> None:
        """`connection` is left with an error unless all was taken: it must not be used again."""
        self.byte_count = byte_count
        self._link = link
        self._region = region
        self._connection = connection
        self._lock = threading.Lock()
        self._is_over = False

    def take(
        self, segments: Sequence[Segment], deadline_seconds: float, cancellation: Cancellation
    ) -> list[int]:
        with self._lock:
            if self._is_over:
                raise UnavailableError("what came behind a lease was abandoned")
            self._is_over = True
        where = self._link.sock
        with self._connection, self._region() as region:
            if checked_total(segments, len(region)) != self.byte_count:
                raise InvalidRequestError(f"{segments} for {self.byte_count} bytes")
            with cancellation.aborting_with(self._link.abort):
                where.set_deadline(deadline_seconds)
                return receive_segments(where, region, segments)

    def abandon(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        error = ReadCancelledError("nobody takes what came behind a lease")
        self._connection.__exit__(type(error), error, None)
