"""Follows one engine's ZMQ stream: subscribes, asks for what is missing, and says what it hears.

    PUB     [topic, seq as 8 bytes big endian, payload]
    replay  DEALER sends [b"", first seq wanted]; the engine's ROUTER answers
            [b"", topic?, seq, payload] for each, then one with seq -1 (vLLM and SGLang alike)

One task per engine. An engine that is away costs a retry with back-off, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from client_sdk import aio
from emberkv_proto.errors import UnavailableError
from global_index.hbm.decoding import MAX_MESSAGE_BYTES
from global_index.hbm.engines import EngineDirectory, EngineKey
from global_index.hbm.sequence import Verdict

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 100_000
"""While a replay is read, live messages wait; with more than these the oldest would be lost."""
TURN_SECONDS = 0.002
"""Queries wait for no more than this and one message; that of a long prompt takes a millisecond."""
POLL_SECONDS = 5.0
RETRY_SECONDS = 1.0
RECONNECT_FIRST_MILLISECONDS = 100
RECONNECT_MAX_MILLISECONDS = 2000
HEARTBEAT_MILLISECONDS = 2000
"""A host that vanished, or a process that was stopped, is noticed in three of them."""
MAX_REPLAYED = 1 << 17
_END = (1 << 64) - 1
_SEQ_BYTES = 8


@dataclass(frozen=True, slots=True)
class ReplayTimes:
    """How long a replay may take: each message of it, and the whole."""

    message_seconds: float = 5.0
    whole_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class _Message:
    seq: int
    payload: bytes


class EngineSource:
    """Keeps one engine of `directory` fed until it is cancelled."""

    def __init__(
        self,
        key: EngineKey,
        directory: EngineDirectory,
        context: zmq.asyncio.Context,
        *,
        replay_times: ReplayTimes = ReplayTimes(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = directory.info(key)
        self._key = key
        self._events_endpoint = info.events_endpoint
        self._replay_endpoint = info.replay_endpoint
        self._directory = directory
        self._context = context
        self._times = replay_times
        self._clock = clock

    async def run(self) -> None:
        """Follow for ever. Only cancellation and faults of our own get out."""
        while True:
            try:
                await self._follow()
            except zmq.ZMQError as error:
                log.warning("events of engine %s cannot be followed: %s", self._key, error)
            finally:
                self._directory.on_away(self._key, self._clock())
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.0))  # noqa: S311

    async def _follow(self) -> None:
        subscriber = self._context.socket(zmq.SUB)
        monitor = subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            subscriber.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
            _limit(subscriber)
            subscriber.subscribe(b"")
            subscriber.connect(self._events_endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(subscriber, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll(1000 * POLL_SECONDS))
                if monitor in ready:
                    change = parse_monitor_message(await monitor.recv_multipart())
                    await self._on_connection(change["event"])
                if subscriber in ready:
                    await self._read(subscriber)
        finally:
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    async def _on_connection(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._directory.on_away(self._key, self._clock())
            return
        sequence = self._directory.sequence(self._key)
        if not await self._replay() and sequence.next:
            # What was said meanwhile is not known, nor whether it is still the same life.
            self._directory.lose(self._key, 0)
        self._directory.on_current(self._key)

    async def _read(self, subscriber: zmq.asyncio.Socket) -> None:
        """Take what is there, for one turn."""
        until = self._clock() + TURN_SECONDS
        while True:
            message = _parsed(await subscriber.recv_multipart())
            if message is None:
                self._directory.counts(self._key).malformed_messages += 1
            else:
                await self._take(message)
            if self._clock() >= until:
                await asyncio.sleep(0)
                return
            if not await subscriber.poll(0):
                return

    async def _take(self, message: _Message) -> None:
        """One live message. Whatever happens, the next one wanted is the one after it."""
        counts = self._directory.counts(self._key)
        verdict = self._offer(message)
        if verdict is Verdict.RESTART:
            self._directory.begin_again(self._key)
            verdict = self._offer(message)
        if verdict is Verdict.GAP:
            counts.gaps += 1
            await self._replay()
            verdict = self._offer(message)
        if verdict in (Verdict.GAP, Verdict.RESTART):
            self._directory.lose(self._key, message.seq)
            self._offer(message)

    def _offer(self, message: _Message) -> Verdict:
        return self._directory.offer(self._key, message.seq, message.payload)

    async def _replay(self) -> bool:
        """Get what is missing; False when that could not be found out.

        It is asked from the newest message that we have: if that is not the first to come, with
        the same bytes, the engine has restarted, or it does not remember so far back.
        """
        if not self._replay_endpoint:
            return False
        counts = self._directory.counts(self._key)
        counts.replays += 1
        try:
            async with aio.timeout(self._times.whole_seconds):
                if not await self._ask():
                    self._directory.begin_again(self._key)
                    await self._ask()
        except (asyncio.TimeoutError, TimeoutError, zmq.ZMQError, UnavailableError) as error:
            counts.failed_replays += 1
            log.warning("replay of engine %s failed: %s", self._key, str(error) or "no answer")
            return False
        return True

    async def _ask(self) -> bool:
        """One replay; False when it shows another life of the engine."""
        sequence = self._directory.sequence(self._key)
        first = sequence.replay_from
        awaits_proof = sequence.has_proof
        until = self._clock() + TURN_SECONDS
        dealer = self._context.socket(zmq.DEALER)
        try:
            await self._send_request(dealer, first)
            for _ in range(MAX_REPLAYED):
                message = await self._answer(dealer)
                if message is None:
                    return not awaits_proof
                if awaits_proof and message.seq > first:
                    self._directory.lose(self._key, message.seq)
                awaits_proof = False
                verdict = self._offer(message)
                if verdict is Verdict.RESTART:
                    return False
                if verdict is Verdict.GAP:
                    self._directory.lose(self._key, message.seq)
                    self._offer(message)
                if self._clock() >= until:
                    await asyncio.sleep(0)
                    until = self._clock() + TURN_SECONDS
        finally:
            dealer.close(linger=0)
        raise UnavailableError(f"more than {MAX_REPLAYED} messages")

    async def _send_request(self, dealer: zmq.asyncio.Socket, first: int) -> None:
        dealer.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        _limit(dealer)
        dealer.connect(self._replay_endpoint)
        async with aio.timeout(self._times.message_seconds):
            await dealer.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])

    async def _answer(self, dealer: zmq.asyncio.Socket) -> _Message | None:
        """None: that was all. Raises UnavailableError for an answer in no format."""
        async with aio.timeout(self._times.message_seconds):
            frames = await dealer.recv_multipart()
        message = _parsed(frames)
        if message is None:
            raise UnavailableError(f"an answer of {len(frames)} frames")
        return None if message.seq == _END else message


def _limit(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MILLISECONDS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)


def _parsed(frames: list[bytes]) -> _Message | None:
    """The last two frames, whatever comes before: topics and delimiters differ by version."""
    if not 2 <= len(frames) <= 5 or len(frames[-2]) != _SEQ_BYTES:
        return None
    return _Message(int.from_bytes(frames[-2], "big"), frames[-1])
