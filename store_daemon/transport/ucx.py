"""UCX transport: NIXL agents in processes of their own move blocks from pool to pool.

Where both sides have RDMA, the reader reads the owner's memory by itself, between two checks of the
lease. Elsewhere the owner writes into the reader's pool: UCX only imitates a READ over TCP, three
times as slowly, and an owner whose reader goes away in the middle of one is aborted by UCX.

Bytes that are under way cannot be called back. So a read that fails in the middle kills the local
agent that took part and waits for its end before it raises: its slots are in quarantine until then.
Other reads that used this agent begin again on another.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    FrameError,
    InvalidRequestError,
    LeaseExpiredError,
    PreflightError,
    UnavailableError,
)
from emberkv_proto.types import Incarnation
from store_daemon.transport.agent_pool import AgentPool
from store_daemon.transport.agent_process import AgentLostError, AgentProcess, RemoteLostError
from store_daemon.transport.base import (
    Cancellation,
    Capabilities,
    MayRead,
    Peer,
    Segment,
    TransportAddress,
    TransportReport,
)
from store_daemon.transport.connections import (
    Greet,
    PeerConnections,
    ReadLimits,
    exchange_hellos,
)
from store_daemon.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from store_daemon.transport.lane import Direction, Move, Range
from store_daemon.transport.tcp import TcpTransport, checked_total
from store_daemon.transport.tcp_server import OtherProtocol, ServeLimits
from store_daemon.transport.timed_socket import Clock, TimedSocket
from store_daemon.transport.ucx_frames import (
    UCX_MAGIC,
    Action,
    Introduction,
    batches,
    pack_move_request,
)
from store_daemon.transport.ucx_peer import Quarantine, UcxCounters, UcxLink, UcxPeer
from store_daemon.transport.ucx_server import BATCH_BYTES, MOVES_AT_ONCE, PushServer
from store_daemon.transport.ucx_settings import Rdma, UcxSettings, can_read_by_itself, one_sided

log = logging.getLogger(__name__)

START_SECONDS = 40.0


class OwnerBusyError(UnavailableError):
    """The owner's agents are being replaced."""


class UcxTransport:
    """Implements `transport.base.Transport`. Its owners answer plain TCP reads as well.

    Without `rdma: required` it reads plainly from peers that have no UCX, and from all while its
    agents are being replaced.
    """

    name = "ucx"

    def __init__(
        self,
        incarnation: Incarnation,
        pool_descriptor: int,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised_host: str = "",
        settings: UcxSettings | None = None,
        read_limits: ReadLimits | None = None,
        serve_limits: ServeLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pool_descriptor` is of the file that the region maps whole; held until shutdown."""
        self._incarnation = incarnation
        self._pool_descriptor = pool_descriptor
        self._settings = settings or UcxSettings()
        self._read_limits = read_limits or ReadLimits()
        self._serve_limits = serve_limits or ServeLimits()
        self._clock = clock
        self._others: dict[bytes, OtherProtocol] = {}
        self._tcp = TcpTransport(
            incarnation,
            host,
            port,
            advertised_host=advertised_host,
            read_limits=read_limits,
            serve_limits=serve_limits,
            clock=clock,
            others=self._others,
        )
        self._reading: AgentPool | None = None
        self._serving: AgentPool | None = None
        self._lock = threading.Lock()
        self._peers: set[UcxPeer] = set()
        self._connected = 0
        self._is_shut_down = False
        self._pool_bytes = 0
        self.transports: tuple[str, ...] = ()
        """UCX's, as "rc_mlx5/mlx5_0:1"; known once registered."""
        self.counters = UcxCounters()
        self._push_server: PushServer | None = None

    @property
    def capabilities(self) -> Capabilities:
        has_rdma = bool(one_sided(self.transports, self._settings.one_sided))
        return Capabilities(
            one_sided=has_rdma,
            gpu_direct=has_rdma,
            needs_target_cpu=not has_rdma,
            cancel_safe=False,
        )

    @property
    def replaced_agents(self) -> int:
        return sum(pool.replaced for pool in (self._reading, self._serving) if pool is not None)

    def register(self, region: memoryview) -> None:
        """As `Transport.register`. Raises PreflightError when UCX is not as the settings say."""
        self._tcp.register(region)
        self._pool_bytes = region.nbytes
        self._reading = self._agents("reader", self._settings.reading_agents)
        agent = _first(self._reading)
        self.transports = agent.facts.transports
        self._settings.check(self.transports)
        has_rdma = self.capabilities.one_sided
        say = log.info if has_rdma or self._settings.rdma is Rdma.OFF else log.warning
        say(
            "ucx transport: %s over %s",
            "RDMA" if has_rdma else "no RDMA; owners push",
            " ".join(self.transports),
        )

    def serve(self, may_read: MayRead) -> TransportAddress:
        self._serving = self._agents("owner", self._settings.serving_agents)
        self._push_server = self._others[UCX_MAGIC] = PushServer(
            self._pool_bytes, self._incarnation, self._serving, self._serve_limits, self._clock
        )
        _first(self._serving)
        plain = self._tcp.serve(may_read)
        return TransportAddress(self.name, plain.address, plain.incarnation)

    def connect(self, address: TransportAddress) -> Peer:
        if address.transport == "tcp":
            if self._settings.rdma is Rdma.REQUIRED:
                raise InvalidRequestError(
                    f"peer {address.address} offers only tcp, and transport.rdma is required"
                )
            return self._tcp.connect(address)
        if address.transport != self.name:
            raise InvalidRequestError(f"peer offers transport {address.transport!r}, not ucx")
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the transport is shut down")
            self._connected += 1
            number = self._connected
            links = PeerConnections(
                address, self._read_limits, self._clock, self._greeter(address, number)
            )
            peer = UcxPeer(address, number, links, self._tcp.connect(address))
            self._peers.add(peer)
        return peer

    def read(
        self,
        peer: Peer,
        lease_id: int,
        segments: Sequence[Segment],
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> None:
        if not isinstance(peer, UcxPeer):
            self._read_plainly(peer, lease_id, segments, deadline_seconds, cancellation)
            return
        if self._is_shut_down:
            raise UnavailableError("the transport is shut down")
        checked_total(segments, self._pool_bytes)
        deadline = self._clock() + deadline_seconds
        while True:
            cancellation.check()
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineError(f"no answer of {peer.address.address} in {deadline_seconds} s")
            if self._need_reading().take(peer.number) is None:
                if self._settings.rdma is not Rdma.REQUIRED:
                    self._read_plainly(peer.plain, lease_id, segments, left, cancellation)
                    return
                self._need_reading().await_one(peer.number, left)
                left = deadline - self._clock()
            try:
                with peer.links.connection(left, cancellation) as link:
                    if link.owner_name is None:
                        self._await_push(link, lease_id, segments)
                    else:
                        self._fetch(link, link.owner_name, lease_id, segments, deadline)
            except AgentLostError:
                self.counters.add("restarted_reads", 1)
            except OwnerBusyError:
                if self._settings.rdma is Rdma.REQUIRED:
                    raise
                left = deadline - self._clock()
                self._read_plainly(peer.plain, lease_id, segments, left, cancellation)
                return
            else:
                return

    def close(self, peer: Peer) -> None:
        if not isinstance(peer, UcxPeer):
            self._tcp.close(peer)
            return
        with self._lock:
            self._peers.discard(peer)
        peer.links.close()
        self._tcp.close(peer.plain)

    def report(self) -> TransportReport:
        plain, ours, pushes = self._tcp.report().counts, self.counters, self._push_server
        counts = {
            "served_bytes": plain["served_bytes"] + (pushes.pushed_bytes if pushes else 0),
            "refused_reads": plain["refused_reads"] + (pushes.refused_reads if pushes else 0),
            "one_sided_bytes": ours.one_sided_bytes,
            "pushed_bytes": ours.pushed_bytes,
            "plain_bytes": ours.plain_bytes,
            "restarted_reads": ours.restarted_reads,
            "quarantines": ours.quarantines,
            "replaced_agents": self.replaced_agents,
        }
        return TransportReport(
            self.name,
            self.transports,
            self.capabilities.one_sided,
            counts,
            ours.quarantined_bytes,
        )

    def shutdown(self) -> None:
        with self._lock:
            self._is_shut_down = True
            peers, self._peers = self._peers, set()
        for peer in peers:
            peer.links.close()
        for pool in (self._reading, self._serving):
            if pool is not None:
                pool.close()
        self._tcp.shutdown()

    def check_integrity(self) -> None:
        """Assert what the parts assert of themselves, and that no quarantine outlives its read."""
        self._tcp.check_integrity()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.links.check_integrity()
        for pool in (self._reading, self._serving):
            if pool is not None:
                pool.check_integrity()
        assert self.counters.quarantined_bytes >= 0

    # ---- inner steps ----

    def _agents(self, purpose: str, size: int) -> AgentPool:
        life = secrets.token_hex(8)  # names are known to peers, so no two may be alike

        def make(number: int) -> AgentProcess:
            return AgentProcess(
                f"emberkv-{purpose}-{life}-{number}",
                self._pool_descriptor,
                self._settings.lanes,
                self._settings.environment(),
                self._read_limits.progress_seconds,
                self._clock,
            )

        return AgentPool(make, size, self._clock)

    def _need_reading(self) -> AgentPool:
        if self._reading is None:
            raise UnavailableError("no region is registered")
        return self._reading

    def _read_plainly(
        self,
        peer: Peer,
        lease_id: int,
        segments: Sequence[Segment],
        seconds: float,
        cancellation: Cancellation,
    ) -> None:
        self._tcp.read(peer, lease_id, segments, seconds, cancellation)
        self.counters.add("plain_bytes", sum(segment.length for segment in segments))

    def _greeter(self, address: TransportAddress, number: int) -> Greet[UcxLink]:
        def greet(connection: TimedSocket) -> UcxLink:
            agents = self._need_reading()
            agent = agents.take(number)
            if agent is None:
                raise AgentLostError("every UCX agent is being replaced")
            exchange_hellos(connection, address, UCX_MAGIC)
            connection.send(Introduction(self._pool_bytes, agent.facts).pack())
            answer = AnswerHeader.unpack(connection.receive(ANSWER_BYTES))
            if answer.status is not Status.OK:
                raise OwnerBusyError(f"{address.address} has no UCX agent free")
            owner = Introduction.receive(connection)
            name: bytes | None = None
            if can_read_by_itself(
                self.transports, owner.facts.transports, self._settings.one_sided
            ):
                name = agent.introduce(owner.facts.metadata, self._read_limits.connect_seconds)
            elif self._settings.rdma is Rdma.REQUIRED:
                raise InvalidRequestError(
                    f"{address.address} has no RDMA in common with this node, only"
                    f" {' '.join(owner.facts.transports)}, and transport.rdma is required"
                )
            return UcxLink(connection, agent, agents, owner, name)

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
            link.agent.lane(deadline - self._clock()) as lane,
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
                        lane.post(move, deadline - self._clock())
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


def _first(agents: AgentPool) -> AgentProcess:
    """The first agent that can work. Raises PreflightError when the first cannot."""
    try:
        return agents.await_first(START_SECONDS)
    except EmberError as error:
        raise PreflightError(f"UCX cannot work here: {error}") from None
