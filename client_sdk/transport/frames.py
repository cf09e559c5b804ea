"""Frames of the TCP transport. All numbers little endian, all structs fixed.

client: Hello (version, incarnation it wants)      server: Welcome (status, its incarnation)
client: ReadRequest (lease, n) + n x (offset, len)  server: ReadAnswer (status, bytes) + the bytes
client: LeaseRequest (first blocks, n) + n bytes    server: LeaseAnswer (status, m, bytes) + m bytes
                                                    + the first blocks' bytes

Bytes follow in the order of the segments, without gaps. A status other than OK carries none.
After MALFORMED the server closes; after REFUSED the connection goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from client_sdk.transport.base import Segment
from emberkv_proto.errors import FrameError
from emberkv_proto.types import Incarnation

MAGIC = b"EMBRTCP\0"
LEASE_MAGIC = b"EMBRLSE\0"
"""Of a lease request, between read requests: only to servers that said they take them."""
VERSION = 2
"""2: what a block's bytes are compared with is XXH3-64."""
MAX_SEGMENTS = 4096
MAX_READ_BYTES = 1 << 32
MAX_LEASE_BYTES = 4 << 20
"""Of a lease request, and of what answers it."""

_HELLO = struct.Struct("<8sIIQ")
_REQUEST = struct.Struct("<8sQII")
_SEGMENT = struct.Struct("<QQ")
_ANSWER = struct.Struct("<8sIIQ")

HELLO_BYTES = _HELLO.size
REQUEST_BYTES = _REQUEST.size
SEGMENT_BYTES = _SEGMENT.size
ANSWER_BYTES = _ANSWER.size


class Status(IntEnum):
    OK = 0
    MALFORMED = 1
    REFUSED = 2
    STALE_INCARNATION = 3
    BUSY = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame in both directions; a client's status is OK."""

    status: Status
    incarnation: Incarnation

    def pack(self, magic: bytes = MAGIC) -> bytes:
        return _HELLO.pack(magic, VERSION, self.status, self.incarnation)

    @staticmethod
    def unpack(raw: bytes | bytearray, wanted_magic: bytes = MAGIC) -> Hello:
        magic, version, status, incarnation = _HELLO.unpack(raw)
        check_magic(magic, wanted_magic)
        if version != VERSION:
            raise FrameError(f"peer speaks version {version} of the tcp transport, not {VERSION}")
        return Hello(_status(status), Incarnation(incarnation))


@dataclass(frozen=True, slots=True)
class RequestHeader:
    lease_id: int
    segments: int

    @staticmethod
    def unpack(raw: bytes | bytearray) -> RequestHeader:
        """Raises FrameError on a wrong magic or a count that is not in 1..MAX_SEGMENTS."""
        magic, lease_id, count, _ = _REQUEST.unpack(raw)
        check_magic(magic)
        if not 1 <= count <= MAX_SEGMENTS:
            raise FrameError(f"read of {count} segments; wanted 1..{MAX_SEGMENTS}")
        return RequestHeader(lease_id, count)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Asks for a lease, in words that are not this protocol's, and for bytes right behind it."""

    first_blocks: int
    """So many leading blocks of what is lent are sent behind the answer."""
    body_bytes: int

    def pack(self) -> bytes:
        return _REQUEST.pack(LEASE_MAGIC, self.first_blocks, self.body_bytes, 0)

    @staticmethod
    def unpack(raw: bytes | bytearray) -> LeaseRequest:
        """Raises FrameError on a wrong magic or a body over MAX_LEASE_BYTES."""
        magic, first_blocks, body_bytes, _ = _REQUEST.unpack(raw)
        check_magic(magic, LEASE_MAGIC)
        return LeaseRequest(first_blocks, _lease_bytes(body_bytes))


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """FAILED: the body tells the error."""

    status: Status
    body_bytes: int
    payload_bytes: int

    def pack(self) -> bytes:
        return _ANSWER.pack(LEASE_MAGIC, self.status, self.body_bytes, self.payload_bytes)

    @staticmethod
    def unpack(raw: bytes | bytearray) -> LeaseAnswer:
        """Raises FrameError."""
        magic, status, body_bytes, payload_bytes = _ANSWER.unpack(raw)
        check_magic(magic, LEASE_MAGIC)
        if payload_bytes > MAX_READ_BYTES:
            raise FrameError(f"{payload_bytes} bytes behind a lease are over {MAX_READ_BYTES}")
        return LeaseAnswer(_status(status), _lease_bytes(body_bytes), payload_bytes)


@dataclass(frozen=True, slots=True)
class RemoteRange:
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    status: Status
    payload_bytes: int

    def pack(self) -> bytes:
        return _ANSWER.pack(MAGIC, self.status, 0, self.payload_bytes)

    @staticmethod
    def unpack(raw: bytes | bytearray) -> AnswerHeader:
        magic, status, _, payload_bytes = _ANSWER.unpack(raw)
        check_magic(magic)
        return AnswerHeader(_status(status), payload_bytes)


def pack_request(lease_id: int, segments: Sequence[Segment]) -> bytes:
    return _REQUEST.pack(MAGIC, lease_id, len(segments), 0) + b"".join(
        _SEGMENT.pack(segment.remote_offset, segment.length) for segment in segments
    )


def unpack_ranges(raw: bytes | bytearray, region_bytes: int) -> list[RemoteRange]:
    """Raises FrameError on an empty range, one outside the region, or too many bytes in all."""
    ranges = [RemoteRange(offset, length) for offset, length in _SEGMENT.iter_unpack(raw)]
    for wanted in ranges:
        if wanted.length == 0 or wanted.offset + wanted.length > region_bytes:
            raise FrameError(f"{wanted} is outside the pool of {region_bytes} bytes")
    if sum(wanted.length for wanted in ranges) > MAX_READ_BYTES:
        raise FrameError(f"read is over the limit of {MAX_READ_BYTES} bytes")
    return ranges


def _lease_bytes(value: int) -> int:
    if value > MAX_LEASE_BYTES:
        raise FrameError(f"a lease in {value} bytes is over {MAX_LEASE_BYTES}")
    return value


def _status(value: int) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise FrameError(f"status {value} is unknown to the tcp transport") from None


def check_magic(magic: bytes, wanted: bytes = MAGIC) -> None:
    if magic != wanted:
        raise FrameError(f"frame starts with {magic!r}; {wanted!r} would be EmberKV's")
