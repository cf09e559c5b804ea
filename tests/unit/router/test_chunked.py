"""Following chunked framing without touching it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chunked import ChunkedBody, Dechunked, FixedLengthBody, FramingError


def framed(payloads: list[bytes], trailer: bytes = b"") -> bytes:
    chunks = [b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in payloads if p]
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


def pieces(data: bytes, seed: int) -> list[bytes]:
    rng, out = Random(seed), []
    while data:
        size = rng.randint(1, 9)
        out.append(data[:size])
        data = data[size:]
    return out


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.sampled_from([b"", b"X-A: b\r\n"]),
    st.integers(0, 10_000),
)
def test_any_split_passes_unchanged_and_ends_at_the_end(
    payloads: list[bytes], trailer: bytes, seed: int
) -> None:
    data = framed(payloads, trailer)
    raw, plain = ChunkedBody(), Dechunked()
    passed = payload = b""
    for piece in pieces(data, seed):
        assert not raw.is_done
        passed += raw.feed(piece)
        payload += plain.feed(piece)
    assert raw.is_done
    assert plain.is_done
    assert passed == data
    assert payload == b"".join(payloads)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1), st.integers(0, 200))
def test_what_was_passed_on_can_be_completed_at_any_point(payloads: list[bytes], cut: int) -> None:
    data = framed(payloads)[:-5][:cut]
    body = ChunkedBody()
    passed = body.feed(data) + body.completion() + b"3\r\nend\r\n0\r\n\r\n"
    reader = Dechunked()
    text = reader.feed(passed)
    assert reader.is_done
    assert text.endswith(b"end")


def test_a_whole_chunk_is_passed_as_the_same_object() -> None:
    data = b"5\r\nhello\r\n"
    assert ChunkedBody().feed(data) is data


@pytest.mark.parametrize(
    "data",
    [
        b"xyz\r\nabc\r\n",
        b"-5\r\nabc\r\n",
        b"3\r\nabcde\r\n",
        b"3\r\nabc\rX",
        b"0\r\n\r\nmore",
        b"1" * 16 + b"\r\n",
        b"\r\n",
        b"1;" + b"a" * 5000,
    ],
)
def test_broken_framing_is_refused(data: bytes) -> None:
    for body in (ChunkedBody(), Dechunked()):
        with pytest.raises(FramingError):
            body.feed(data)


def test_a_known_length_ends_exactly() -> None:
    body = FixedLengthBody(5)
    assert body.feed(b"abc") == b"abc"
    assert not body.is_done
    assert body.feed(b"de") == b"de"
    assert body.is_done
    with pytest.raises(FramingError):
        body.feed(b"f")
    assert FixedLengthBody(0).is_done
