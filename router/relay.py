"""One response on its way from an engine to a client, and what its last bytes tell.

Pieces are written as they come, one write each. Only references are kept aside: the tail of a
stream, or a small JSON body, to compare the hit the engine reports with the one predicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from router import usage
from router.chunked import Body, ChunkedBody, Dechunked, UntilCloseBody
from router.http_message import error_body
from router.upstream_head import ResponseHead

KEPT_STREAM_PIECES = 3
MAX_COMPLETION_BYTES = 64 * 1024


class Relay:
    """One response body: `begin` with its first bytes, then `piece`."""

    def __init__(
        self,
        head: ResponseHead,
        body: Body,
        write: Callable[[bytes], None],
        preface: bytes = b"",
    ) -> None:
        """`preface`: the head as it goes to the client, if it is to be written with the body."""
        self._body = body
        self._write = write
        self._preface = preface
        kind = head.kind
        self.is_stream = kind.is_stream
        self._may_speak = kind.is_stream and kind.is_plain
        """Whether an event of ours can be put into the body."""
        if not kind.is_read or kind.length > usage.MAX_PARSED_BYTES:
            self._kept: deque[bytes] = deque(maxlen=0)
        else:
            self._kept = deque(maxlen=KEPT_STREAM_PIECES if self.is_stream else None)
        self._kept_bytes = 0

    def begin(self, data: bytes) -> None:
        """Pass on the first bytes of the body, with what waited for them."""
        preface, self._preface = self._preface, b""
        self._write(preface + data if preface else data)
        self._keep(data)

    def piece(self, data: bytes) -> None:
        """Pass on the next bytes of the body."""
        self._write(data)
        if self.is_stream:
            self._kept.append(data)
        else:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        if not self.is_stream and self._kept_bytes > usage.MAX_PARSED_BYTES:
            self._kept = deque(maxlen=0)

    def flush(self) -> None:
        """Write what waited for a body that did not come."""
        if self._preface:
            self._write(self._preface)
            self._preface = b""

    def delivered(self) -> usage.Delivered | None:
        """What the engine said it had cached, once the body is complete."""
        raw = self._last_bytes()
        return usage.from_stream_tail(raw) if self.is_stream else usage.from_json(raw)

    def answered_tokens(self) -> int:
        """How many tokens the engine said it generated, once the body is complete."""
        return usage.answered_tokens(self._last_bytes(), is_stream=self.is_stream)

    def _last_bytes(self) -> bytes:
        """The tail of a stream, or a whole JSON body without its framing; empty if not kept."""
        raw = b"".join(self._kept)
        if raw and not self.is_stream and type(self._body) is ChunkedBody:
            return Dechunked().feed(raw)
        return raw

    def end_broken(self, message: str) -> bool:
        """Tell the client of a stream that its engine died; False where that cannot be done.

        The event is last: no [DONE] follows, and the connection must be closed after it.
        """
        if not self._may_speak:
            return False
        # The blank line ends whatever event was cut.
        event = b"\n\ndata: " + error_body(502, message, "upstream_error") + b"\n\n"
        if type(self._body) is ChunkedBody:
            completion = self._body.completion()
            if len(completion) > MAX_COMPLETION_BYTES:
                return False
            self._write(b"%s%x\r\n%s\r\n0\r\n\r\n" % (completion, len(event), event))
            return True
        if isinstance(self._body, (UntilCloseBody, Dechunked)):
            self._write(event)
            return True
        return False  # a content-length cannot be kept


class EventMeter:
    """Counts the events of a stream as they are written: about a token each."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._events = 0

    def write(self, data: bytes) -> None:
        self._events += data.count(b"data:")
        self._write(data)

    @property
    def tokens(self) -> int:
        """What to count where the engine told no usage; the last event is no token."""
        return max(0, self._events - 1)
