"""Reads over two-sided messages: both agents post what the other has posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from client_sdk.transport.base import Segment, TransportAddress
from client_sdk.transport.connections import Greet
from client_sdk.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from client_sdk.transport.lane import Direction, Move, Range
from client_sdk.transport.timed_socket import TimedSocket
from client_sdk.transport.ucx_frames import Action, batches, pack_move_request
from client_sdk.transport.ucx_link import meet
from client_sdk.transport.ucx_peer import UcxLink
from client_sdk.transport.ucx_reader import BATCH_BYTES, MOVES_AT_ONCE, UcxReader
from emberkv_proto.errors import FrameError, UnavailableError


class UcpReader(UcxReader):
    """As UcxReader; the owner always sends, and our agent receives what was asked for."""

    def _greeter(self, address: TransportAddress, number: int) -> Greet[UcxLink]:
        def greet(connection: TimedSocket) -> UcxLink:
            return meet(connection, address, self.magic, self.agents, number, self.terms)

        return greet

    def read(
        self, link: UcxLink, lease_id: int, segments: Sequence[Segment], deadline: float
    ) -> None:
        """As `UcxReader.read`."""
        # A refusal after receives are posted would cost the agent: ask first.
        self._check_lease(link, lease_id, segments)
        total = sum(segment.length for segment in segments)
        waiting = deque(batches(segments, BATCH_BYTES))
        base, where = link.agent.facts.base, link.sock
        with (
            link.agent.lane(deadline - self.clock()) as lane,
            self._quarantine(link, total),
        ):
            arrived = 0
            is_asked = False
            while arrived < total:
                while waiting and lane.unanswered < MOVES_AT_ONCE:
                    ranges = [
                        Range(base + s.local_offset, base + s.local_offset, s.length)
                        for s in waiting.popleft()
                    ]
                    lane.post(Move(Direction.READ, b"", ranges), deadline - self.clock())
                if not is_asked:
                    where.send(pack_move_request(lease_id, Action.PUSH, segments))
                    is_asked = True
                answer = AnswerHeader.unpack(where.receive(ANSWER_BYTES))
                if answer.status is not Status.OK:
                    raise UnavailableError(f"the owner's push ended: {answer.status.name}")
                if not arrived < answer.payload_bytes <= total:
                    raise FrameError(f"owner says {answer.payload_bytes} bytes of {total} came")
                arrived = answer.payload_bytes
                lane.reply()
        self.counters.add("pushed_bytes", total)
