"""Frames on a real socket pair: cut, joined, larger than the buffer, late, and never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from client_sdk.frame_socket import FrameSocket
from emberkv_proto.errors import FrameError
from emberkv_proto.wire import HEADER, Method, pack_frame

SOON = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        far.settimeout(SOON)
        yield FrameSocket(near), far


def soon() -> float:
    return time.monotonic() + SOON


def test_frames_that_come_together_are_returned_one_by_one(
    ends: tuple[FrameSocket, socket.socket],
) -> None:
    frames, far = ends
    far.sendall(b"".join(pack_frame(Method.PROBE, n, bytes([n]) * n) for n in range(5)))
    for n in range(5):
        received = frames.receive(soon())
        assert (received.header.request_id, received.payload) == (n, bytes([n]) * n)
        assert frames.has_unread is (n < 4)


@pytest.mark.parametrize("payload_bytes", [0, 1, 64 * 1024 - 12, 64 * 1024, 1 << 20])
def test_a_frame_cut_anywhere_is_joined(
    ends: tuple[FrameSocket, socket.socket], payload_bytes: int
) -> None:
    frames, far = ends
    payload = bytes(i % 251 for i in range(payload_bytes))
    raw = pack_frame(Method.STATUS, 1, b"first") + pack_frame(Method.PROBE, 7, payload)

    def dribble() -> None:
        step = max(len(raw) // 7, 1)
        for start in range(0, len(raw), step):
            far.sendall(raw[start : start + step])

    thread = threading.Thread(target=dribble)
    thread.start()
    assert frames.receive(soon()).payload == b"first"
    received = frames.receive(soon())
    thread.join(SOON)
    assert received.header.request_id == 7
    assert received.payload == payload
    assert not frames.has_unread


def test_many_small_frames_pass_the_end_of_the_buffer(
    ends: tuple[FrameSocket, socket.socket],
) -> None:
    frames, far = ends
    raw = b"".join(pack_frame(Method.PROBE, n, bytes(1000)) for n in range(150))
    thread = threading.Thread(target=far.sendall, args=(raw,))
    thread.start()
    for n in range(150):
        assert frames.receive(soon()).header.request_id == n
    thread.join(SOON)


def test_silence_and_half_a_frame_end_at_the_deadline(
    ends: tuple[FrameSocket, socket.socket],
) -> None:
    frames, far = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        frames.receive(began + 0.05)
    far.sendall(pack_frame(Method.PROBE, 1, b"abc")[:-1])
    with pytest.raises(TimeoutError):
        frames.receive(time.monotonic() + 0.05)
    assert time.monotonic() - began >= 0.1


def test_a_hang_up_is_told_from_silence(ends: tuple[FrameSocket, socket.socket]) -> None:
    frames, far = ends
    far.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionResetError):
        frames.receive(soon())
    with pytest.raises(BrokenPipeError):
        frames.send(b"x", soon())


def test_a_header_over_the_limit_is_refused_before_its_payload_comes(
    ends: tuple[FrameSocket, socket.socket],
) -> None:
    frames, far = ends
    far.sendall(HEADER.pack(1 << 30, Method.PROBE, 0, 1))
    with pytest.raises(FrameError):
        frames.receive(soon())


def test_a_reader_that_stops_costs_the_sender_its_deadline(
    ends: tuple[FrameSocket, socket.socket],
) -> None:
    frames, far = ends
    with pytest.raises(TimeoutError):
        frames.send(bytes(8 << 20), time.monotonic() + 0.1)
    far.recv(1)
