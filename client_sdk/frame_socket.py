"""Frames over a stream socket, each step bounded by a deadline."""

from __future__ import annotations

import math
import select
import socket
import time
from dataclasses import dataclass

from emberkv_proto.wire import HEADER, FrameHeader, unpack_header

_BUFFER_BYTES = 64 * 1024


@dataclass(slots=True)
class Frame:
    header: FrameHeader
    payload: bytes


class FrameSocket:
    """Sends and receives whole frames. Belongs to one thread at a time; the socket is its owner's.

    The socket is non-blocking: a send is one system call and a receive two, where a socket with a
    timeout of its own takes twice as many. Deadlines are monotonic seconds.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0

    @property
    def has_unread(self) -> bool:
        """Whether bytes came that no `receive` has returned."""
        return self._start != self._end

    def send(self, frame: bytes, deadline: float) -> None:
        """Raises TimeoutError, or OSError when the other side is gone."""
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self._sock.settimeout(max(deadline - time.monotonic(), 1e-4))
            self._sock.sendall(memoryview(frame)[sent:])
            self._sock.setblocking(False)

    def receive(self, deadline: float) -> Frame:
        """The next frame.

        Raises:
            FrameError: its header cannot be trusted.
            TimeoutError: it is not whole by the deadline.
            OSError: the other side is gone.
        """
        wanted = HEADER.size
        while True:
            start, have = self._start, self._end - self._start
            if have >= HEADER.size:
                header = unpack_header(self._buffer, start)
                wanted = HEADER.size + header.payload_bytes
                if have >= wanted:
                    payload = bytes(memoryview(self._buffer)[start + HEADER.size : start + wanted])
                    self._start = start + wanted
                    if self._start == self._end:
                        self._start = self._end = 0
                    return Frame(header, payload)
            self._read_more(wanted, deadline)

    def _read_more(self, wanted: int, deadline: float) -> None:
        buffer = self._buffer
        if self._start + wanted > len(buffer) or self._end == len(buffer):
            kept = buffer[self._start : self._end]
            self._buffer = buffer = bytearray(max(wanted, _BUFFER_BYTES))
            buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        left_ms = math.ceil(1e3 * (deadline - time.monotonic()))
        if left_ms <= 0 or not self._readable.poll(left_ms):
            raise TimeoutError
        count = self._sock.recv_into(memoryview(buffer)[self._end :] if self._end else buffer)
        if not count:
            raise ConnectionResetError("it closed the connection")
        self._end += count
