"""What moves blocks' bytes between pools of different nodes, whatever the wire.

A transport reads scattered ranges of a peer's pool straight into the local pool. Calls block and
belong in worker threads. The one promise every transport keeps: once `read` has returned or
raised, nothing writes into its local ranges any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from client_sdk.transport.base import Cancellation, Peer, Segment, TransportAddress
from store_daemon.ports import PoolRange


class Write(Protocol):
    """A write of another host's into our pool, under way."""

    def end(self) -> None:
        """No byte of it can arrive any more. From any thread, once."""
        ...


BeginWrite = Callable[[int, Sequence[PoolRange], Callable[[], None]], Write | None]
"""(stage id, ranges, abort) -> None when that stage may not write there. Any thread calls it."""
MayRead = Callable[[int, int, int], bool]
"""(lease id, offset, length) -> whether a peer may read these bytes now. Any thread calls it."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A lease that was given, and what of it is sent at once."""

    answer: bytes
    lease_id: int
    first: Sequence[PoolRange]
    give_back: Callable[[], None]
    """End the lease: who asked has gone without the answer. From any thread."""


Lend = Callable[[bytes, int], Lent]
"""(request, first blocks) -> what is lent. Any thread calls it, and waits. Raises EmberError."""


class FirstBytes(Protocol):
    """What comes behind a lease's answer. Either take it or abandon it, in every case."""

    @property
    def byte_count(self) -> int: ...

    def take(
        self, segments: Sequence[Segment], deadline_seconds: float, cancellation: Cancellation
    ) -> Sequence[int]:
        """Fill the local ranges, of `byte_count` bytes in all. As `Transport.read`."""
        ...

    def abandon(self) -> None:
        """They die with their connection. Quick; no more than once taken."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseReply:
    answer: bytes
    first: FirstBytes | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, for those who choose one and for `doctor`."""

    one_sided: bool
    gpu_direct: bool
    needs_target_cpu: bool
    cancel_safe: bool
    """A cancelled read's ranges may be reused at once (else they need quarantine)."""


@dataclass(frozen=True, slots=True)
class TransportReport:
    """What a transport uses and has done, for metrics and operators."""

    name: str
    lanes: tuple[str, ...]
    """What it goes over, as "rc_mlx5/mlx5_0:1"."""
    has_rdma: bool
    counts: Mapping[str, int]
    """Since the start, by the name of what was counted."""
    quarantined_bytes: int
    """Now: ranges of failed reads that may still be written into."""


class Transport(Protocol):
    """Reads of remote pools, and service of the own pool to such reads."""

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """Known once a region is registered."""
        ...

    def register(self, region: memoryview) -> None:
        """Name the local pool, once, before anything else. Writable bytes; held until shutdown."""
        ...

    def serve(self, may_read: MayRead, lend: Lend | None = None) -> TransportAddress:
        """Let peers read the registered region wherever `may_read` agrees.

        With `lend`, they may ask for leases at the same address.
        """
        ...

    def connect(self, address: TransportAddress) -> Peer:
        """A handle for reads from that pool. Opens nothing yet, so it cannot fail for the peer."""
        ...

    def read(
        self,
        peer: Peer,
        lease_id: int,
        segments: Sequence[Segment],
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> Sequence[int] | None:
        """Fill all local ranges, or raise with their content undefined.

        Returns the checksum of each segment (`hashing.checksum`), where the bytes passed through
        this process and it cost least to look at them then; None where they did not.

        Raises:
            DeadlineError: over the deadline, or no byte came for the transport's progress time.
            LeaseExpiredError: the owner refused a range.
            StaleIncarnationError: another life of the owner answered.
            FrameError: the answer is not of this protocol.
            InvalidRequestError: a range is outside the local region, or there are too many.
            UnavailableError: the peer is away, or (ReadCancelledError) the read was cancelled.
        """
        ...

    def ask_lease(
        self,
        peer: Peer,
        request: bytes,
        first_blocks: int,
        deadline_seconds: float,
        cancellation: Cancellation,
    ) -> LeaseReply:
        """Ask an owner that lends at its transport's address. Blocks.

        The first blocks' bytes come behind, where this transport has them come that way.

        Raises as `read`; UnavailableError also when the owner does not lend so, whyever: gRPC says.
        BusyHereError when reads leave it no connection.
        """
        ...

    def is_busy(self, peer: Peer) -> bool:
        """Whether `ask_lease` would have to wait for reads to end."""
        ...

    def close(self, peer: Peer) -> None:
        """Drop a peer; reads in flight from it fail."""
        ...

    def report(self) -> TransportReport:
        """From any thread, at any time."""
        ...

    def shutdown(self) -> None:
        """Stop serving and reading, join all threads, let go of the region."""
        ...
