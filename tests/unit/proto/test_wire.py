"""Frames of local sessions."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import FrameError
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import (
    HEADER,
    MAX_FRAME_BYTES,
    METHODS,
    FrameHeader,
    Method,
    pack_frame,
    unpack_header,
)


@given(
    st.sampled_from(Method),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=100),
    st.integers(0, 2**16 - 1),
)
def test_frame_comes_back_as_it_was_packed(
    method: Method, request_id: int, payload: bytes, status: int
) -> None:
    frame = pack_frame(method, request_id, payload, status)
    header = unpack_header(memoryview(frame)[: HEADER.size])
    assert header == FrameHeader(len(payload), method, status, request_id)
    assert frame[HEADER.size :] == payload


def test_payload_at_the_limit_passes_and_one_byte_more_is_refused() -> None:
    frame = pack_frame(Method.PROBE, 1, bytes(MAX_FRAME_BYTES))
    assert unpack_header(frame[: HEADER.size]).payload_bytes == MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="limit"):
        pack_frame(Method.PROBE, 1, bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_announced_length_over_the_limit_is_refused(length: int) -> None:
    with pytest.raises(FrameError, match="limit"):
        unpack_header(HEADER.pack(length, Method.PROBE, 0, 1))


@pytest.mark.parametrize("method", [0, max(Method) + 1, 65535])
def test_unknown_method_is_refused(method: int) -> None:
    with pytest.raises(FrameError, match="unknown"):
        unpack_header(HEADER.pack(0, method, 0, 1))


@given(st.binary(min_size=12, max_size=12))
def test_noise_is_a_header_within_limits_or_refused(raw: bytes) -> None:
    try:
        header = unpack_header(raw)
    except FrameError:
        return
    assert header.payload_bytes <= MAX_FRAME_BYTES


def test_every_method_has_its_messages() -> None:
    assert set(METHODS) == set(Method)
    for pair in METHODS.values():
        assert all(issubclass(kind, Message) for kind in pair)
        assert pair[0].__name__.endswith("Request")
        assert pair[1] is common_pb2.Empty or pair[1].__name__.endswith("Response")
    assert METHODS[Method.WAIT] == (store_pb2.WaitRequest, store_pb2.WaitResponse)


def test_numbers_of_the_protocol_are_fixed() -> None:
    """They are spoken between versions: a change here needs another PROTOCOL."""
    names = (
        "HELLO PROBE ACQUIRE WAIT RELEASE STAGE COMMIT ABORT HEARTBEAT PREFETCH STATUS CHECK DRAIN"
        " CANCEL_PREFETCH"
    )
    assert [(m.name, m.value) for m in Method] == [(n, i + 1) for i, n in enumerate(names.split())]
    assert HEADER.size == 12
    assert (
        pack_frame(Method.HELLO, 5, b"xy", 3) == bytes.fromhex("020000000100030005000000") + b"xy"
    )
