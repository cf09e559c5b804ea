"""Publishes the node's events over ZMQ as a vLLM engine does, and replays what was missed.

    PUB      [topic, number (8 bytes, big endian), message]      from 0 at each start
    ROUTER   [client, b"", first number] ──► [client, b"", topic, number, message]...
                                             [client, b"", b"", -1, b""]

The first message clears and names all that is resident, so whoever listens from the start, or asks
for 0 while it can still be had, knows everything. One event loop owns it; `tell` never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from client_sdk import aio
from emberkv_proto.errors import PreflightError
from store_daemon.catalog import BlockCatalog
from store_daemon.config import EventsSection
from store_daemon.kv_events import (
    MAX_HASHES_PER_MESSAGE,
    AllCleared,
    Record,
    cut,
    encode_message,
    records_of,
    resident_records,
    size_of,
)
from store_daemon.residency import Told

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02
"""How long changes gather before they are sent."""
MAX_PENDING_HASHES = 4 << 20
"""Changes that wait beside what was resident; with more, all is cleared and named anew."""
MAX_QUEUED = 100_000
"""Messages that wait for one slow listener; it then misses some and has to ask for them."""
LINGER_SECONDS = 0.2
"""For what the network has not taken yet, at the end."""
REPLAY_SECONDS = 30.0
MAX_REQUEST_BYTES = 1024
RESTART_SECONDS = 1.0
END = b"\xff" * 8
NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that can be asked for again."""

    number: bytes
    payload: bytes


class KvEventOutlet:
    """`start`, then `tell` of each change; `close` sends what waits and frees the sockets.

    Args:
        catalog: to look up parents and block sizes, and all that is resident.
        counters: kv_event_messages, kv_event_replays, kv_event_resyncs, kv_event_bad_requests.
    """

    def __init__(
        self,
        section: EventsSection,
        catalog: BlockCatalog,
        counters: Counter[str],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._section = section
        self._catalog = catalog
        self._counters = counters
        self._unix_clock = unix_clock
        self._topic = section.zmq_topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._pending: deque[Record] = deque()
        self._pending_hashes = 0
        self._most_pending = MAX_PENDING_HASHES
        self._next = 0
        self._buffer: deque[Sent] = deque()
        self._buffer_bytes = 0
        self.endpoint = self.replay_endpoint = ""
        """As bound, with the port that was picked."""

    def start(self) -> None:
        """Bind, and queue all that is resident. Raises PreflightError when that cannot be done."""
        section = self._section
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, MAX_QUEUED)
            self.endpoint = _bind(self._pub, section.zmq_endpoint, "events.zmq_endpoint")
            if section.zmq_replay_endpoint:
                self._open_router(section.zmq_replay_endpoint)
        except PreflightError:
            self._free()
            raise
        self._begin_anew()
        self._tasks.append(asyncio.create_task(_supervise(self._send_for_ever)))
        log.info("events go out on %s, replays on %s", self.endpoint, self.replay_endpoint or "-")

    def tell(self, told: Told) -> None:
        """Queue an event, while its blocks are still in the catalog."""
        for record in records_of(told.event, told.hashes, self._catalog.blocks):
            self._queue(record)
        if self._pending_hashes > self._most_pending:
            self._counters["kv_event_resyncs"] += 1
            self._begin_anew()
        self._wake.set()

    async def close(self) -> None:
        """Send what waits, and free the sockets. Nothing is told afterwards."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            while self._pending:
                self._send_one()
            self._free()

    def check_integrity(self) -> None:
        assert self._pending_hashes == sum(size_of(record) for record in self._pending)
        assert len(self._buffer) <= self._section.buffer_messages
        assert self._buffer_bytes == sum(len(sent.payload) for sent in self._buffer)
        numbers = [int.from_bytes(sent.number, "big") for sent in self._buffer]
        assert numbers == list(range(self._next - len(numbers), self._next))

    def _begin_anew(self) -> None:
        self._pending.clear()
        self._pending_hashes = 0
        self._queue(AllCleared())
        for record in resident_records(self._catalog):
            self._queue(record)
        self._most_pending = self._pending_hashes + MAX_PENDING_HASHES
        self._wake.set()

    def _queue(self, record: Record) -> None:
        for piece in cut(record):
            self._pending.append(piece)
            self._pending_hashes += size_of(piece)

    async def _send_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(BATCH_SECONDS)  # let some gather
            while self._pending:
                self._send_one()
                await asyncio.sleep(0)  # engines' calls come between two messages

    def _send_one(self) -> None:
        records: list[Record] = []
        hashes = 0
        while self._pending and hashes < MAX_HASHES_PER_MESSAGE:
            record = self._pending.popleft()
            hashes += size_of(record)
            records.append(record)
        self._pending_hashes -= hashes
        sent = Sent(
            self._next.to_bytes(NUMBER_BYTES, "big"),
            encode_message(records, self._unix_clock()),
        )
        self._next += 1
        self._keep(sent)
        self._counters["kv_event_messages"] += 1
        assert self._pub is not None
        # A PUB socket never waits: what a full queue does not take, its listener misses.
        self._pub.send_multipart([self._topic, sent.number, sent.payload], zmq.NOBLOCK)

    def _keep(self, sent: Sent) -> None:
        self._buffer.append(sent)
        self._buffer_bytes += len(sent.payload)
        while len(self._buffer) > 1 and (
            len(self._buffer) > self._section.buffer_messages
            or self._buffer_bytes > self._section.buffer_bytes
        ):
            self._buffer_bytes -= len(self._buffer.popleft().payload)

    async def _replay_for_ever(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
                self._counters["kv_event_bad_requests"] += 1
                continue
            self._counters["kv_event_replays"] += 1
            try:
                async with aio.timeout(REPLAY_SECONDS):
                    await self._replay(router, frames[0], int.from_bytes(frames[2], "big"))
            except (asyncio.TimeoutError, TimeoutError):
                log.warning("a replay was not taken within %s s", REPLAY_SECONDS)

    async def _replay(self, router: zmq.asyncio.Socket, client: bytes, first: int) -> None:
        """Send what is kept from `first` on. A client that has left costs nothing."""
        for sent in list(self._buffer):
            if int.from_bytes(sent.number, "big") >= first:
                await router.send_multipart([client, b"", self._topic, sent.number, sent.payload])
        await router.send_multipart([client, b"", b"", END, b""])

    def _open_router(self, endpoint: str) -> None:
        assert self._context is not None
        router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        # A replay is queued as a whole: a ROUTER drops what is beyond its limit.
        router.setsockopt(zmq.SNDHWM, self._section.buffer_messages + 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router = router
        self.replay_endpoint = _bind(router, endpoint, "events.zmq_replay_endpoint")
        self._tasks.append(asyncio.create_task(_supervise(partial(self._replay_for_ever, router))))

    def _free(self) -> None:
        """Close all; what the network does not take within LINGER_SECONDS is lost."""
        context, self._context = self._context, None
        for socket in (self._router, self._pub):
            if socket is not None:
                socket.close(linger=int(1000 * LINGER_SECONDS))
        self._router = self._pub = None
        if context is not None:
            context.term()


async def _supervise(run: Callable[[], Awaitable[None]]) -> None:
    """Start it again after a fault of ours, loudly: the daemon serves without."""
    while True:
        try:
            await run()
        except Exception:  # noqa: PERF203
            log.exception("publishing of events failed and starts again")
            await asyncio.sleep(RESTART_SECONDS)


def _bind(socket: zmq.Socket[Any], endpoint: str, setting: str) -> str:
    """The endpoint as bound. Raises PreflightError, naming the setting."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise PreflightError(f"cannot bind {endpoint} ({error}); set {setting}") from None
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()
