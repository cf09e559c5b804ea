"""TCP transport: framed reads on blocking sockets, received straight into the pool.

Safe to cancel: a read that fails, times out or is cancelled closes its connection before it
returns, and bytes that are still under way die with the socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from client_sdk.transport.base import (
    Cancellation,
    Peer,
    Segment,
    TransportAddress,
)
from client_sdk.transport.connections import (
    Link,
    PeerConnections,
    ReadLimits,
    exchange_hellos,
    join_host_port,
)
from client_sdk.transport.frames import (
    ANSWER_BYTES,
    AnswerHeader,
    Status,
    pack_request,
)
from client_sdk.transport.timed_socket import Clock, TimedSocket
from emberkv_proto.errors import (
    FrameError,
    InvalidRequestError,
    LeaseExpiredError,
    UnavailableError,
)
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import (
    Capabilities,
    LeaseReply,
    Lend,
    MayRead,
    TransportReport,
)
from store_daemon.transport.ranges import checked_total, receive_segments
from store_daemon.transport.tcp_leases import ask_lease
from store_daemon.transport.tcp_server import OtherProtocols, RegionServer, ServeLimits

SERVED_WITH_TCP = ("tcp", "ucx", "ucp")
"""Transports whose owners answer plain reads too, at the same address."""

TcpPeer = PeerConnections[Link]


class TcpTransport:
    """Implements `transport.base.Transport`."""

    name = "tcp"
    capabilities = Capabilities(
        one_sided=False, gpu_direct=False, needs_target_cpu=True, cancel_safe=True
    )

    def __init__(
        self,
        incarnation: Incarnation,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised_host: str = "",
        read_limits: ReadLimits | None = None,
        serve_limits: ServeLimits | None = None,
        clock: Clock = time.monotonic,
        others: OtherProtocols | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._host = host
        self._port = port
        self._advertised_host = advertised_host or host
        self._read_limits = read_limits or ReadLimits()
        self._serve_limits = serve_limits or ServeLimits()
        self._clock = clock
        self._others = {} if others is None else others
        self._region: memoryview | None = None
        self._server: RegionServer | None = None
        self._lock = threading.Lock()
        self._peers: set[TcpPeer] = set()
        self._reads = 0
        self._reads_ended = threading.Condition(self._lock)
        self._is_shut_down = False

    @property
    def server(self) -> RegionServer | None:
        """The serving half, for its counters."""
        return self._server

    def register(self, region: memoryview) -> None:
        if self._region is not None:
            raise InvalidRequestError("a region is registered already")
        if region.readonly or not region.contiguous:
            raise InvalidRequestError("the region must be writable and contiguous")
        self._region = region.cast("B")

    def serve(self, may_read: MayRead, lend: Lend | None = None) -> TransportAddress:
        self._server = RegionServer(
            self._need_region(),
            self._incarnation,
            may_read,
            self._serve_limits,
            self._clock,
            self._others,
            lend,
        )
        port = self._server.start(self._host, self._port)
        return TransportAddress(
            self.name, join_host_port(self._advertised_host, port), self._incarnation
        )

    def connect(self, address: TransportAddress) -> Peer:
        if address.transport not in SERVED_WITH_TCP:
            raise InvalidRequestError(f"peer offers transport {address.transport!r}, not tcp")

        def greet(connection: TimedSocket) -> Link:
            exchange_hellos(connection, address)
            return Link(connection)

        peer = TcpPeer(address, self._read_limits, self._clock, greet)
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the transport is shut down")
            self._peers.add(peer)
        return peer

    def read(
        self,
        peer: Peer,
        lease_id: int,
        segments: Sequence[Segment],
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> Sequence[int]:
        total = checked_total(segments, len(self._need_region()))
        assert isinstance(peer, PeerConnections)
        with (
            self._reading() as region,
            peer.connection(deadline_seconds, cancellation) as link,
        ):
            connection = link.sock
            connection.send(pack_request(lease_id, segments))
            answer = AnswerHeader.unpack(connection.receive(ANSWER_BYTES))
            if answer.status is Status.REFUSED:
                raise LeaseExpiredError(
                    f"{peer.address.address} refused a read under lease {lease_id}"
                )
            if answer.status is not Status.OK or answer.payload_bytes != total:
                raise FrameError(f"{peer.address.address} answered {answer}; wanted {total} bytes")
            return receive_segments(connection, region, segments)

    def ask_lease(
        self,
        peer: Peer,
        request: bytes,
        first_blocks: int,
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> LeaseReply:
        assert isinstance(peer, PeerConnections)
        return ask_lease(peer, request, first_blocks, deadline_seconds, cancellation, self._reading)

    def is_busy(self, peer: Peer) -> bool:
        assert isinstance(peer, PeerConnections)
        return peer.is_busy

    def close(self, peer: Peer) -> None:
        assert isinstance(peer, PeerConnections)
        with self._lock:
            self._peers.discard(peer)
        peer.close()

    def report(self) -> TransportReport:
        served = 0 if self._server is None else self._server.served_bytes
        refused = 0 if self._server is None else self._server.refused_reads
        counts = {"served_bytes": served, "refused_reads": refused}
        return TransportReport(self.name, (), False, counts, 0)

    def shutdown(self) -> None:
        with self._lock:
            self._is_shut_down = True
            peers, self._peers = self._peers, set()
        for peer in peers:
            peer.close()
        if self._server is not None:
            self._server.stop()
        with self._lock:
            while self._reads:
                self._reads_ended.wait()
        if self._region is not None:
            self._region.release()
            self._region = None

    def check_integrity(self) -> None:
        """Assert what each peer and the server assert of themselves."""
        with self._lock:
            assert self._reads >= 0
            peers = list(self._peers)
        for peer in peers:
            peer.check_integrity()
        if self._server is not None:
            self._server.check_integrity()

    @contextmanager
    def _reading(self) -> Iterator[memoryview]:
        """Keep the region until the body has ended."""
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the transport is shut down")
            region = self._need_region()
            self._reads += 1
        try:
            yield region
        finally:
            with self._lock:
                self._reads -= 1
                self._reads_ended.notify_all()

    def _need_region(self) -> memoryview:
        if self._region is None:
            raise UnavailableError("no region is registered")
        return self._region
