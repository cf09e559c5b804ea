"""The local ranges of a read: checked before it, filled by it."""

from __future__ import annotations

from collections.abc import Sequence

from client_sdk.transport.base import Segment
from client_sdk.transport.frames import MAX_READ_BYTES, MAX_SEGMENTS
from client_sdk.transport.timed_socket import TimedSocket
from emberkv_proto.errors import InvalidRequestError


def checked_total(segments: Sequence[Segment], region_bytes: int) -> int:
    """How many bytes the segments are. Raises InvalidRequestError when they may not be read."""
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise InvalidRequestError(f"read of {len(segments)} segments; wanted 1..{MAX_SEGMENTS}")
    for segment in segments:
        if min(segment.local_offset, segment.remote_offset) < 0 or segment.length < 1:
            raise InvalidRequestError(f"{segment} has a negative offset or no length")
        if segment.local_offset + segment.length > region_bytes:
            raise InvalidRequestError(f"{segment} is outside the pool of {region_bytes} bytes")
    total = sum(segment.length for segment in segments)
    if total > MAX_READ_BYTES:
        raise InvalidRequestError(f"read of {total} bytes is over {MAX_READ_BYTES}")
    return total


def receive_segments(
    connection: TimedSocket, region: memoryview, segments: Sequence[Segment]
) -> list[int]:
    """Fill the ranges in their order; the checksum of each. Raises as `TimedSocket`."""
    sums = []
    for segment in segments:
        with region[segment.local_offset : segment.local_offset + segment.length] as view:
            sums.append(connection.receive_summed(view))
    return sums
