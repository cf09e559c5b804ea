"""Reads of an owner's memory into ours over UCX, whoever's memory ours is.

Bytes that are under way cannot be called back. So a read that fails in the middle kills the local
agent that took part and waits for its end before it raises: its ranges are in quarantine so long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import AgentLostError, RemoteLostError
from client_sdk.transport.base import Segment, TransportAddress
from client_sdk.transport.connections import Greet, PeerConnections, ReadLimits
from client_sdk.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from client_sdk.transport.lane import Direction, Move, Range
from client_sdk.transport.timed_socket import Clock, TimedSocket
from client_sdk.transport.ucx_frames import (
    UCX_MAGIC,
    Action,
    batches,
    pack_move_request,
)
from client_sdk.transport.ucx_link import LinkTerms, meet
from client_sdk.transport.ucx_peer import Quarantine, UcxCounters, UcxLink
from emberkv_proto.errors import (
    EmberError,
    FrameError,
    LeaseExpiredError,
    UnavailableError,
)

BATCH_BYTES = 4 << 20
"""Of one move; its end is what counts as progress."""
MOVES_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class UcxReader:
    """Belongs to one local memory, which all of `agents` have registered."""

    terms: LinkTerms
    agents: AgentPool
    limits: ReadLimits
    clock: Clock
    counters: UcxCounters
    magic: bytes = UCX_MAGIC

    def links(self, address: TransportAddress, number: int) -> PeerConnections[UcxLink]:
        """To one owner. `number` spreads peers over agents."""
        return PeerConnections(address, self.limits, self.clock, self._greeter(address, number))

    def read(
        self, link: UcxLink, lease_id: int, segments: Sequence[Segment], deadline: float
    ) -> None:
        """Fill the local ranges by `deadline`, whichever side moves the bytes.

        Raises AgentLostError when another read's failure took the agent: begin again; otherwise as
        `Transport.read`.
        """
        segments = link.agent.placed(segments)
        if link.owner_name is None:
            self._await_push(link, lease_id, segments)
        else:
            self._fetch(link, link.owner_name, lease_id, segments, deadline)

    def _greeter(self, address: TransportAddress, number: int) -> Greet[UcxLink]:
        def greet(connection: TimedSocket) -> UcxLink:
            link = meet(connection, address, self.magic, self.agents, number, self.terms)
            if link.is_one_sided:
                link.know_owner(self.limits.connect_seconds)
            return link

        return greet

    def _await_push(self, link: UcxLink, lease_id: int, segments: Sequence[Segment]) -> None:
        """Let the owner write. Once it may have begun, an error puts the ranges in quarantine."""
        total = sum(segment.length for segment in segments)
        where = link.sock
        with self._quarantine(link, total):
            where.send(pack_move_request(lease_id, Action.PUSH, segments))
            answer = AnswerHeader.unpack(where.receive(ANSWER_BYTES))
            arrived = 0
            while answer.status is Status.OK:
                if not arrived < answer.payload_bytes <= total:
                    raise FrameError(f"owner says {answer.payload_bytes} bytes of {total} came")
                arrived = answer.payload_bytes
                if arrived == total:
                    break
                answer = AnswerHeader.unpack(where.receive(ANSWER_BYTES))
            if answer.status is Status.FAILED:
                raise UnavailableError("the owner's push failed")
            if arrived and answer.status is not Status.OK:
                raise FrameError(f"owner answered {answer.status.name} in mid-push")
        self._accept(answer, lease_id)
        self.counters.add("pushed_bytes", total)

    def _fetch(
        self,
        link: UcxLink,
        owner_name: bytes,
        lease_id: int,
        segments: Sequence[Segment],
        deadline: float,
    ) -> None:
        """Read the owner's memory. The lease held before and after, so it held throughout."""
        total = sum(segment.length for segment in segments)
        self._check_lease(link, lease_id, segments)
        waiting = deque(batches(segments, BATCH_BYTES))
        with (
            link.agent.lane(deadline - self.clock()) as lane,
            self._quarantine(link, total) as quarantine,
        ):
            try:
                while waiting or lane.unanswered:
                    while waiting and lane.unanswered < MOVES_AT_ONCE:
                        ranges = [
                            Range(
                                link.agent.facts.base + s.local_offset,
                                link.owner.facts.base + s.remote_offset,
                                s.length,
                            )
                            for s in waiting.popleft()
                        ]
                        move = Move(Direction.READ, owner_name, ranges)
                        lane.post(move, deadline - self.clock())
                    lane.reply()
            except RemoteLostError:
                lane.drain()
                quarantine.lift()  # UCX has ended every move: none is under way
                raise
        try:
            self._check_lease(link, lease_id, segments)
        except LeaseExpiredError as error:
            raise UnavailableError(f"the lease ended while it was read: {error}") from None
        self.counters.add("one_sided_bytes", total)

    def _check_lease(self, link: UcxLink, lease_id: int, segments: Sequence[Segment]) -> None:
        link.sock.send(pack_move_request(lease_id, Action.CHECK, segments))
        self._accept(AnswerHeader.unpack(link.sock.receive(ANSWER_BYTES)), lease_id)

    @staticmethod
    def _accept(answer: AnswerHeader, lease_id: int) -> None:
        if answer.status is Status.REFUSED:
            raise LeaseExpiredError(f"the owner refused a read under lease {lease_id}")
        if answer.status is not Status.OK:
            raise FrameError(f"the owner answered {answer.status.name}")

    @contextmanager
    def _quarantine(self, link: UcxLink, total: int) -> Iterator[Quarantine]:
        """Let no error out before the link's agent, and with it what is under way, has ended."""
        quarantine = Quarantine()
        try:
            yield quarantine
        except BaseException as error:
            if quarantine.is_lifted:
                raise
            self.counters.add("quarantines", 1)
            self.counters.add("quarantined_bytes", total)
            is_ours = link.destroy_agent()
            link.agent.await_end()
            self.counters.add("quarantined_bytes", -total)
            if is_ours or not isinstance(error, EmberError):
                raise
            raise AgentLostError(f"its UCX agent was destroyed: {error}") from None
