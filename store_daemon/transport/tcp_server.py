"""The serving half of the TCP transport: one thread a connection, a bounded number of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from client_sdk import faults
from client_sdk.transport.frames import (
    HELLO_BYTES,
    LEASE_MAGIC,
    MAGIC,
    REQUEST_BYTES,
    SEGMENT_BYTES,
    AnswerHeader,
    Hello,
    RemoteRange,
    RequestHeader,
    Status,
    unpack_ranges,
)
from client_sdk.transport.timed_socket import Clock, TimedSocket
from emberkv_proto.errors import EmberError, FrameError, UnavailableError
from emberkv_proto.types import Incarnation
from store_daemon.ports import PoolRange
from store_daemon.transport.base import Lend, MayRead
from store_daemon.transport.tcp_leases import answer_lease

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on what readers can make this node hold."""

    connections: int = 96
    """Thirty-two readers: two each for reads, and over ucx one for leases."""
    idle_seconds: float = 30.0
    progress_seconds: float = 2.0
    """A reader that takes or gives no byte for this long is dropped."""
    answer_seconds: float = 60.0


class OtherProtocol(Protocol):
    """What the same port serves to those whose hello has another magic."""

    def serve(self, connection: TimedSocket, hello: bytes, may_read: MayRead) -> None:
        """Until the connection ends. Raises EmberError; closing is the server's."""
        ...


OtherProtocols = Mapping[bytes, OtherProtocol]


class RegionServer:
    """Serves ranges of one memory region to readers that hold a lease over them.

    Every range is checked against the lease before the answer starts, and again right before its
    bytes go out; a lease that ends in between breaks the connection instead of serving a slot
    that may be someone else's by now.
    """

    def __init__(
        self,
        region: memoryview,
        incarnation: Incarnation,
        may_read: MayRead,
        limits: ServeLimits,
        clock: Clock = time.monotonic,
        others: OtherProtocols | None = None,
        lend: Lend | None = None,
    ) -> None:
        self._lend = lend
        self._others = {} if others is None else others
        self._region = region
        self._incarnation = incarnation
        self._may_read = may_read
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._connections: dict[TimedSocket, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.served_bytes = 0
        self.refused_reads = 0
        self.refused_connections = 0
        self.malformed_frames = 0

    def start(self, host: str, port: int) -> int:
        """Listen; return the bound port. Raises UnavailableError when the address is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host}:{port}: {error}") from None
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="emberkv-tcp-accept", daemon=True
        )
        self._acceptor.start()
        bound: int = listener.getsockname()[1]
        return bound

    def stop(self) -> None:
        """Close every connection and join every thread. Reads in flight end broken."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Wakes accept(); close() alone would leave it asleep.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor is not None:
            self._acceptor.join()
        with self._lock:
            threads = list(self._connections.values())
            for connection in self._connections:
                connection.abort()
        for thread in threads:
            thread.join()

    def check_integrity(self) -> None:
        """Assert that connections stay within their limit and that each has a thread."""
        with self._lock:
            assert len(self._connections) <= self._limits.connections
            # A thread takes itself out of the table as its last act.
            assert all(thread.is_alive() for thread in self._connections.values())

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError as error:
                    if self._listener is None:
                        return
                    # Out of descriptors or a connection reset before we took it: go on listening.
                    log.warning("tcp transport: accept failed: %s", error)
                    time.sleep(0.05)
                    continue
                self._admit(TimedSocket(accepted, self._limits.progress_seconds, self._clock))

    def _admit(self, connection: TimedSocket) -> None:
        if not self._start_serving(connection):
            self.refused_connections += 1
            with contextlib.suppress(EmberError):  # it may be gone already
                connection.send(Hello(Status.BUSY, self._incarnation).pack(), socket.MSG_DONTWAIT)
            connection.close()

    def _start_serving(self, connection: TimedSocket) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="emberkv-tcp-serve", daemon=True
        )
        with self._lock:
            if self._listener is None or len(self._connections) >= self._limits.connections:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("tcp transport: %s", error)  # out of threads
                return False
            self._connections[connection] = thread
            return True

    def _serve(self, connection: TimedSocket) -> None:
        try:
            connection.set_deadline(self._limits.progress_seconds)
            raw = bytes(connection.receive(HELLO_BYTES))
            other = self._others.get(raw[: len(MAGIC)])
            if other is not None:
                other.serve(connection, raw, self._may_read)
            elif self._greet(connection, raw):
                while connection.wait_readable(self._limits.idle_seconds):
                    connection.set_deadline(self._limits.answer_seconds)
                    self._answer(connection)
        except FrameError as error:
            self.malformed_frames += 1
            log.warning("tcp transport: dropped a connection: %s", error)
        except EmberError as error:
            log.debug("tcp transport: connection ended: %s", error)
        finally:
            connection.close()
            with self._lock:
                del self._connections[connection]

    def _greet(self, connection: TimedSocket, raw: bytes) -> bool:
        hello = Hello.unpack(raw)
        is_ours = hello.incarnation == self._incarnation
        status = Status.OK if is_ours else Status.STALE_INCARNATION
        connection.send(Hello(status, self._incarnation).pack())
        return is_ours

    def _answer(self, connection: TimedSocket) -> None:
        request = connection.receive(REQUEST_BYTES)
        if self._lend is not None and request.startswith(LEASE_MAGIC):
            answer_lease(connection, request, self._lend, self._send_range)
            return
        try:
            header = RequestHeader.unpack(request)
            raw = connection.receive(header.segments * SEGMENT_BYTES)
            ranges = unpack_ranges(raw, len(self._region))
        except FrameError:
            connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
            raise
        lease_id = header.lease_id
        if not all(self._may_read(lease_id, wanted.offset, wanted.length) for wanted in ranges):
            self.refused_reads += 1
            connection.send(AnswerHeader(Status.REFUSED, 0).pack())
            return
        if not faults.hit(faults.PEER_SERVE):
            raise UnavailableError("fault peer_serve")
        total = sum(wanted.length for wanted in ranges)
        connection.send(AnswerHeader(Status.OK, total).pack(), socket.MSG_MORE)
        for wanted in ranges:
            self._send_range(connection, lease_id, wanted)

    def _send_range(
        self, connection: TimedSocket, lease_id: int, wanted: RemoteRange | PoolRange
    ) -> None:
        if not self._may_read(lease_id, wanted.offset, wanted.length):
            self.refused_reads += 1
            raise UnavailableError(f"lease {lease_id} ended while it was read")
        with self._region[wanted.offset : wanted.offset + wanted.length] as view:
            connection.send(view)
        self.served_bytes += wanted.length
