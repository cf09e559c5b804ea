"""Blocking sockets whose every wait is bounded, and that another thread can abort."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

from emberkv_proto.errors import DeadlineError, UnavailableError
from emberkv_proto.hashing import RunningChecksum

Clock = Callable[[], float]
_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT_SECONDS = 0.001
SUMMED_BYTES = 256 * 1024
"""Small enough to be in a core's cache still when it is summed."""


class TimedSocket:
    """A stream socket with a deadline for the whole and a bound on waiting without progress.

    The kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) end a call, so that one call can move a
    whole range (MSG_WAITALL) and still be bounded. One thread uses it; any may `abort` it.
    """

    def __init__(self, sock: socket.socket, progress_seconds: float, clock: Clock) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._progress_seconds = progress_seconds
        self._clock = clock
        self._deadline = float("inf")

    def set_deadline(self, seconds: float) -> None:
        """From now on, all calls together may take this long."""
        self._deadline = self._clock() + seconds

    def receive(self, length: int) -> bytearray:
        """Exactly `length` bytes. Raises as `receive_into`."""
        raw = bytearray(length)
        with memoryview(raw) as view:
            self.receive_into(view)
        return raw

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            DeadlineError: over the deadline, or no byte came for `progress_seconds`.
            UnavailableError: the other side closed or reset, or `abort` was called.
        """
        filled, length = 0, len(view)
        while filled < length:
            self._bound(socket.SO_RCVTIMEO)
            with view[filled:] as rest:
                try:
                    count = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    raise DeadlineError(f"no byte for {self._progress_seconds} s") from None
                except OSError as error:
                    raise UnavailableError(f"connection broke: {error}") from None
            if count == 0:
                raise UnavailableError("connection was closed by the other side")
            filled += count

    def receive_summed(self, view: memoryview) -> int:
        """As `receive_into`, and the checksum of what came, taken while it is in the cache."""
        running = RunningChecksum()
        for start in range(0, len(view), SUMMED_BYTES):
            with view[start : start + SUMMED_BYTES] as piece:
                self.receive_into(piece)
                running.update(piece)
        return running.value

    def send(self, view: memoryview | bytes, flags: int = 0) -> None:
        """Send all of `view`. Raises as `receive_into`."""
        with memoryview(view) as whole:
            sent, length = 0, len(whole)
            while sent < length:
                self._bound(socket.SO_SNDTIMEO)
                with whole[sent:] as rest:
                    try:
                        sent += self._sock.send(rest, flags | socket.MSG_NOSIGNAL)
                    except BlockingIOError:
                        raise DeadlineError(
                            f"other side took no byte for {self._progress_seconds} s"
                        ) from None
                    except OSError as error:
                        raise UnavailableError(f"connection broke: {error}") from None

    def is_quiet(self) -> bool:
        """Whether nothing has come, not even the end: only then can the socket be reused."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def wait_readable(self, seconds: float) -> bool:
        """Whether bytes (or the end) came within `seconds`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def abort(self) -> None:
        """Make all calls fail now and for ever. The owner still closes."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more: calls fail already

    def close(self) -> None:
        self._sock.close()

    def _bound(self, option: int) -> None:
        left = self._deadline - self._clock()
        if left <= 0:
            raise DeadlineError("deadline passed")
        wait = max(_SHORTEST_WAIT_SECONDS, min(self._progress_seconds, left))
        seconds = int(wait)
        packed = _TIMEVAL.pack(seconds, int((wait - seconds) * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, packed)
        except OSError as error:
            raise UnavailableError(f"connection broke: {error}") from None
