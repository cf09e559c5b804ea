"""The stream of a Redis client is cut into requests, however it is cut on its way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_daemon.resp.requests import (
    MAX_BULK_BYTES,
    MAX_REQUEST_BYTES,
    MAX_WORD_BYTES,
    MAX_WORDS,
    ProtocolError,
    Request,
    RequestReader,
    Step,
    ValueAhead,
    ValueEnd,
)
from tests.helpers.resp import request

WORD = st.binary(max_size=40)
SET = st.tuples(st.sampled_from([b"SET", b"set"]), WORD, st.binary(max_size=300))
OTHER = st.lists(WORD, min_size=1, max_size=6).filter(
    lambda words: not (len(words) == 3 and words[0].upper() == b"SET")
)


def read(pieces: list[bytes]) -> list[tuple[bytes, ...]]:
    """The requests in a stream; a SET's value is its third word."""
    reader, found, value, key = RequestReader(), [], bytearray(), b""
    for piece in pieces:
        reader.feed(piece)
        while True:
            if reader.value_left:
                value += reader.take_value()
                if reader.value_left:
                    break
            step = reader.next()
            reader.check_integrity()
            if step is None:
                break
            if isinstance(step, ValueAhead):
                key, value = step.key, bytearray()
            elif isinstance(step, ValueEnd):
                found.append((b"SET", key, bytes(value)))
            else:
                found.append(step.words)
    assert not reader.is_in_request
    return found


@given(st.lists(st.one_of(SET, OTHER), max_size=5), st.data())
def test_a_stream_means_the_same_however_it_is_cut(
    requests: list[tuple[bytes, ...]], data: st.DataObject
) -> None:
    stream = b"".join(request(*words) for words in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    wanted = [
        (b"SET", *words[1:]) if len(words) == 3 and words[0].upper() == b"SET" else tuple(words)
        for words in requests
    ]
    assert read(pieces) == wanted


@given(st.lists(st.one_of(st.binary(max_size=60), OTHER.map(lambda w: request(*w))), max_size=8))
def test_whatever_comes_is_understood_or_refused_and_never_kept_beyond_bounds(
    pieces: list[bytes],
) -> None:
    reader = RequestReader()
    for piece in pieces:
        reader.feed(piece)
        try:
            while (step := _next(reader)) is not None:
                assert not isinstance(step, Request) or step.words
        except ProtocolError:
            return
        reader.check_integrity()


def _next(reader: RequestReader) -> Step | None:
    if reader.value_left:
        reader.take_value()
        if reader.value_left:
            return None
    return reader.next()


def only(stream: bytes) -> Step | None:
    reader = RequestReader()
    reader.feed(stream)
    return reader.next()


def test_inline_commands_and_empty_lines_are_read() -> None:
    assert only(b"\r\n\r\nPING\r\n") == Request((b"PING",))
    assert only(b"*0\r\n*-1\r\nget  key \n") == Request((b"get", b"key"))
    assert only(b"GET some") is None


@pytest.mark.parametrize(
    "stream",
    [
        b"*x\r\n",
        b"*%d\r\n" % (MAX_WORDS + 1),
        b"*1\r\n+1\r\n",
        b"*1\r\n\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$%d\r\n" % (MAX_BULK_BYTES + 1),
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1073741824\r\n",
        b"*1\r\n$2\r\nabcd\r\n",
        b"*1\r\n$" + b"1" * 100,
        b"x" * 5000,
        b"POST / HTTP/1.1\r\n",
        b"Host: 127.0.0.1:6379\r\n",
    ],
)
def test_what_is_no_request_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        only(stream)


def test_a_long_word_is_passed_over_and_its_request_marked() -> None:
    long = b"k" * (MAX_WORD_BYTES + 1)
    assert only(request("GET", long)) == Request((b"GET", b""), is_cut=True)
    assert only(request("SET", long, b"v" * 9000)) == Request((b"SET", b"", b""), is_cut=True)
    assert only(request("SET", "k", "v", "EX", "1")) == Request((b"SET", b"k", b"v", b"EX", b"1"))


def test_the_words_of_one_request_are_bounded_together() -> None:
    word = b"w" * MAX_WORD_BYTES
    most = MAX_REQUEST_BYTES // MAX_WORD_BYTES
    assert only(request(*[word] * most)) == Request((word,) * most)
    with pytest.raises(ProtocolError):
        only(request(*[word] * (most + 1)))


def test_a_value_that_is_not_wanted_is_passed_over() -> None:
    reader = RequestReader()
    reader.feed(request("SET", "k", b"x" * 1000)[:500])
    assert reader.next() == ValueAhead(b"k", 1000)
    reader.drop_value()
    assert reader.next() is None
    reader.feed((request("SET", "k", b"x" * 1000) + request("PING"))[500:])
    assert reader.next() == ValueEnd()
    assert reader.next() == Request((b"PING",))


def test_a_stranger_may_send_small_things_only() -> None:
    reader = RequestReader()
    reader.is_stranger = True
    reader.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$16385\r\n")
    with pytest.raises(ProtocolError, match="unauthenticated"):
        reader.next()
