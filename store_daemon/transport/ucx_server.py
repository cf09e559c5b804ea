"""The owner's half of the UCX transport: checks leases, and pushes where readers cannot read."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from client_sdk import faults
from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import AgentProcess, Lane
from client_sdk.transport.base import Segment
from client_sdk.transport.frames import AnswerHeader, Hello, Status
from client_sdk.transport.lane import Direction, Move, Range
from client_sdk.transport.timed_socket import Clock, TimedSocket
from client_sdk.transport.ucx_frames import (
    UCX_MAGIC,
    Action,
    Introduction,
    MoveRequest,
    batches,
)
from client_sdk.transport.ucx_reader import BATCH_BYTES, MOVES_AT_ONCE
from emberkv_proto.errors import DeadlineError, EmberError, FrameError, UnavailableError
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import MayRead
from store_daemon.transport.tcp_server import ServeLimits

log = logging.getLogger(__name__)

FORGET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Introduced:
    """The other side of a connection, and which of our agents knows its agent by which name."""

    other: Introduction
    agent: AgentProcess
    name: bytes


class AgentServer(ABC):
    """Implements `tcp_server.OtherProtocol`: introduces agents, then answers their requests.

    `magic` opens the hellos. An agent that is to be replaced ends its connections.
    """

    magic: bytes
    agent_seconds = 1.0
    """How long an introduction waits for an agent that is being replaced."""

    def __init__(
        self,
        pool_bytes: int,
        incarnation: Incarnation,
        agents: AgentPool,
        limits: ServeLimits,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool_bytes = pool_bytes
        self._incarnation = incarnation
        self._agents = agents
        self._limits = limits
        self._clock = clock
        self._met = itertools.count()

    def serve(self, connection: TimedSocket, hello: bytes, may_read: MayRead) -> None:
        """As `OtherProtocol.serve`."""
        is_ours = Hello.unpack(hello, self.magic).incarnation == self._incarnation
        status = Status.OK if is_ours else Status.STALE_INCARNATION
        connection.send(Hello(status, self._incarnation).pack(self.magic))
        if not is_ours:
            return
        other = Introduction.receive(connection)
        with self._introduced(connection, other) as met:
            while met.agent.is_usable and connection.wait_readable(self._limits.idle_seconds):
                connection.set_deadline(self._limits.answer_seconds)
                self._answer(connection, met, may_read)

    @abstractmethod
    def _answer(self, connection: TimedSocket, met: Introduced, may_read: MayRead) -> None:
        """Receive one request and do it. Raises EmberError to end the connection."""

    @contextmanager
    def _introduced(self, connection: TimedSocket, other: Introduction) -> Iterator[Introduced]:
        try:
            agent = self._agents.await_one(next(self._met), self.agent_seconds)
            name = agent.introduce(other.facts.metadata, self.agent_seconds)
        except EmberError:
            connection.send(AnswerHeader(Status.BUSY, 0).pack())
            raise
        try:
            connection.send(
                AnswerHeader(Status.OK, 0).pack()
                + Introduction(self._pool_bytes, agent.facts).pack()
            )
            yield Introduced(other, agent, name)
        finally:
            with suppress(EmberError):  # it goes, and its memory of the name with it
                agent.forget(name, FORGET_SECONDS)

    def _receive_request(self, connection: TimedSocket, met: Introduced) -> MoveRequest:
        try:
            return MoveRequest.receive(connection, self._pool_bytes, met.other.pool_bytes)
        except FrameError:
            connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
            raise


class PushServer(AgentServer):
    """Writes into readers' memory.

    A lease is checked for all ranges before the first byte, for each batch right before it goes
    out, and once more after the last: so it held throughout. A reader that takes nothing for the
    progress time is dropped, and the agent that serves it is replaced once others have no more use
    of it.
    """

    magic = UCX_MAGIC
    pushed_bytes = 0
    refused_reads = 0

    def _answer(self, connection: TimedSocket, met: Introduced, may_read: MayRead) -> None:
        request = self._receive_request(connection, met)
        if request.action is Action.PLACE:
            connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
            raise FrameError("a PLACE among reads")
        if not _may_read_all(may_read, request.lease_id, request.segments):
            self.refused_reads += 1
            connection.send(AnswerHeader(Status.REFUSED, 0).pack())
            return
        if request.action is Action.CHECK:
            connection.send(AnswerHeader(Status.OK, request.total_bytes).pack())
            return
        if not faults.hit(faults.PEER_SERVE):
            raise UnavailableError("fault peer_serve")
        try:
            self._push(connection, met, request, may_read)
        except EmberError:
            with suppress(EmberError):  # it may have been the reader that went
                connection.send(AnswerHeader(Status.FAILED, 0).pack())
            raise

    def _push(
        self,
        connection: TimedSocket,
        met: Introduced,
        request: MoveRequest,
        may_read: MayRead,
    ) -> None:
        reader, agent = met.other, met.agent
        waiting = deque(batches(request.segments, BATCH_BYTES))
        posted: deque[int] = deque()
        arrived = 0
        with agent.lane(self._limits.progress_seconds) as lane:
            try:
                while waiting or posted:
                    while waiting and len(posted) < MOVES_AT_ONCE:
                        batch = waiting.popleft()
                        if not _may_read_all(may_read, request.lease_id, batch):
                            self.refused_reads += 1
                            raise UnavailableError(f"lease {request.lease_id} ended in mid-push")
                        ranges = [
                            Range(
                                agent.facts.base + s.remote_offset,
                                reader.facts.base + s.local_offset,
                                s.length,
                            )
                            for s in batch
                        ]
                        move = Move(Direction.WRITE, met.name, ranges, reader.place)
                        lane.post(move, self._limits.answer_seconds)
                        posted.append(sum(s.length for s in batch))
                    lane.reply()
                    arrived += posted.popleft()
                    if arrived == request.total_bytes and not _may_read_all(
                        may_read, request.lease_id, request.segments
                    ):
                        self.refused_reads += 1
                        raise UnavailableError(f"lease {request.lease_id} ended in mid-push")
                    connection.send(AnswerHeader(Status.OK, arrived).pack())
            except EmberError:
                _drain(lane)
                raise
        self.pushed_bytes += arrived


def _drain(lane: Lane) -> None:
    """What is left unanswered spoils the lane, and retires its agent."""
    with suppress(DeadlineError, UnavailableError):
        lane.drain()


def _may_read_all(may_read: MayRead, lease_id: int, segments: Sequence[Segment]) -> bool:
    return all(may_read(lease_id, s.remote_offset, s.length) for s in segments)
