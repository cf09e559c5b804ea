"""One Redis client's connection: bytes from the socket to slots and back, piece by piece.

A value goes from the socket into its slot and from its slot to the socket; the loop never moves
more than CHUNK_BYTES of it before others get their turn. Who does not read its replies keeps what
it asked for pinned, up to a bound and for at most `SILENCE_SECONDS`, and nothing of it is copied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from store_daemon.resp import replies
from store_daemon.resp.commands import Conversation, Work
from store_daemon.resp.replies import Later
from store_daemon.resp.requests import ProtocolError, RequestReader, ValueAhead, ValueEnd
from store_daemon.resp.values import Incoming, Outgoing, ValueShelf

log = logging.getLogger(__name__)
INBOX_BYTES = 64 << 10
DIRECT_BYTES = 32 << 10
"""From this much on, what is left of a value is received into its slot. Less comes by the inbox
with the requests behind it: a copy costs less than a turn of the loop."""
CHUNK_BYTES = 256 << 10
SMALL_BYTES = 16 << 10
"""A value up to this long is copied into the text of the replies around it."""
TURN_SECONDS = 0.002
"""How long one client's requests may take before the loop serves the others."""
MAX_REPLIES_AHEAD = 1024
MAX_TEXT_BYTES = 256 << 10
"""Replies that wait for the client to read, beyond which no more of its requests are read."""
SILENCE_SECONDS = 10.0
"""How long a client may leave a request half sent, or its replies unread."""
AUTH_SECONDS = 10.0
ROOM_SECONDS = 2.0
"""How long a value waits for room: what must go first may still be on its way to SSD."""
ROOM_RETRY_SECONDS = 0.01


class Connection(asyncio.BufferedProtocol):
    """Owned by its transport.

    Args:
        converse: begins the conversation, given how to have work done.
        ahead_bytes: what replies may hold of the pool before no more requests are read.
        on_made, on_lost: told of the beginning and the end.
    """

    def __init__(
        self,
        shelf: ValueShelf,
        converse: Callable[[Callable[[Work], None]], Conversation],
        ahead_bytes: int,
        on_made: Callable[[Connection], bool],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._shelf = shelf
        self._talk = converse(self._start_work)
        self._ahead_bytes = ahead_bytes
        self._on_made = on_made
        self._on_lost = on_lost
        self.transport: asyncio.Transport
        self._reader = RequestReader()
        self._reader.is_stranger = not self._talk.is_authenticated
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._incoming: Incoming | None = None
        self._ahead: ValueAhead | None = None
        """A value that waits for room."""
        self._ahead_until = 0.0
        self._refusal: bytes | None = None
        """What a SET whose value goes by will be answered."""
        self._is_direct = False
        """Whether the buffer that was given last is the value's place."""
        self._sent: list[Outgoing] = []
        """Whose last bytes the transport has, and may not have sent."""
        self._tail = b""
        """What ends the long value that was sent last."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._is_unread = False
        self._is_paused = False
        self._is_going_on = False
        self._began = self._heard = self._written = time.monotonic()

    # ---- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        if not self._on_made(self):
            self._is_closing = True
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        incoming = self._incoming
        left = 0 if incoming is None else incoming.byte_count - incoming.received
        self._is_direct = left >= DIRECT_BYTES
        if self._is_direct:
            assert incoming is not None
            return incoming.room(CHUNK_BYTES)
        return self._inbox

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = time.monotonic()
        if not self._is_direct:
            self._reader.feed(self._inbox[:nbytes])
            self._go_on()
        elif self._incoming is not None:
            self._incoming.took(nbytes)
            self._reader.value_received(nbytes)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_unread = True

    def resume_writing(self) -> None:
        self._is_unread = False
        self._written = time.monotonic()
        self._let_go_of_sent()
        self._go_on_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        self._let_go_of_sent()
        if self._incoming is not None:
            self._shelf.abort(self._incoming)
            self._incoming = None
        line = self._talk.line
        while len(line):
            reply = line.pop()
            if isinstance(reply, Outgoing):
                self._shelf.close(reply)
        self._on_lost(self)

    # ---- for the door ----

    def check(self, now: float) -> None:
        """Cut it off when it has stopped in the middle of something. Called every second."""
        why = ""
        if self._is_unread and now - self._written > SILENCE_SECONDS:
            why = "it does not read its replies"
        is_silent = not self._is_paused and now - self._heard > SILENCE_SECONDS
        if is_silent and self._reader.is_in_request:
            why = "it stopped in the middle of a request"
        if not self._talk.is_authenticated and now - self._began > AUTH_SECONDS:
            why = "it does not authenticate"
        if why and not self._is_closing:
            log.warning("redis client cut off: %s", why)
            self._shelf.store.holdings.counters["resp_cut_connections"] += 1
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        self.transport.abort()

    def check_integrity(self) -> None:
        self._reader.check_integrity()
        self._talk.line.check_integrity()

    # ---- requests ----

    @property
    def _is_full(self) -> bool:
        """Whether it must read replies before more of its requests are looked at."""
        line = self._talk.line
        return (
            len(line) >= MAX_REPLIES_AHEAD
            or line.text_bytes >= MAX_TEXT_BYTES
            or line.held_bytes > self._ahead_bytes
        )

    def _go_on(self) -> None:
        """Answer what is here, send what can be sent, and read on if there is room for more."""
        self._is_going_on = False
        if self._is_closing:
            return
        try:
            self._take_turn()
        except Exception:
            self._failed()
        finally:
            self._shelf.publish()

    def _take_turn(self) -> None:
        turn_ends = time.monotonic() + TURN_SECONDS
        is_all_answered = False
        while not (is_all_answered or self._is_full or self._talk.is_over):
            is_all_answered = not self._answer_next()
            if not is_all_answered and time.monotonic() > turn_ends:
                self._go_on_soon()
                break
        self._send()
        if self._is_closing:
            return
        may_read = is_all_answered and not self._is_full and self._ahead is None
        if may_read and self._is_paused:
            self._heard = time.monotonic()
            self.transport.resume_reading()
        elif not may_read and not self._is_paused:
            self.transport.pause_reading()
        self._is_paused = not may_read
        has_room = not self._is_unread and not self._is_full and self._ahead is None
        if not may_read and has_room and not self._talk.is_over:
            self._go_on_soon()

    def _go_on_soon(self) -> None:
        if not self._is_going_on and not self._is_closing:
            self._is_going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _answer_next(self) -> bool:
        """Take one step of the stream; whether there was one."""
        reader, talk = self._reader, self._talk
        if talk.has_more:
            talk.answer_more()
            return True
        if self._ahead is not None:
            return self._begin_value(self._ahead)
        if self._incoming is not None and reader.value_left:
            self._incoming.write(reader.take_value())
            if reader.value_left:
                return False
        try:
            step = reader.next()
        except ProtocolError as error:
            talk.misunderstood(str(error))
            return False
        if step is None:
            return False
        if isinstance(step, ValueAhead):
            self._ahead, self._ahead_until = step, time.monotonic() + ROOM_SECONDS
        elif isinstance(step, ValueEnd):
            incoming, self._incoming = self._incoming, None
            if incoming is not None:
                talk.received(incoming)
            elif self._refusal is not None:
                talk.refuse(self._refusal)
        elif step.words:
            talk.answer(step)
            reader.is_stranger = not talk.is_authenticated
        return True

    def _begin_value(self, ahead: ValueAhead) -> bool:
        """Whether it is known what becomes of the value."""
        may_wait = time.monotonic() < self._ahead_until
        expected = self._talk.expect(ahead.key, ahead.byte_count, may_wait=may_wait)
        if expected is None:
            asyncio.get_running_loop().call_later(ROOM_RETRY_SECONDS, self._go_on)
            return False
        self._ahead = None
        if isinstance(expected, Incoming):
            self._incoming = expected
            expected.write(self._reader.take_value())
        else:
            self._refusal = expected
            self._reader.drop_value()
        return True

    # ---- replies ----

    def _send(self) -> None:
        """Give the transport what it takes without keeping it."""
        while not self._is_unread and (piece := self._next_piece()) is not None:
            self._written = time.monotonic()
            self.transport.write(piece)
            if not self._is_unread:
                self._let_go_of_sent()
        is_sent = not (self._is_unread or self._tail or len(self._talk.line))
        if self._talk.is_over and is_sent:
            self._is_closing = True
            self.transport.close()

    def _next_piece(self) -> bytes | memoryview | None:
        """What goes out next: short replies together, or a piece of a long value."""
        line, text = self._talk.line, bytearray(self._tail)
        self._tail = b""
        while (first := line.first()) is not None and len(text) < replies.MAX_JOINED_BYTES:
            if isinstance(first, bytearray):
                text += first
                line.pop()
            elif first.is_waiting:
                break
            elif isinstance(first, Later):
                text += first.text
                line.pop()
            else:
                assert isinstance(first, Outgoing)
                if first.view is not None and len(first.view) > SMALL_BYTES:
                    if not first.is_begun:
                        first.is_begun = True
                        text += b"$%d\r\n" % len(first.view)
                    return bytes(text) if text else self._piece_of(first, first.view)
                text += self._talk.no_value() if first.view is None else _bulk(first.view)
                line.pop()
                self._shelf.close(first)
        return bytes(text) if text else None

    def _piece_of(self, outgoing: Outgoing, view: memoryview) -> memoryview:
        piece = view[outgoing.sent : outgoing.sent + CHUNK_BYTES]
        outgoing.sent += len(piece)
        if outgoing.sent == len(view):
            self._talk.line.pop()
            self._sent.append(outgoing)
            self._tail = b"\r\n"
        return piece

    def _let_go_of_sent(self) -> None:
        for outgoing in self._sent:
            self._shelf.close(outgoing)
        self._sent.clear()

    def _start_work(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._do(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, work: Work) -> None:
        try:
            await work
        except Exception:
            self._failed()  # or the client would wait for its reply, and all behind it, for ever
        else:
            self._go_on_soon()

    def _failed(self) -> None:
        """Ours to repair, but no reason to fail the other clients."""
        log.exception("a redis client's request failed")
        self._shelf.store.holdings.counters["resp_failed_requests"] += 1
        self.abort()


def _bulk(view: memoryview) -> bytes:
    return replies.bulk(bytes(view))
