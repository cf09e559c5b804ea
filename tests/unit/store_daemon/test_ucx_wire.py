"""Frames of lanes and of the UCX control connection: round trips, and what is refused."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.transport.base import Segment
from client_sdk.transport.frames import MAGIC, MAX_READ_BYTES
from client_sdk.transport.lane import AgentFacts, Direction, Header, Move, Range, pack_frame
from client_sdk.transport.memory import HOST
from client_sdk.transport.timed_socket import TimedSocket
from client_sdk.transport.ucx_frames import (
    Action,
    Introduction,
    MoveRequest,
    batches,
    pack_move_request,
)
from emberkv_proto.errors import FrameError

KIB = 1 << 10
OWNER, READER = 64 * KIB, 32 * KIB
U64 = st.integers(0, (1 << 64) - 1)


def received(raw: bytes, take: Callable[[TimedSocket], object]) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        ours.shutdown(socket.SHUT_WR)
        sock = TimedSocket(theirs, 2.0, time.monotonic)
        sock.set_deadline(5.0)
        return take(sock)


@given(U64, st.binary(max_size=300), st.lists(st.from_regex(r"[a-z_]+/[a-z0-9:]+", fullmatch=True)))
def test_facts_come_back_as_they_went(base: int, metadata: bytes, transports: list[str]) -> None:
    facts = AgentFacts(base, tuple(transports), metadata)
    assert AgentFacts.unpack(facts.pack()) == facts


@given(st.binary(max_size=64))
def test_facts_that_are_none_are_refused_or_read_whole(raw: bytes) -> None:
    try:
        facts = AgentFacts.unpack(raw)
    except FrameError:
        return
    assert len(facts.metadata) <= len(raw)


@given(
    st.sampled_from(Direction),
    st.binary(min_size=1, max_size=60),
    st.lists(st.builds(Range, U64, U64, U64), max_size=20),
)
def test_moves_come_back_as_they_went(
    direction: Direction, name: bytes, ranges: list[Range]
) -> None:
    for place in (HOST, 3):
        move = Move(direction, name, ranges, place)
        assert Move.unpack(move.pack()) == move


def test_an_endless_frame_on_a_lane_is_refused() -> None:
    raw = pack_frame(1, b"abc")
    assert Header.unpack(raw[:8]).body_bytes == 3
    with pytest.raises(FrameError):
        Header.unpack(struct.pack("<II", 1, 1 << 30))


def test_an_introduction_comes_back_as_it_went() -> None:
    for place in (HOST, 1, 8):
        introduction = Introduction(OWNER, AgentFacts(1 << 40, ("tcp/eth0",), b"metadata"), place)
        assert received(introduction.pack(), Introduction.receive) == introduction


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<8sIIQ", b"EMBRXXX\0", 10, 0, OWNER) + bytes(10),
        struct.pack("<8sIIQ", MAGIC, 0, 0, OWNER),
        struct.pack("<8sIIQ", MAGIC, 1 << 20, 0, OWNER),
        Introduction(OWNER, AgentFacts(1, (), b""), 1 << 20).pack(),
        struct.pack("<8sIIQ", MAGIC, 5, 0, OWNER) + bytes(5),
        Introduction((1 << 64) - 1, AgentFacts(1, (), b"")).pack(),
    ],
)
def test_introductions_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        received(raw, Introduction.receive)


def test_a_request_comes_back_as_it_went() -> None:
    segments = (Segment(0, 4096, 100), Segment(READER - 7, 0, 7))
    raw = pack_move_request(99, Action.PUSH, segments)
    request = received(raw, lambda sock: MoveRequest.receive(sock, OWNER, READER))
    assert request == MoveRequest(99, Action.PUSH, segments)


def row(remote: int, local: int, length: int) -> bytes:
    return struct.pack("<QQQ", remote, local, length)


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<8sQII", b"EMBRXXX\0", 1, 1, 1) + row(0, 0, 1),
        struct.pack("<8sQII", MAGIC, 1, 1, 0),
        struct.pack("<8sQII", MAGIC, 1, 1, 0xFFFFFFFF),
        struct.pack("<8sQII", MAGIC, 1, 4, 1) + row(0, 0, 1),
        struct.pack("<8sQII", MAGIC, 1, 1, 1) + row(0, 0, 0),
        struct.pack("<8sQII", MAGIC, 1, 1, 1) + row(OWNER, 0, 1),
        struct.pack("<8sQII", MAGIC, 1, 1, 1) + row(0, READER, 1),
        struct.pack("<8sQII", MAGIC, 1, 1, 1) + row(0, READER - 1, 2),
        struct.pack("<8sQII", MAGIC, 1, 1, 1) + b"\xff" * 24,
    ],
)
def test_requests_outside_of_either_pool_are_refused(raw: bytes) -> None:
    """The reader's pool too: nobody may have us write where it said its pool is not."""
    with pytest.raises(FrameError):
        received(raw, lambda sock: MoveRequest.receive(sock, OWNER, READER))


def test_more_than_may_be_read_at_once_is_refused() -> None:
    half = Segment(0, 0, MAX_READ_BYTES // 2 + 1)
    raw = pack_move_request(1, Action.PUSH, [half, half])
    with pytest.raises(FrameError):
        received(raw, lambda sock: MoveRequest.receive(sock, 1 << 40, 1 << 40))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30))
def test_batches_hold_every_byte_once_in_order(lengths: list[int], most: int) -> None:
    starts = [1000 * number for number in range(len(lengths))]
    segments = [Segment(at, at + 7, length) for at, length in zip(starts, lengths, strict=True)]
    runs = batches(segments, most)
    assert all(0 < sum(s.length for s in run) <= most for run in runs)
    assert all(sum(s.length for s in run) == most for run in runs[:-1]), "one is not full"
    wanted = [s.local_offset + n for s in segments for n in range(s.length)]
    assert wanted == [s.local_offset + n for run in runs for s in run for n in range(s.length)]
    assert all(s.remote_offset == s.local_offset + 7 for run in runs for s in run)
