"""Connections of a reader to one owner: few, greeted once, lent to one read at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from client_sdk.transport.base import BusyHereError, Cancellation, TransportAddress
from client_sdk.transport.frames import HELLO_BYTES, MAGIC, Hello, Status
from client_sdk.transport.timed_socket import Clock, TimedSocket
from emberkv_proto.errors import (
    DeadlineError,
    InvalidRequestError,
    StaleIncarnationError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How long and how widely reads may wait on one peer."""

    connections_per_peer: int = 2
    connect_seconds: float = 1.0
    progress_seconds: float = 2.0
    """A peer that sends no byte for this long has failed, whatever the deadline says."""


class Link:
    """A greeted connection."""

    def __init__(self, sock: TimedSocket) -> None:
        self.sock = sock

    def is_reusable(self) -> bool:
        return self.sock.is_quiet()

    def abort(self) -> None:
        """End what it is used for, from any thread."""
        self.sock.abort()

    def close(self) -> None:
        self.sock.close()


L = TypeVar("L", bound=Link)
Greet = Callable[[TimedSocket], L]
"""Introduces the two sides on a fresh connection. Raises as `Transport.read`."""


class PeerConnections(Generic[L]):
    """Links to one pool. At most `connections_per_peer` reads run at once; others wait."""

    def __init__(
        self, address: TransportAddress, limits: ReadLimits, clock: Clock, greet: Greet[L]
    ) -> None:
        self.address = address
        self._target = split_host_port(address.address)
        self._limits = limits
        self._clock = clock
        self._greet = greet
        self._slots = threading.BoundedSemaphore(limits.connections_per_peer)
        self._lock = threading.Lock()
        self._idle: list[L] = []
        self._lent = 0
        self._is_closed = False
        self._closing = Cancellation()

    @contextmanager
    def connection(
        self, seconds: float, cancellation: Cancellation, wait_seconds: float = float("inf")
    ) -> Iterator[L]:
        """Lend a link; it is kept only when the body ends without an error.

        `seconds` are for all, `wait_seconds` of them for a link to be free. Raises BusyHereError
        when none is, and as `Transport.read`.
        """
        deadline = self._clock() + seconds
        wait = max(0.0, min(seconds, wait_seconds))
        if not self._slots.acquire(timeout=wait):
            raise BusyHereError(f"no free connection to {self.address.address} in {wait:.3f} s")
        with self._lock:
            self._lent += 1
        try:
            link = self._take_idle() or self._dial(deadline, cancellation)
            try:
                link.sock.set_deadline(deadline - self._clock())
                with (
                    cancellation.aborting_with(link.abort),
                    self._closing.aborting_with(link.abort),
                ):
                    yield link
                    cancellation.check()  # an aborted connection must not be kept
            except BaseException:
                link.close()
                raise
            self._give_back(link)
        finally:
            with self._lock:
                self._lent -= 1
            self._slots.release()

    @property
    def is_busy(self) -> bool:
        """Whether as many reads run as may."""
        with self._lock:
            return self._lent >= self._limits.connections_per_peer

    def close(self) -> None:
        """Fail reads in flight and close what is idle."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        self._closing.cancel()
        for link in idle:
            link.close()

    def check_integrity(self) -> None:
        """Assert the bound on connections, and that nothing idles after close."""
        with self._lock:
            assert len(self._idle) <= self._limits.connections_per_peer
            assert 0 <= self._lent <= self._limits.connections_per_peer
            assert not (self._is_closed and self._idle)

    def _take_idle(self) -> L | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.is_reusable():
                return link
            link.close()  # the other side ended it meanwhile

    def _give_back(self, link: L) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        link.close()

    def _dial(self, deadline: float, cancellation: Cancellation) -> L:
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
                return self._greet(connection)
        except BaseException:
            connection.close()
            raise


def exchange_hellos(
    connection: TimedSocket, address: TransportAddress, magic: bytes = MAGIC
) -> None:
    """Raises StaleIncarnationError, UnavailableError when busy, FrameError."""
    connection.send(Hello(Status.OK, address.incarnation).pack(magic))
    welcome = Hello.unpack(connection.receive(HELLO_BYTES), magic)
    if welcome.status is Status.BUSY:
        raise UnavailableError(f"{address.address} serves as many readers as it can")
    if welcome.incarnation != address.incarnation or welcome.status is not Status.OK:
        raise StaleIncarnationError(
            f"{address.address} is incarnation {welcome.incarnation},"
            f" not {address.incarnation}; its old leases are gone"
        )


def split_host_port(address: str) -> tuple[str, int]:
    """("::1", 80) of "[::1]:80". Raises InvalidRequestError unless it is host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
