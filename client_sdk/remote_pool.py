"""An engine's own memory, and the pool of a daemon on another host: bytes between the two.

The memory, on the host or on a GPU, is registered once with UCX agents, which are processes of
their own as a daemon's are: UCX may end the process it lives in, and that must not be the engine.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import AgentLostError, AgentProcess
from client_sdk.transport.base import Cancellation, Segment, TransportAddress
from client_sdk.transport.connections import PeerConnections, ReadLimits
from client_sdk.transport.frames import MAX_READ_BYTES, MAX_SEGMENTS
from client_sdk.transport.memory import Memory, check_memory
from client_sdk.transport.timed_socket import Clock
from client_sdk.transport.ucx_link import LinkTerms
from client_sdk.transport.ucx_peer import UcxCounters, UcxLink
from client_sdk.transport.ucx_reader import BATCH_BYTES, MOVES_AT_ONCE, UcxReader
from client_sdk.transport.ucx_settings import UcxSettings
from client_sdk.transport.ucx_writer import UcxWriter
from emberkv_proto.errors import DeadlineError, InvalidRequestError, UnavailableError

START_SECONDS = 40.0


class RemotePool:
    """Reads leased ranges and writes staged ones. Any thread may call; each call blocks.

    Once `read` has returned or raised, nothing writes into the memory any more. After a failed
    `write` it is the daemon that guards the slots concerned. A dead or stopped daemon is an error
    within the limits' progress time.
    """

    def __init__(
        self,
        memory: Sequence[Memory],
        settings: UcxSettings | None = None,
        limits: ReadLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Starts the agents; the memory's descriptors and allocations are held until `close`.

        Raises:
            InvalidRequestError: no memory, or on different devices.
            PreflightError: UCX is not as the settings say.
            UnavailableError, DeadlineError: why no agent can work.
        """
        self.memory = tuple(memory)
        place = check_memory(self.memory)
        self._settings = settings or UcxSettings()
        self._limits = limits or ReadLimits()
        self._clock = clock
        self.counters = UcxCounters()
        life = secrets.token_hex(8)  # names are known to daemons, so no two may be alike

        def make(number: int) -> AgentProcess:
            return AgentProcess(
                f"emberkv-engine-{life}-{number}",
                self.memory,
                self._settings.lanes,
                self._settings.environment(),
                self._limits.progress_seconds,
                clock,
            )

        self._agents = AgentPool(make, self._settings.reading_agents, clock)
        try:
            first = self._agents.await_first(START_SECONDS)
            self._settings.check(first.facts.transports)
        except BaseException:
            self._agents.close()
            raise
        terms = LinkTerms(self._settings, place)
        self._reader = UcxReader(terms, self._agents, self._limits, clock, self.counters)
        self._writer = UcxWriter(
            terms, self._agents, self._limits, clock, BATCH_BYTES, MOVES_AT_ONCE
        )
        self._lock = threading.Lock()
        self._links: dict[TransportAddress, _Links] = {}
        self._is_closed = False

    def read(
        self,
        daemon: TransportAddress,
        lease_id: int,
        segments: Sequence[Segment],
        seconds: float,
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fill the local ranges from leased slots, or raise with their content undefined.

        Raises:
            InvalidRequestError: a range outside the memory, or too many.
            LeaseExpiredError: the daemon refused: the lease is over, or never covered the ranges.
            StaleIncarnationError: another life of the daemon answered.
            DeadlineError, UnavailableError, FrameError: the daemon is slow, away or not ours.
        """
        self._check(segments)
        reader = self._reader
        self._attempt(
            self._links_to(daemon).reading,
            lambda link, deadline: reader.read(link, lease_id, segments, deadline),
            seconds,
            cancellation,
        )

    def write(
        self,
        daemon: TransportAddress,
        stage_id: int,
        segments: Sequence[Segment],
        seconds: float,
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fill staged slots (remote) from the local ranges. Commit only after it has returned.

        Raises UnknownStageError when the stage is over or does not cover the ranges; as `read`.
        """
        self._check(segments)
        writer = self._writer
        self._attempt(
            self._links_to(daemon).writing,
            lambda link, deadline: writer.write(link, stage_id, segments, deadline),
            seconds,
            cancellation,
        )
        self.counters.add("placed_bytes", sum(segment.length for segment in segments))

    def close(self) -> None:
        """End calls in flight and the agents. Idempotent."""
        with self._lock:
            self._is_closed = True
            links, self._links = list(self._links.values()), {}
        for pair in links:
            pair.close()
        self._agents.close()

    def check_integrity(self) -> None:
        self._agents.check_integrity()
        with self._lock:
            assert not (self._is_closed and self._links), "closed with links"
            links = list(self._links.values())
        for pair in links:
            pair.reading.check_integrity()
            pair.writing.check_integrity()

    def _attempt(
        self,
        links: PeerConnections[UcxLink],
        move: Callable[[UcxLink, float], None],
        seconds: float,
        cancellation: Cancellation | None,
    ) -> None:
        """Again on another agent while it is not this call that loses them."""
        deadline = self._clock() + seconds
        while True:
            left = deadline - self._clock()
            if left <= 0:
                raise DeadlineError(f"no answer of {links.address.address} in {seconds} s")
            if self._is_closed:
                raise UnavailableError("the remote pool is closed")
            if self._agents.take(0) is None:
                self._agents.await_one(0, left)
            try:
                with links.connection(left, cancellation or Cancellation()) as link:
                    move(link, deadline)
            except AgentLostError:
                self.counters.add("restarted_reads", 1)
            else:
                return

    def _links_to(self, daemon: TransportAddress) -> _Links:
        if daemon.transport != "ucx":
            raise InvalidRequestError(f"the daemon offers transport {daemon.transport!r}, not ucx")
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the remote pool is closed")
            links = self._links.get(daemon)
            if links is None:
                for gone in [a for a in self._links if a.address == daemon.address]:
                    self._links.pop(gone).close()  # an earlier life of the daemon
                number = len(self._links)
                links = self._links[daemon] = _Links(
                    self._reader.links(daemon, number), self._writer.links(daemon, number)
                )
            return links

    def _check(self, segments: Sequence[Segment]) -> None:
        if not 1 <= len(segments) <= MAX_SEGMENTS:
            raise InvalidRequestError(f"{len(segments)} ranges in a call; wanted 1..{MAX_SEGMENTS}")
        if sum(segment.length for segment in segments) > MAX_READ_BYTES:
            raise InvalidRequestError(f"a call moves at most {MAX_READ_BYTES} bytes")
        for segment in segments:
            if min(segment.local_offset, segment.remote_offset) < 0 or segment.length < 1:
                raise InvalidRequestError(f"{segment} has a negative offset or no length")
            if not self._lies_within(segment):
                raise InvalidRequestError(f"{segment} is outside the memory, or crosses regions")

    def _lies_within(self, segment: Segment) -> bool:
        start = 0
        for region in self.memory:
            if segment.local_offset < start + region.length:
                return segment.local_offset + segment.length <= start + region.length
            start += region.length
        return False


class _Links:
    """To one life of one daemon."""

    def __init__(
        self, reading: PeerConnections[UcxLink], writing: PeerConnections[UcxLink]
    ) -> None:
        self.reading = reading
        self.writing = writing

    def close(self) -> None:
        self.reading.close()
        self.writing.close()
