"""Frames of the UCX transport's control connection, behind a hello with a magic of its own.

reader: Introduction                                owner: ANSWER (status); when OK, Introduction
reader: REQUEST (lease, action, n) + n x Wanted     owner: ANSWERs

PUSH:  the owner writes the ranges into the reader's pool; each ANSWER says how many bytes have
       arrived so far, and all have when the last comes. Any other status ends it.
CHECK: one ANSWER, whether the lease covers the ranges now. The reader asks before and after it
       reads by itself.

Behind a hello with PUT_MAGIC the roles change: the reader becomes a writer, and PLACE asks whether
it may write ranges of a stage. After OK it writes by itself and sends ANSWERs as the owner does in
a push; until the last one the owner keeps the slots, and it ends its agent if that does not come.

After REFUSED nothing was written, and the connection goes on. After FAILED the owner closes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from client_sdk.transport.base import Segment
from client_sdk.transport.frames import MAGIC, MAX_READ_BYTES, MAX_SEGMENTS, check_magic
from client_sdk.transport.lane import AgentFacts
from client_sdk.transport.memory import HOST
from client_sdk.transport.timed_socket import TimedSocket
from emberkv_proto.errors import FrameError

UCX_MAGIC = b"EMBRUCX\0"
PUT_MAGIC = b"EMBRPUT\0"
UCP_MAGIC = b"EMBRUCP\0"
"""As UCX_MAGIC, between agents of ucxx, where the reader's agent receives what is pushed."""
MAX_FACTS_BYTES = 1 << 16
MAX_PLACE = 1024

_INTRODUCTION = struct.Struct("<8sIIQ")
_REQUEST = struct.Struct("<8sQII")
_WANTED = struct.Struct("<QQQ")


class Action(IntEnum):
    PUSH = 1
    CHECK = 2
    PLACE = 3


@dataclass(frozen=True, slots=True)
class Introduction:
    """An agent, as the other side needs it."""

    pool_bytes: int
    """Of all its memory, from the lowest address to the highest."""
    facts: AgentFacts
    place: int = HOST
    """Where its memory is (see `memory`)."""

    def pack(self) -> bytes:
        facts = self.facts.pack()
        return _INTRODUCTION.pack(MAGIC, len(facts), self.place, self.pool_bytes) + facts

    @staticmethod
    def receive(connection: TimedSocket) -> Introduction:
        """Raises FrameError, and as TimedSocket.receive."""
        raw = connection.receive(_INTRODUCTION.size)
        magic, length, place, pool_bytes = _INTRODUCTION.unpack(raw)
        check_magic(magic)
        if not 0 < length <= MAX_FACTS_BYTES:
            raise FrameError(f"an introduction of {length} bytes")
        facts = AgentFacts.unpack(connection.receive(length))
        if place > MAX_PLACE:
            raise FrameError(f"a peer's memory is at place {place}")
        if facts.base + pool_bytes >= 1 << 64:
            raise FrameError("a peer's pool ends beyond the address space")
        return Introduction(pool_bytes, facts, place)


@dataclass(frozen=True, slots=True)
class MoveRequest:
    lease_id: int
    """Of a PLACE it is the stage's."""
    action: Action
    segments: tuple[Segment, ...]
    """As the reader sees them: local is the reader's pool, remote the owner's."""

    @property
    def total_bytes(self) -> int:
        return sum(segment.length for segment in self.segments)

    @staticmethod
    def receive(connection: TimedSocket, owner_bytes: int, reader_bytes: int) -> MoveRequest:
        """Raises FrameError unless every range lies within both pools."""
        magic, lease_id, action, count = _REQUEST.unpack(connection.receive(_REQUEST.size))
        check_magic(magic)
        if not 1 <= count <= MAX_SEGMENTS:
            raise FrameError(f"a request of {count} ranges; wanted 1..{MAX_SEGMENTS}")
        if action not in tuple(Action):
            raise FrameError(f"action {action} is unknown to the ucx transport")
        raw = connection.receive(count * _WANTED.size)
        segments = tuple(
            Segment(local, remote, length) for remote, local, length in _WANTED.iter_unpack(raw)
        )
        for segment in segments:
            if segment.length == 0 or segment.remote_offset + segment.length > owner_bytes:
                raise FrameError(f"{segment} is outside the owner's pool of {owner_bytes} bytes")
            if segment.local_offset + segment.length > reader_bytes:
                raise FrameError(f"{segment} is outside the reader's pool of {reader_bytes} bytes")
        request = MoveRequest(lease_id, Action(action), segments)
        if request.total_bytes > MAX_READ_BYTES:
            raise FrameError(f"a request of {request.total_bytes} bytes is over {MAX_READ_BYTES}")
        return request


def pack_move_request(lease_id: int, action: Action, segments: Sequence[Segment]) -> bytes:
    return _REQUEST.pack(MAGIC, lease_id, action, len(segments)) + b"".join(
        _WANTED.pack(s.remote_offset, s.local_offset, s.length) for s in segments
    )


def batches(segments: Sequence[Segment], most_bytes: int) -> list[tuple[Segment, ...]]:
    """Cut into runs of at most `most_bytes`; longer segments are cut too."""
    runs: list[tuple[Segment, ...]] = []
    run: list[Segment] = []
    room = most_bytes
    for segment in segments:
        taken = 0
        while taken < segment.length:
            length = min(room, segment.length - taken)
            run.append(Segment(segment.local_offset + taken, segment.remote_offset + taken, length))
            taken += length
            room -= length
            if not room:
                runs.append(tuple(run))
                run, room = [], most_bytes
    if run:
        runs.append(tuple(run))
    return runs
