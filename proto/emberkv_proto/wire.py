"""Framing of local sessions: length-prefixed protobuf messages on an AF_UNIX stream.

frame = u32 payload bytes, u16 method, u16 status, u32 request id (little endian), payload

A request has status 0; its answer repeats method and request id. Status 0 carries the method's
response message, any other an ErrorDetail. The answer to HELLO carries the pool's file descriptor
as SCM_RIGHTS, together with the first byte of its frame.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from google.protobuf.message import Message

from emberkv_proto.errors import FrameError
from emberkv_proto.v1 import common_pb2, store_pb2

PROTOCOL = 2
"""2: checksums are XXH3-64."""
HEADER = struct.Struct("<IHHI")
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_BLOCKS_PER_CALL = 65536


class Method(IntEnum):
    HELLO = 1
    PROBE = 2
    ACQUIRE = 3
    WAIT = 4
    RELEASE = 5
    STAGE = 6
    COMMIT = 7
    ABORT = 8
    HEARTBEAT = 9
    PREFETCH = 10
    STATUS = 11
    CHECK = 12
    DRAIN = 13
    CANCEL_PREFETCH = 14


METHODS: dict[Method, tuple[type[Message], type[Message]]] = {
    Method.HELLO: (store_pb2.HelloRequest, store_pb2.HelloResponse),
    Method.PROBE: (store_pb2.ProbeRequest, store_pb2.ProbeResponse),
    Method.ACQUIRE: (store_pb2.AcquireRequest, store_pb2.AcquireResponse),
    Method.WAIT: (store_pb2.WaitRequest, store_pb2.WaitResponse),
    Method.RELEASE: (store_pb2.ReleaseRequest, common_pb2.Empty),
    Method.STAGE: (store_pb2.StageRequest, store_pb2.StageResponse),
    Method.COMMIT: (store_pb2.CommitRequest, store_pb2.CommitResponse),
    Method.ABORT: (store_pb2.AbortRequest, common_pb2.Empty),
    Method.HEARTBEAT: (store_pb2.HeartbeatRequest, store_pb2.HeartbeatResponse),
    Method.PREFETCH: (store_pb2.PrefetchRequest, store_pb2.PrefetchResponse),
    Method.STATUS: (store_pb2.StatusRequest, store_pb2.StatusResponse),
    Method.CHECK: (store_pb2.CheckRequest, store_pb2.CheckResponse),
    Method.DRAIN: (store_pb2.DrainRequest, common_pb2.Empty),
    Method.CANCEL_PREFETCH: (store_pb2.CancelPrefetchRequest, common_pb2.Empty),
}
"""Method -> (request, response)."""


_METHODS_BY_NUMBER = {int(method): method for method in Method}  # faster than Method(number)


class FrameHeader(NamedTuple):
    """What stands before a payload. One is made for each frame: a tuple costs a third."""

    payload_bytes: int
    method: Method
    status: int
    request_id: int


def pack_frame(method: Method, request_id: int, payload: bytes, status: int = 0) -> bytes:
    """Raises FrameError when the payload is over the limit."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload), method, status, request_id) + payload


def unpack_header(raw: bytes | bytearray | memoryview, start: int = 0) -> FrameHeader:
    """The header at `start`. Raises FrameError on an unknown method or a length over the limit."""
    length, number, status, request_id = HEADER.unpack_from(raw, start)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    method = _METHODS_BY_NUMBER.get(number)
    if method is None:
        raise FrameError(f"method {number} is unknown to protocol {PROTOCOL}")
    return FrameHeader(length, method, status, request_id)
