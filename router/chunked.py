"""Follows the framing of a response body that passes through, so that its end is known.

`feed` returns the bytes to pass on, most often the very object it was given, and keeps back only
an unfinished size line or trailer: what has been passed on can then always be completed to valid
framing, even when the sender dies in the middle of a chunk.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 4096
SIZES_BELOW = 4096
MOST_SPLIT_BYTES = 64 * 1024
_SIZES: dict[bytes, int] = {}
"""Size lines seen before, as they were written; bounded, since they can be written in many ways."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


class FramingError(Exception):
    """The body's framing is broken; the connection cannot be used further."""


class FixedLengthBody:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._missing = length
        self.is_done = length == 0

    def feed(self, data: bytes) -> bytes:
        self._missing -= len(data)
        if self._missing < 0:
            raise FramingError(f"{-self._missing} bytes beyond the content-length")
        self.is_done = self._missing == 0
        return data


class UntilCloseBody:
    """A body that ends when the sender closes."""

    is_done = False

    def feed(self, data: bytes) -> bytes:
        return data


class ChunkedBody:
    """Passes chunked framing through as it is."""

    def __init__(self) -> None:
        self.is_done = False
        self._missing = 0
        """Bytes of the open chunk still to come, its CRLF included."""
        self._held = b""
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now.

        Raises:
            FramingError: not chunked framing, or bytes beyond its end.
        """
        if not self._missing and not self._held and not self._in_trailer:
            # Nearly always whole chunks of sizes seen before: told without a step for each.
            end = data.find(b"\r\n", 0, 18)
            length = _SIZES.get(data[:end])
            if length is not None and data.endswith(b"\r\n"):
                if end + length + 4 == len(data):
                    return self._whole_chunk(data, end)
                if len(data) <= MOST_SPLIT_BYTES:
                    *lines, _ = data.split(b"\r\n")
                    sizes, payloads = lines[::2], lines[1::2]
                    if list(map(_SIZES.get, sizes)) == list(map(len, payloads)):
                        return self._whole_chunks_of(data, payloads)
        return self._scan(data)

    def completion(self) -> bytes:
        """Bytes that close the open chunk, so that another one may follow. Newlines, for SSE."""
        if not self._missing:
            return b""
        return b"\n" * max(0, self._missing - 2) + b"\r\n"[-min(2, self._missing) :]

    def _whole_chunk(self, data: bytes, size_end: int) -> bytes:
        return data

    def _whole_chunks_of(self, data: bytes, payloads: list[bytes]) -> bytes:
        return data

    def _scan(self, data: bytes) -> bytes:
        if self.is_done:
            raise FramingError(f"{len(data)} bytes beyond the last chunk")
        data = self._held + data if self._held else data
        self._held = b""
        at, size = 0, len(data)
        out: list[bytes] = []
        while at < size and not self.is_done:
            missing = self._missing
            if missing:
                take = min(missing, size - at)
                self._check_chunk_end(data, at, take)
                self._take_payload(out, data, at, take)
                self._missing -= take
                at += take
                continue
            if not self._in_trailer:
                at = self._whole_chunks(data, at, out)
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > MAX_LINE_BYTES:
                    raise FramingError("chunk size line without end")
                self._held = data[at:]
                break
            self._line(data, at, end)
            at = end + 2
        if self.is_done and at < size:
            raise FramingError(f"{size - at} bytes beyond the last chunk")
        return self._passed(data, at, out)

    def _line(self, data: bytes, start: int, end: int) -> None:
        if self._in_trailer:
            self.is_done = start == end
            return
        size = _SIZE.fullmatch(data, start, end)
        if size is None:
            raise FramingError(f"chunk size {data[start : min(end, start + 20)]!r}")
        length = int(size[1], 16)
        if length:
            self._missing = length + 2
            if length < SIZES_BELOW and len(_SIZES) < 2 * SIZES_BELOW:
                _SIZES[data[start:end]] = length
        else:
            self._in_trailer = True

    def _check_chunk_end(self, data: bytes, at: int, take: int) -> None:
        # The last two of the missing bytes must be CR LF.
        tail = data[at + max(0, self._missing - 2) : at + take]
        wanted = b"\r\n"[2 - min(2, self._missing) :][: len(tail)]
        if tail != wanted:
            raise FramingError("chunk does not end with CR LF")

    def _take_payload(self, out: list[bytes], data: bytes, at: int, take: int) -> None:
        """Nothing to take apart: the framing stays."""

    def _whole_chunks(self, data: bytes, at: int, out: list[bytes]) -> int:
        """Hop over whole chunks of sizes seen before, by far the most frequent case."""
        find, known, size = data.find, _SIZES.get, len(data)
        while True:
            end = find(b"\r\n", at)
            following = end + 2 + known(data[at:end], size)
            if end < 0 or following + 2 > size:
                return at
            if data[following : following + 2] != b"\r\n":
                raise FramingError("chunk does not end with CR LF")
            at = following + 2

    def _passed(self, data: bytes, at: int, out: list[bytes]) -> bytes:
        return data if at == len(data) else data[:at]


class Dechunked(ChunkedBody):
    """Removes chunked framing, for a client of HTTP/1.0 and for reading a body."""

    def completion(self) -> bytes:
        return b""

    def _whole_chunk(self, data: bytes, size_end: int) -> bytes:
        return data[size_end + 2 : -2]

    def _whole_chunks_of(self, data: bytes, payloads: list[bytes]) -> bytes:
        return b"".join(payloads)

    def _take_payload(self, out: list[bytes], data: bytes, at: int, take: int) -> None:
        payload = min(take, self._missing - 2)
        if payload > 0:
            out.append(data[at : at + payload])

    def _whole_chunks(self, data: bytes, at: int, out: list[bytes]) -> int:
        return at  # each one's payload is taken out

    def _passed(self, data: bytes, at: int, out: list[bytes]) -> bytes:
        return out[0] if len(out) == 1 else b"".join(out)


Body = FixedLengthBody | UntilCloseBody | ChunkedBody
