"""The owner's half of writes by engines on other hosts: who may, and who guards what they write."""

from __future__ import annotations

from client_sdk import faults
from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from client_sdk.transport.timed_socket import Clock, TimedSocket
from client_sdk.transport.ucx_frames import PUT_MAGIC, Action, MoveRequest
from client_sdk.transport.ucx_peer import UcxCounters
from emberkv_proto.errors import FrameError, UnavailableError
from emberkv_proto.types import Incarnation
from store_daemon.ports import PoolRange
from store_daemon.transport.base import BeginWrite, MayRead
from store_daemon.transport.tcp_server import ServeLimits
from store_daemon.transport.ucx_server import AgentServer, Introduced


class PlaceServer(AgentServer):
    """Lets engines' agents write into staged slots.

    The slots stay taken until the writer says that all bytes have arrived. When that does not come,
    for its death, its silence or the end of its stage, our agent, through which the bytes come, is
    killed and waited for first. Other engines' writes over that agent fail with it.
    """

    magic = PUT_MAGIC
    agent_seconds = 5.0  # a writer has no other way to go meanwhile

    def __init__(
        self,
        pool_bytes: int,
        incarnation: Incarnation,
        agents: AgentPool,
        limits: ServeLimits,
        begin: BeginWrite,
        clock: Clock,
    ) -> None:
        super().__init__(pool_bytes, incarnation, agents, limits, clock)
        self._begin = begin
        self.counters = UcxCounters()

    def _answer(self, connection: TimedSocket, met: Introduced, may_read: MayRead) -> None:
        request = self._receive_request(connection, met)
        if request.action is not Action.PLACE:
            connection.send(AnswerHeader(Status.MALFORMED, 0).pack())
            raise FrameError(f"{request.action.name} among writes")
        ranges = [PoolRange(s.remote_offset, s.length) for s in request.segments]
        write = self._begin(request.lease_id, ranges, connection.abort)
        if write is None:
            self.counters.add("refused_writes", 1)
            connection.send(AnswerHeader(Status.REFUSED, 0).pack())
            return
        try:
            self._await_bytes(connection, request)
        except BaseException:
            self.counters.add("quarantines", 1)
            self.counters.add("quarantined_bytes", request.total_bytes)
            met.agent.destroy()
            self._agents.poke()
            met.agent.await_end()
            self.counters.add("quarantined_bytes", -request.total_bytes)
            raise
        finally:
            write.end()
        self.counters.add("placed_bytes", request.total_bytes)
        connection.send(AnswerHeader(Status.OK, request.total_bytes).pack())

    @staticmethod
    def _await_bytes(connection: TimedSocket, request: MoveRequest) -> None:
        if not faults.hit(faults.PEER_SERVE):
            raise UnavailableError("fault peer_serve")
        connection.send(AnswerHeader(Status.OK, 0).pack())
        arrived, total = 0, request.total_bytes
        while arrived < total:
            told = AnswerHeader.unpack(connection.receive(ANSWER_BYTES))
            if told.status is not Status.OK or not arrived < told.payload_bytes <= total:
                raise FrameError(f"a writer says {told} after {arrived} of {total} bytes")
            arrived = told.payload_bytes
