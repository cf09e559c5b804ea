"""What a daemon and its UCX agent process say to each other, over a socket pair a lane.

daemon: COMMAND (kind, length) + body          agent: REPLY (status, length) + body
INTRODUCE: a remote agent's metadata           OK: its name
PLACES:                                        OK: n x address, of its regions
FORGET:    a name                              OK
MOVE:      direction, place, name, n x Range   OK when every byte has arrived

An agent answers the commands of one lane in their order, and works on those of all its lanes at
once. FAILED and LOST carry a text; after LOST nothing of that remote agent can be believed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from client_sdk.transport.memory import HOST
from emberkv_proto.errors import FrameError

MAX_BODY_BYTES = 1 << 20
"""Metadata is some hundred bytes a rail; a move is at most MAX_RANGES ranges."""
MAX_RANGES = 8192

_HEADER = struct.Struct("<II")
_MOVE = struct.Struct("<BHH")
_ADDRESS = struct.Struct("<Q")
_RANGE = struct.Struct("<QQQ")
_READY = struct.Struct("<QHH")

HEADER_BYTES = _HEADER.size


class Command(IntEnum):
    INTRODUCE = 1
    FORGET = 2
    MOVE = 3
    PLACES = 4


class Reply(IntEnum):
    OK = 0
    FAILED = 1
    LOST = 2


class Direction(IntEnum):
    READ = 0
    """From the remote agent's memory to ours."""
    WRITE = 1


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses as the two agents' processes see them."""

    local: int
    remote: int
    length: int


@dataclass(frozen=True, slots=True)
class Header:
    kind: int
    body_bytes: int

    @staticmethod
    def unpack(raw: bytes | bytearray) -> Header:
        kind, length = _HEADER.unpack(raw)
        if length > MAX_BODY_BYTES:
            raise FrameError(f"a frame of {length} bytes on an agent's lane")
        return Header(kind, length)


@dataclass(frozen=True, slots=True)
class Move:
    direction: Direction
    remote_name: bytes
    ranges: Sequence[Range]
    remote_place: int = HOST
    """Of the remote agent's memory (see `memory`)."""

    def pack(self) -> bytes:
        return (
            _MOVE.pack(self.direction, self.remote_place, len(self.remote_name))
            + self.remote_name
            + b"".join(_RANGE.pack(r.local, r.remote, r.length) for r in self.ranges)
        )

    @staticmethod
    def unpack(raw: bytes | bytearray) -> Move:
        direction, place, name_bytes = _MOVE.unpack_from(raw)
        start = _MOVE.size + name_bytes
        ranges = [Range(*numbers) for numbers in _RANGE.iter_unpack(raw[start:])]
        return Move(Direction(direction), bytes(raw[_MOVE.size : start]), ranges, place)


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent says of itself once it can work: the first reply on its first lane."""

    base: int
    """Where its memory begins in its process; of several regions, the lowest address."""
    transports: tuple[str, ...]
    """UCX's, as "rc_mlx5/mlx5_0:1"."""
    metadata: bytes

    def pack(self) -> bytes:
        transports = " ".join(self.transports).encode()
        return (
            _READY.pack(self.base, len(transports), len(self.metadata)) + transports + self.metadata
        )

    @staticmethod
    def unpack(raw: bytes | bytearray) -> AgentFacts:
        """Raises FrameError when the lengths do not fit."""
        if len(raw) < _READY.size:
            raise FrameError(f"an agent's facts in {len(raw)} bytes")
        base, transports_bytes, metadata_bytes = _READY.unpack_from(raw)
        end = _READY.size + transports_bytes
        if end + metadata_bytes != len(raw):
            raise FrameError("an agent's facts have other lengths than they say")
        try:
            transports = bytes(raw[_READY.size : end]).decode("ascii").split()
        except UnicodeDecodeError:
            raise FrameError("an agent's transports are not ASCII") from None
        return AgentFacts(base, tuple(transports), bytes(raw[end:]))


def pack_places(addresses: Iterable[int]) -> bytes:
    return b"".join(map(_ADDRESS.pack, addresses))


def unpack_places(raw: bytes | bytearray, regions: int) -> tuple[int, ...]:
    """Raises FrameError unless there is an address for each region."""
    if len(raw) != regions * _ADDRESS.size:
        raise FrameError(f"{len(raw)} bytes for the addresses of {regions} regions")
    return tuple(address for (address,) in _ADDRESS.iter_unpack(raw))


def pack_frame(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(kind, len(body)) + body


def total_bytes(ranges: Iterable[Range]) -> int:
    return sum(r.length for r in ranges)
