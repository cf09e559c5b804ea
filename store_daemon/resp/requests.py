"""Cuts what a Redis client sends into requests (RESP and inline commands). Pure.

The value of a `SET key value` is never gathered here: `next` says that it begins, and whoever reads
the stream takes its bytes to where they belong. All else is bounded: words, their length, the
request they make up.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORDS = 1024
MAX_WORD_BYTES = 4096
"""Longest word that is kept; a longer one is passed over and its request marked."""
MAX_REQUEST_BYTES = 1 << 20
MAX_INLINE_BYTES = 4096
MAX_BLANK_LINES = 64
"""Passed over in one step, so that others get their turn."""
MAX_HEADER_BYTES = 64
MAX_BULK_BYTES = 512 << 20
"""As Redis: nothing longer is read, the connection ends."""
MAX_STRANGER_BYTES = 16 << 10
"""Longest bulk of who has not authenticated."""
_CRLF = b"\r\n"


class ProtocolError(Exception):
    """What was sent is no request; what follows cannot be understood. The text is for clients."""


@dataclass(frozen=True, slots=True)
class Request:
    """The words of one command; none: blank lines. `is_cut`: one was longer than MAX_WORD_BYTES and
    is empty here."""

    words: tuple[bytes, ...]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ValueAhead:
    """The value of a SET comes next: `byte_count` bytes."""

    key: bytes
    byte_count: int


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """The value is complete."""


VALUE_END = ValueEnd()
Step = Request | ValueAhead | ValueEnd


class RequestReader:
    """One connection's stream. Holds what was fed and not understood yet, no more."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._words_left = 0
        self._words: list[bytes] = []
        self._kept_bytes = 0
        self._is_cut = False
        self._bulk: int | None = None
        """Length of the bulk that is being read."""
        self._passing = 0
        """Bytes still to be passed over."""
        self._is_in_value = False
        self.value_left = 0
        """Bytes of the value that have not been taken yet."""
        self.is_stranger = False
        """Whether the client has not authenticated: then it may send small things only."""

    @property
    def is_in_request(self) -> bool:
        """Whether a request has begun and not ended."""
        return bool(self._words_left or self._is_in_value or len(self._data) > self._at)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    def next(self) -> Step | None:
        """What comes next; None: more must be fed. After ValueAhead, take the value first.

        Raises ProtocolError; the reader is of no use then.
        """
        step = self._end_of_value() if self._is_in_value else self._request()
        if step is None:
            del self._data[: self._at]
            self._at = 0
        return step

    def take_value(self) -> bytearray:
        """The part of the value that was fed already."""
        assert self._is_in_value
        end = min(self._at + self.value_left, len(self._data))
        taken = self._data[self._at : end]
        self._at = end
        self.value_left -= len(taken)
        return taken

    def value_received(self, byte_count: int) -> None:
        """So many bytes of the value went past the reader."""
        assert byte_count <= self.value_left
        self.value_left -= byte_count

    def drop_value(self) -> None:
        """The value is not wanted: pass it over as it is fed."""
        self._passing, self.value_left = self.value_left, 0

    def check_integrity(self) -> None:
        """Assert the bounds that the module promises."""
        assert self._at <= len(self._data)
        assert len(self._words) <= MAX_WORDS
        assert self._kept_bytes == sum(map(len, self._words)) <= MAX_REQUEST_BYTES
        assert self.value_left >= 0
        assert not self.value_left or self._is_in_value

    # ---- inner steps ----

    def _end_of_value(self) -> ValueEnd | None:
        assert not self.value_left, "the value was not taken"
        if not self._pass_over() or not self._crlf():
            return None
        self._is_in_value = False
        self._begin(0)
        return VALUE_END

    def _request(self) -> Request | ValueAhead | None:
        for _ in range(MAX_BLANK_LINES):
            if self._words_left:
                return self._bulks()
            line = self._line(MAX_INLINE_BYTES, b"too big inline request")
            if line is None:
                return None
            if not line.startswith(b"*"):
                request = self._inline(line)
                if request is None:
                    continue
                return request
            count = _number(line[1:])
            if count is None or count > MAX_WORDS:
                raise ProtocolError("invalid multibulk length")
            self._begin(max(count, 0))
        return self._bulks() if self._words_left else Request(())

    def _inline(self, line: bytes) -> Request | None:
        words = tuple(line.split())
        if not words:
            return None
        if len(words) > MAX_WORDS:
            raise ProtocolError("too big inline request")
        # A web page that was made to call this port; no client of Redis sends this.
        if words[0].upper() == b"HOST:" or words[-1].startswith(b"HTTP/"):
            raise ProtocolError("this is not a web server")
        return Request(words)

    def _begin(self, count: int) -> None:
        self._words_left, self._words, self._kept_bytes, self._is_cut = count, [], 0, False

    def _bulks(self) -> Request | ValueAhead | None:
        while self._words_left:
            if not self._pass_over():
                return None
            if self._bulk is None:
                ahead = self._bulk_header()
                if not isinstance(ahead, bool):
                    return ahead
                if not ahead:
                    return None
                if self._bulk is None:
                    continue  # it is passed over
            end = self._at + self._bulk
            if len(self._data) < end + 2:
                return None
            word = bytes(self._data[self._at : end])
            self._at = end
            self._crlf()
            self._bulk = None
            self._keep(word)
        request = Request(tuple(self._words), self._is_cut)
        self._begin(0)
        return request

    def _bulk_header(self) -> bool | ValueAhead:
        """Whether there was one, or that the value begins."""
        line = self._line(MAX_HEADER_BYTES, b"too big bulk count string")
        if line is None:
            return False
        if not line.startswith(b"$"):
            raise ProtocolError(f"expected '$', got {ascii(chr(line[0])) if line else 'nothing'}")
        length = _number(line[1:])
        if length is None or not 0 <= length <= MAX_BULK_BYTES:
            raise ProtocolError("invalid bulk length")
        if self.is_stranger and length > MAX_STRANGER_BYTES:
            raise ProtocolError("unauthenticated bulk length")
        is_value = self._words_left == 1 and len(self._words) == 2 and not self._is_cut
        if is_value and self._words[0].upper() == b"SET":
            self._is_in_value, self.value_left, self._words_left = True, length, 0
            return ValueAhead(self._words[1], length)
        if length > MAX_WORD_BYTES:
            self._is_cut, self._passing = True, length + 2
            self._keep(b"")
        else:
            self._bulk = length
        return True

    def _keep(self, word: bytes) -> None:
        self._kept_bytes += len(word)
        if self._kept_bytes > MAX_REQUEST_BYTES:
            raise ProtocolError("too big request")
        self._words.append(word)
        self._words_left -= 1

    def _pass_over(self) -> bool:
        """Whether nothing is left to be passed over."""
        step = min(self._passing, len(self._data) - self._at)
        self._at += step
        self._passing -= step
        return not self._passing

    def _crlf(self) -> bool:
        """Whether the end of a bulk is here, and passed."""
        end = self._data[self._at : self._at + 2]
        if not _CRLF.startswith(end):
            raise ProtocolError("a bulk is longer than it says")
        if len(end) < 2:
            return False
        self._at += 2
        return True

    def _line(self, most: int, too_long: bytes) -> bytes | None:
        end = self._data.find(b"\n", self._at, self._at + most)
        if end < 0:
            if len(self._data) - self._at >= most:
                raise ProtocolError(too_long.decode())
            return None
        line = bytes(self._data[self._at : end])
        self._at = end + 1
        return line[:-1] if line.endswith(b"\r") else line


def _number(text: bytes) -> int | None:
    """A whole number as RESP writes it, of at most 18 digits."""
    digits = text[1:] if text.startswith(b"-") else text
    return int(text) if digits.isdigit() and len(digits) <= 18 else None
