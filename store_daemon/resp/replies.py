"""Replies as RESP2 and RESP3 write them, and the line in which they wait to be sent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

OK = b"+OK\r\n"
MAX_JOINED_BYTES = 64 << 10
"""Short replies are joined up to this length."""
_UNPRINTABLE = bytes(n if 32 <= n < 127 else 32 for n in range(256))


class Awaited(Protocol):
    """A reply that may not be there yet, or that is sent from where it lies."""

    @property
    def is_waiting(self) -> bool: ...

    @property
    def held_bytes(self) -> int:
        """Of the pool, until it has been sent."""
        ...


@dataclass(eq=False, slots=True)
class Later:
    """A short reply that is known only when something has been done."""

    text: bytes = b""
    held_bytes: int = 0

    @property
    def is_waiting(self) -> bool:
        return not self.text


class ReplyLine:
    """Replies of one connection, in the order of its requests."""

    def __init__(self) -> None:
        self._line: deque[bytearray | Awaited] = deque()
        self.text_bytes = 0
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._line)

    def text(self, reply: bytes) -> None:
        last = self._line[-1] if self._line else None
        if isinstance(last, bytearray) and len(last) < MAX_JOINED_BYTES:
            last += reply
        else:
            self._line.append(bytearray(reply))
        self.text_bytes += len(reply)

    def later(self, reply: Awaited) -> None:
        self._line.append(reply)
        self.held_bytes += reply.held_bytes

    def first(self) -> bytearray | Awaited | None:
        return self._line[0] if self._line else None

    def pop(self) -> bytearray | Awaited:
        reply = self._line.popleft()
        if isinstance(reply, bytearray):
            self.text_bytes -= len(reply)
        else:
            self.held_bytes -= reply.held_bytes
        return reply

    def check_integrity(self) -> None:
        texts = [reply for reply in self._line if isinstance(reply, bytearray)]
        assert self.text_bytes == sum(map(len, texts))
        others = [reply for reply in self._line if not isinstance(reply, bytearray)]
        assert self.held_bytes == sum(reply.held_bytes for reply in others)


def simple(text: str) -> bytes:
    return b"+" + _clean(text) + b"\r\n"


def error(text: str) -> bytes:
    """`text` begins with the code in capitals, as ERR."""
    return b"-" + _clean(text) + b"\r\n"


def integer(number: int) -> bytes:
    return b":%d\r\n" % number


def bulk(data: bytes | str) -> bytes:
    raw = data.encode() if isinstance(data, str) else data
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


def null(protocol: int) -> bytes:
    return b"_\r\n" if protocol == 3 else b"$-1\r\n"


def array(replies: Sequence[bytes]) -> bytes:
    return array_header(len(replies)) + b"".join(replies)


def array_header(count: int) -> bytes:
    return b"*%d\r\n" % count


def mapping(protocol: int, pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Names to replies: a map, or in RESP2 an array of both in turns."""
    flat = [part for name, reply in pairs for part in (bulk(name), reply)]
    if protocol == 3:
        return b"%%%d\r\n" % (len(flat) // 2) + b"".join(flat)
    return array(flat)


def text_block(protocol: int, text: str) -> bytes:
    """Text for people."""
    if protocol == 3:
        raw = b"txt:" + text.encode()
        return b"=%d\r\n%b\r\n" % (len(raw), raw)
    return bulk(text)


def _clean(text: str) -> bytes:
    return text.encode("utf-8", "replace").translate(_UNPRINTABLE)
