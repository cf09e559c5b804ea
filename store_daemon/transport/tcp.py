"""TCP transport: framed reads on blocking sockets, received straight into the pool.

Safe to cancel: a read that fails, times out or is cancelled closes its connection before it
returns, and bytes that are still under way die with the socket.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from emberkv_proto.errors import (
    DeadlineError,
    FrameError,
    InvalidRequestError,
    LeaseExpiredError,
    StaleIncarnationError,
    UnavailableError,
)
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import (
    Cancellation,
    Capabilities,
    MayRead,
    Peer,
    Segment,
    TransportAddress,
)
from store_daemon.transport.frames import (
    ANSWER_BYTES,
    HELLO_BYTES,
    MAX_READ_BYTES,
    MAX_SEGMENTS,
    AnswerHeader,
    Hello,
    Status,
    pack_request,
)
from store_daemon.transport.tcp_server import RegionServer, ServeLimits
from store_daemon.transport.timed_socket import Clock, TimedSocket


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How long and how widely reads may wait on one peer."""

    connections_per_peer: int = 2
    connect_seconds: float = 1.0
    progress_seconds: float = 2.0
    """A peer that sends no byte for this long has failed, whatever the deadline says."""


class TcpPeer:
    """Connections to one pool. At most `connections_per_peer` reads run at once; others wait."""

    def __init__(self, address: TransportAddress, limits: ReadLimits, clock: Clock) -> None:
        self.address = address
        self._target = split_host_port(address.address)
        self._limits = limits
        self._clock = clock
        self._slots = threading.BoundedSemaphore(limits.connections_per_peer)
        self._lock = threading.Lock()
        self._idle: list[TimedSocket] = []
        self._is_closed = False
        self._closing = Cancellation()

    @contextmanager
    def connection(self, seconds: float, cancellation: Cancellation) -> Iterator[TimedSocket]:
        """Lend a greeted connection; it is kept only when the body ends without an error."""
        deadline = self._clock() + seconds
        if not self._slots.acquire(timeout=max(0.0, seconds)):
            raise DeadlineError(f"no free connection to {self.address.address} in {seconds} s")
        try:
            connection = self._take_idle() or self._dial(deadline, cancellation)
            try:
                connection.set_deadline(deadline - self._clock())
                with (
                    cancellation.aborting_with(connection.abort),
                    self._closing.aborting_with(connection.abort),
                ):
                    yield connection
                    cancellation.check()  # an aborted connection must not be kept
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Fail reads in flight and close what is idle."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        self._closing.cancel()
        for connection in idle:
            connection.close()

    def check_integrity(self) -> None:
        """Assert the bound on connections, and that nothing idles after close."""
        with self._lock:
            assert len(self._idle) <= self._limits.connections_per_peer
            assert not (self._is_closed and self._idle)

    def _take_idle(self) -> TimedSocket | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            connection.close()  # the server ended it meanwhile

    def _give_back(self, connection: TimedSocket) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _dial(self, deadline: float, cancellation: Cancellation) -> TimedSocket:
        cancellation.check()
        where = self.address.address
        seconds = min(self._limits.connect_seconds, deadline - self._clock())
        if seconds <= 0:
            raise DeadlineError(f"no time left to connect to {where}")
        try:
            sock = socket.create_connection(self._target, timeout=seconds)
        except TimeoutError:
            raise DeadlineError(f"{where} did not accept within {seconds:.3f} s") from None
        except OSError as error:
            raise UnavailableError(f"cannot connect to {where}: {error}") from None
        connection = TimedSocket(sock, self._limits.progress_seconds, self._clock)
        try:
            connection.set_deadline(deadline - self._clock())
            with (
                cancellation.aborting_with(connection.abort),
                self._closing.aborting_with(connection.abort),
            ):
                self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: TimedSocket) -> None:
        connection.send(Hello(Status.OK, self.address.incarnation).pack())
        welcome = Hello.unpack(connection.receive(HELLO_BYTES))
        if welcome.status is Status.BUSY:
            raise UnavailableError(f"{self.address.address} serves as many readers as it can")
        if welcome.incarnation != self.address.incarnation or welcome.status is not Status.OK:
            raise StaleIncarnationError(
                f"{self.address.address} is incarnation {welcome.incarnation},"
                f" not {self.address.incarnation}; its old leases are gone"
            )


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
    ) -> None:
        self._incarnation = incarnation
        self._host = host
        self._port = port
        self._advertised_host = advertised_host or host
        self._read_limits = read_limits or ReadLimits()
        self._serve_limits = serve_limits or ServeLimits()
        self._clock = clock
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

    def serve(self, may_read: MayRead) -> TransportAddress:
        self._server = RegionServer(
            self._need_region(), self._incarnation, may_read, self._serve_limits, self._clock
        )
        port = self._server.start(self._host, self._port)
        return TransportAddress(
            self.name, join_host_port(self._advertised_host, port), self._incarnation
        )

    def connect(self, address: TransportAddress) -> Peer:
        if address.transport != self.name:
            raise InvalidRequestError(f"peer offers transport {address.transport!r}, not tcp")
        peer = TcpPeer(address, self._read_limits, self._clock)
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
    ) -> None:
        region = self._need_region()
        total = _checked_total(segments, len(region))
        assert isinstance(peer, TcpPeer)
        with self._reading(), peer.connection(deadline_seconds, cancellation) as connection:
            connection.send(pack_request(lease_id, segments))
            answer = AnswerHeader.unpack(connection.receive(ANSWER_BYTES))
            if answer.status is Status.REFUSED:
                raise LeaseExpiredError(
                    f"{peer.address.address} refused a read under lease {lease_id}"
                )
            if answer.status is not Status.OK or answer.payload_bytes != total:
                raise FrameError(f"{peer.address.address} answered {answer}; wanted {total} bytes")
            for segment in segments:
                end = segment.local_offset + segment.length
                with region[segment.local_offset : end] as view:
                    connection.receive_into(view)

    def close(self, peer: Peer) -> None:
        assert isinstance(peer, TcpPeer)
        with self._lock:
            self._peers.discard(peer)
        peer.close()

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
    def _reading(self) -> Iterator[None]:
        """Keep the region until the body has ended."""
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the transport is shut down")
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1
                self._reads_ended.notify_all()

    def _need_region(self) -> memoryview:
        if self._region is None:
            raise UnavailableError("no region is registered")
        return self._region


def split_host_port(address: str) -> tuple[str, int]:
    """("::1", 80) of "[::1]:80". Raises InvalidRequestError unless it is host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _checked_total(segments: Sequence[Segment], region_bytes: int) -> int:
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise InvalidRequestError(f"read of {len(segments)} segments; wanted 1..{MAX_SEGMENTS}")
    for segment in segments:
        if min(segment.local_offset, segment.remote_offset) < 0 or segment.length < 1:
            raise InvalidRequestError(f"{segment} has a negative offset or no length")
        if segment.local_offset + segment.length > region_bytes:
            raise InvalidRequestError(f"{segment} is outside the pool of {region_bytes} bytes")
    total = sum(segment.length for segment in segments)
    if total > MAX_READ_BYTES:
        raise InvalidRequestError(f"read of {total} bytes is over {MAX_READ_BYTES}")
    return total
