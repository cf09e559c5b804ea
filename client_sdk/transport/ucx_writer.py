"""Writes from memory of ours into staged slots of a daemon's pool on another host, over UCX."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from client_sdk import faults
from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.base import Segment, TransportAddress
from client_sdk.transport.connections import PeerConnections, ReadLimits
from client_sdk.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from client_sdk.transport.lane import Direction, Move, Range
from client_sdk.transport.timed_socket import Clock, TimedSocket
from client_sdk.transport.ucx_frames import (
    PUT_MAGIC,
    Action,
    batches,
    pack_move_request,
)
from client_sdk.transport.ucx_link import LinkTerms, meet
from client_sdk.transport.ucx_peer import UcxLink
from emberkv_proto.errors import EmberError, FrameError, UnavailableError, UnknownStageError


@dataclass(frozen=True, slots=True)
class UcxWriter:
    """Belongs to one local memory, which all of `agents` have registered."""

    terms: LinkTerms
    agents: AgentPool
    limits: ReadLimits
    clock: Clock
    batch_bytes: int
    moves_at_once: int

    def links(self, address: TransportAddress, number: int) -> PeerConnections[UcxLink]:
        """To one daemon. `number` spreads daemons over agents."""

        def greet(connection: TimedSocket) -> UcxLink:
            link = meet(connection, address, PUT_MAGIC, self.agents, number, self.terms)
            link.know_owner(self.limits.connect_seconds)
            return link

        return PeerConnections(address, self.limits, self.clock, greet)

    def write(
        self, link: UcxLink, stage_id: int, segments: Sequence[Segment], deadline: float
    ) -> None:
        """Fill the daemon's ranges by `deadline`, or raise with their content undefined.

        After an error the daemon guards its slots by itself; our memory was only read.

        Raises:
            UnknownStageError: the stage may not write there, or not any more.
            DeadlineError, UnavailableError, FrameError: as `Transport.read`.
        """
        name = link.owner_name
        assert name is not None, "a writer's link knows the owner"
        total = sum(segment.length for segment in segments)
        where, agent = link.sock, link.agent
        placed = agent.placed(segments)
        waiting, posted, arrived = deque(batches(placed, self.batch_bytes)), deque[int](), 0
        with agent.lane(deadline - self.clock()) as lane:
            where.send(pack_move_request(stage_id, Action.PLACE, placed))
            answer = AnswerHeader.unpack(where.receive(ANSWER_BYTES))
            if answer.status is Status.REFUSED:
                raise UnknownStageError(f"the daemon refused a write into stage {stage_id}")
            if answer.status is not Status.OK:
                raise FrameError(f"the daemon answered {answer.status.name} to a write")
            try:
                while waiting or posted:
                    while waiting and len(posted) < self.moves_at_once:
                        faults.hit(faults.PEER_WRITE)
                        batch = waiting.popleft()
                        ranges = [
                            Range(
                                agent.facts.base + s.local_offset,
                                link.owner.facts.base + s.remote_offset,
                                s.length,
                            )
                            for s in batch
                        ]
                        move = Move(Direction.WRITE, name, ranges, link.owner.place)
                        lane.post(move, deadline - self.clock())
                        posted.append(sum(s.length for s in batch))
                    lane.reply()
                    arrived += posted.popleft()
                    where.send(AnswerHeader(Status.OK, arrived).pack())
            except EmberError:
                # What is under way ends with the daemon's agent or with ours.
                link.destroy_agent()
                raise
        answer = AnswerHeader.unpack(where.receive(ANSWER_BYTES))
        if answer.status is not Status.OK or answer.payload_bytes != total:
            raise UnavailableError(f"the daemon took {answer} of a write of {total} bytes")
