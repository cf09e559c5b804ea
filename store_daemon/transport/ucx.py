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
from collections.abc import Sequence

from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import UCX_AGENT, AgentLostError, AgentProcess
from client_sdk.transport.base import (
    Cancellation,
    Peer,
    Segment,
    TransportAddress,
)
from client_sdk.transport.connections import (
    ReadLimits,
)
from client_sdk.transport.memory import HOST, HostMemory
from client_sdk.transport.timed_socket import Clock
from client_sdk.transport.ucx_frames import PUT_MAGIC, UCX_MAGIC
from client_sdk.transport.ucx_link import LinkTerms, OwnerBusyError
from client_sdk.transport.ucx_peer import UcxCounters, UcxPeer
from client_sdk.transport.ucx_reader import UcxReader
from client_sdk.transport.ucx_settings import Rdma, UcxSettings, one_sided
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    InvalidRequestError,
    PreflightError,
    UnavailableError,
)
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import (
    BeginWrite,
    Capabilities,
    LeaseReply,
    Lend,
    MayRead,
    TransportReport,
)
from store_daemon.transport.ranges import checked_total
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.tcp_server import OtherProtocol, ServeLimits
from store_daemon.transport.ucx_place_server import PlaceServer
from store_daemon.transport.ucx_server import PushServer

log = logging.getLogger(__name__)

START_SECONDS = 40.0


class UcxTransport:
    """Implements `transport.base.Transport`. Its owners answer plain TCP reads as well.

    Without `rdma: required` it reads plainly from peers that have no UCX, and from all while its
    agents are being replaced.
    """

    name = "ucx"
    magic = UCX_MAGIC
    program = UCX_AGENT
    reader_class: type[UcxReader] = UcxReader
    server_class: type[PushServer] = PushServer

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
        begin: BeginWrite | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pool_descriptor` is of the file that the region maps whole; held until shutdown.

        With `begin` and `settings.taking_agents`, engines on other hosts may write where it agrees.
        """
        self._begin = begin
        self._taking: AgentPool | None = None
        self._place_server: PlaceServer | None = None
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
        self._reader: UcxReader | None = None
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
        return sum(pool.replaced for pool in self._agent_pools)

    @property
    def _agent_pools(self) -> list[AgentPool]:
        return [p for p in (self._reading, self._serving, self._taking) if p is not None]

    def register(self, region: memoryview) -> None:
        """As `Transport.register`. Raises PreflightError when UCX is not as the settings say."""
        self._tcp.register(region)
        self._pool_bytes = region.nbytes
        self._reading = self._agents("reader", self._settings.reading_agents)
        self._reader = self.reader_class(
            LinkTerms(self._settings, HOST),
            self._reading,
            self._read_limits,
            self._clock,
            self.counters,
            self.magic,
        )
        agent = _first(self._reading)
        self.transports = agent.facts.transports
        self._settings.check(self.transports)
        has_rdma = bool(one_sided(self.transports, self._settings.one_sided))
        say = log.info if has_rdma or self._settings.rdma is Rdma.OFF else log.warning
        say(
            "%s transport: %s over %s",
            self.name,
            "RDMA" if has_rdma else "no RDMA; owners push",
            " ".join(self.transports),
        )

    def serve(self, may_read: MayRead, lend: Lend | None = None) -> TransportAddress:
        self._serving = self._agents("owner", self._settings.serving_agents)
        self._push_server = self._others[self.magic] = self.server_class(
            self._pool_bytes, self._incarnation, self._serving, self._serve_limits, self._clock
        )
        _first(self._serving)  # one after the other: UCX starts slowly beside another start
        if self._begin is not None and self._settings.taking_agents:
            self._taking = self._agents("taker", self._settings.taking_agents)
            self._place_server = self._others[PUT_MAGIC] = PlaceServer(
                self._pool_bytes,
                self._incarnation,
                self._taking,
                self._serve_limits,
                self._begin,
                self._clock,
            )
            _first(self._taking)
        plain = self._tcp.serve(may_read, lend)
        return TransportAddress(self.name, plain.address, plain.incarnation)

    def connect(self, address: TransportAddress) -> Peer:
        if address.transport != self.name:
            if self._settings.rdma is Rdma.REQUIRED:
                raise InvalidRequestError(
                    f"peer {address.address} offers only {address.transport}, this node"
                    f" {self.name}, and transport.rdma is required"
                )
            return self._tcp.connect(address)
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the transport is shut down")
            self._connected += 1
            number = self._connected
            links = self._need_reader().links(address, number)
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
    ) -> Sequence[int] | None:
        if not isinstance(peer, UcxPeer):
            return self._read_plainly(peer, lease_id, segments, deadline_seconds, cancellation)
        if self._is_shut_down:
            raise UnavailableError("the transport is shut down")
        checked_total(segments, self._pool_bytes)
        reader = self._need_reader()
        deadline = self._clock() + deadline_seconds
        while True:
            cancellation.check()
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineError(f"no answer of {peer.address.address} in {deadline_seconds} s")
            if reader.agents.take(peer.number) is None:
                if self._settings.rdma is not Rdma.REQUIRED:
                    return self._read_plainly(peer.plain, lease_id, segments, left, cancellation)
                reader.agents.await_one(peer.number, left)
                left = deadline - self._clock()
            try:
                with peer.links.connection(left, cancellation) as link:
                    reader.read(link, lease_id, segments, deadline)
            except AgentLostError:
                self.counters.add("restarted_reads", 1)
            except OwnerBusyError:
                if self._settings.rdma is Rdma.REQUIRED:
                    raise
                left = deadline - self._clock()
                return self._read_plainly(peer.plain, lease_id, segments, left, cancellation)
            else:
                return None

    def ask_lease(
        self,
        peer: Peer,
        request: bytes,
        first_blocks: int,
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> LeaseReply:
        """As `Transport.ask_lease`. Bytes come with it only from an owner without UCX."""
        if isinstance(peer, UcxPeer):
            return self._tcp.ask_lease(peer.plain, request, 0, deadline_seconds, cancellation)
        return self._tcp.ask_lease(peer, request, first_blocks, deadline_seconds, cancellation)

    def is_busy(self, peer: Peer) -> bool:
        return self._tcp.is_busy(peer.plain if isinstance(peer, UcxPeer) else peer)

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
        takes = self._place_server
        counts = {
            "served_bytes": plain["served_bytes"] + (pushes.pushed_bytes if pushes else 0),
            "refused_reads": plain["refused_reads"] + (pushes.refused_reads if pushes else 0),
            "one_sided_bytes": ours.one_sided_bytes,
            "pushed_bytes": ours.pushed_bytes,
            "plain_bytes": ours.plain_bytes,
            "restarted_reads": ours.restarted_reads,
            "quarantines": ours.quarantines + (takes.counters.quarantines if takes else 0),
            "placed_bytes": takes.counters.placed_bytes if takes else 0,
            "refused_writes": takes.counters.refused_writes if takes else 0,
            "replaced_agents": self.replaced_agents,
        }
        return TransportReport(
            self.name,
            self.transports,
            bool(one_sided(self.transports, self._settings.one_sided)),
            counts,
            ours.quarantined_bytes + (takes.counters.quarantined_bytes if takes else 0),
        )

    def shutdown(self) -> None:
        with self._lock:
            self._is_shut_down = True
            peers, self._peers = self._peers, set()
        for peer in peers:
            peer.links.close()
        for pool in self._agent_pools:
            pool.close()
        self._tcp.shutdown()

    def check_integrity(self) -> None:
        """Assert what the parts assert of themselves, and that no quarantine outlives its read."""
        self._tcp.check_integrity()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.links.check_integrity()
        for pool in self._agent_pools:
            pool.check_integrity()
        assert self.counters.quarantined_bytes >= 0

    # ---- inner steps ----

    def _agents(self, purpose: str, size: int) -> AgentPool:
        life = secrets.token_hex(8)  # names are known to peers, so no two may be alike

        def make(number: int) -> AgentProcess:
            return AgentProcess(
                f"emberkv-{purpose}-{life}-{number}",
                (HostMemory(self._pool_descriptor, self._pool_bytes),),
                self._settings.lanes,
                self._settings.environment(),
                self._read_limits.progress_seconds,
                self._clock,
                self.program,
            )

        return AgentPool(make, size, self._clock)

    def _need_reader(self) -> UcxReader:
        if self._reader is None:
            raise UnavailableError("no region is registered")
        return self._reader

    def _read_plainly(
        self,
        peer: Peer,
        lease_id: int,
        segments: Sequence[Segment],
        seconds: float,
        cancellation: Cancellation,
    ) -> Sequence[int] | None:
        sums = self._tcp.read(peer, lease_id, segments, seconds, cancellation)
        self.counters.add("plain_bytes", sum(segment.length for segment in segments))
        return sums


def _first(agents: AgentPool) -> AgentProcess:
    """The first agent that can work. Raises PreflightError when the first cannot."""
    try:
        return agents.await_first(START_SECONDS)
    except EmberError as error:
        raise PreflightError(f"UCX cannot work here: {error}") from None
