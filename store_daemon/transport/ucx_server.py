"""The owner's half of the UCX transport: checks leases, and pushes where readers cannot read."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

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

AGENT_SECONDS = 1.0
"""How long an introduction waits for an agent that is being replaced."""


class PushServer:
    """Implements `tcp_server.OtherProtocol` with UCX agents that write into readers' pools.

    A lease is checked for all ranges before the first byte, and for each batch right before it
    goes out. A reader that takes nothing for the progress time is dropped, and the agent that
    serves it is replaced once others have no more use of it.
    """

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
        self.pushed_bytes = 0
        self.refused_reads = 0

    def serve(self, connection: TimedSocket, hello: bytes, may_read: MayRead) -> None:
        """As `OtherProtocol.serve`."""
        is_ours = Hello.unpack(hello, UCX_MAGIC).incarnation == self._incarnation
        status = Status.OK if is_ours else Status.STALE_INCARNATION
        connection.send(Hello(status, self._incarnation).pack(UCX_MAGIC))
        if not is_ours:
            return
        reader = Introduction.receive(connection)
        with self._introduced(connection, reader) as (agent, name):
            while agent.is_usable and connection.wait_readable(self._limits.idle_seconds):
                connection.set_deadline(self._limits.answer_seconds)
                self._answer(connection, reader, agent, name, may_read)

    @contextmanager
    def _introduced(
        self, connection: TimedSocket, reader: Introduction
    ) -> Iterator[tuple[AgentProcess, bytes]]:
        try:
            agent = self._agents.await_one(0, AGENT_SECONDS)
            name = agent.introduce(reader.facts.metadata, AGENT_SECONDS)
        except EmberError:
            connection.send(AnswerHeader(Status.BUSY, 0).pack())
            raise
        try:
            connection.send(
                AnswerHeader(Status.OK, 0).pack()
                + Introduction(self._pool_bytes, agent.facts).pack()
            )
            yield agent, name
        finally:
            with suppress(EmberError):  # it goes, and its memory of the name with it
                agent.forget(name, AGENT_SECONDS)

    def _answer(
        self,
        connection: TimedSocket,
        reader: Introduction,
        agent: AgentProcess,
        name: bytes,
        may_read: MayRead,
    ) -> None:
        try:
            request = MoveRequest.receive(connection, self._pool_bytes, reader.pool_bytes)
        except FrameError:
            connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
            raise
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
            self._push(connection, reader, agent, name, request, may_read)
        except EmberError:
            with suppress(EmberError):  # it may have been the reader that went
                connection.send(AnswerHeader(Status.FAILED, 0).pack())
            raise

    def _push(
        self,
        connection: TimedSocket,
        reader: Introduction,
        agent: AgentProcess,
        name: bytes,
        request: MoveRequest,
        may_read: MayRead,
    ) -> None:
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
                        move = Move(Direction.WRITE, name, ranges)
                        lane.post(move, self._limits.answer_seconds)
                        posted.append(sum(s.length for s in batch))
                    lane.reply()
                    arrived += posted.popleft()
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
