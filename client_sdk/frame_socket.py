"""Frames over a stream socket, each step bounded by a deadline."""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from typing import NamedTuple

from emberkv_proto.wire import HEADER, FrameHeader, unpack_header

_READ_BYTES = 64 * 1024
_PATIENCE_SECONDS = 0.05
_TIMEVAL = struct.pack("@ll", 0, int(_PATIENCE_SECONDS * 1e6))


class Frame(NamedTuple):
    header: FrameHeader
    payload: bytes


class FrameSocket:
    """Sends and receives whole frames. Belongs to one thread at a time; the socket is its owner's.

    A send and a receive are one system call each, where a socket with a timeout of Python's takes
    two: the kernel bounds a receive by _PATIENCE_SECONDS, and only one that takes longer, or may
    not, is polled for. Deadlines are monotonic seconds.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._unread = bytearray()
        """What came beyond the last frame returned."""

    @property
    def has_unread(self) -> bool:
        """Whether bytes came that no `receive` has returned."""
        return bool(self._unread)

    def send(self, frame: bytes, deadline: float) -> None:
        """Raises TimeoutError, or OSError when the other side is gone."""
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self._sock.settimeout(max(deadline - time.monotonic(), 1e-4))
            try:
                self._sock.sendall(memoryview(frame)[sent:])
            finally:
                self._sock.setblocking(True)

    def receive(self, deadline: float) -> Frame:
        """The next frame.

        Raises:
            FrameError: its header cannot be trusted.
            TimeoutError: it is not whole by the deadline.
            OSError: the other side is gone.
        """
        unread = self._unread
        if not unread:
            data = self._receive_some(deadline)
            if len(data) >= HEADER.size:
                header = unpack_header(data)
                if len(data) == HEADER.size + header.payload_bytes:  # as nearly always
                    return Frame(header, data[HEADER.size :])
            unread += data
        while True:
            if len(unread) >= HEADER.size:
                header = unpack_header(unread)
                end = HEADER.size + header.payload_bytes
                if len(unread) >= end:
                    payload = bytes(unread[HEADER.size : end])
                    del unread[:end]
                    return Frame(header, payload)
            unread += self._receive_some(deadline)

    def _receive_some(self, deadline: float) -> bytes:
        if deadline - time.monotonic() >= _PATIENCE_SECONDS:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                data = self._receive_late(deadline)
        else:
            data = self._receive_late(deadline)
        if not data:
            raise ConnectionResetError("it closed the connection")
        return data

    def _receive_late(self, deadline: float) -> bytes:
        left_ms = math.ceil(1e3 * (deadline - time.monotonic()))
        if left_ms <= 0 or not self._readable.poll(left_ms):
            raise TimeoutError
        return self._sock.recv(_READ_BYTES)
