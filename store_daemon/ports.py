"""What the parts of the daemon ask of each other, so that each can be built and tested alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from emberkv_proto.events import Event, Keys
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, NamespaceId, NodeId, SaltId, Tier, TierDigest


@dataclass(frozen=True, slots=True)
class PoolRange:
    """A part's bytes in a pool file: payload only, 4 KiB aligned offset."""

    offset: int
    length: int


class EventSink(Protocol):
    """Where the catalog's changes go. Called on the daemon's event loop, in order."""

    def emit(self, event: Event) -> None: ...


class Residency(Protocol):
    """The catalog's truth, asked for snapshots and digests. Called on the event loop.

    What it answers is the state right after the last event: events that wait to be told, as those
    of a run that lands do, are told first.
    """

    def resident_keys(self, tier: Tier) -> Keys: ...

    def scan_keys(self, tier: Tier) -> Iterator[Keys]:
        """As `resident_keys`, a few at a time, each as of when it is yielded.

        Blocks may come and go between two: one that came since the first may be left out.
        """
        ...

    def digests(self) -> tuple[TierDigest, ...]: ...


@dataclass(frozen=True, slots=True)
class PeerGrant:
    """A lease given to another daemon: its blocks' parts, block by block, all in DRAM."""

    lease_id: int
    usable_blocks: int
    parts: int
    ranges: tuple[PoolRange, ...]
    checksums: tuple[int, ...]
    salt_ids: tuple[SaltId | None, ...] = ()
    """Per usable block, whose quota it counts against."""


class PeerStore(Protocol):
    """What the servers for peers ask of the store. `may_read` is called from any thread."""

    async def peer_acquire(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        lease_seconds: float,
        requester: str,
        wait_seconds: float = 0.0,
        ready_only: bool = False,
    ) -> PeerGrant:
        """Lease the leading blocks; wait so long for the first one if it is not here.

        With `ready_only` those that are in DRAM, now.
        """
        ...

    def peer_release(self, lease_id: int) -> None: ...

    def may_read(self, lease_id: int, offset: int, length: int) -> bool:
        """Whether [offset, offset+length) lies within one part of a live peer lease."""
        ...


class PullTarget(Protocol):
    """Room for blocks that come from a peer. Called on the event loop."""

    def allot(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        salt_ids: Sequence[SaltId | None] = (),
    ) -> PullRoom:
        """`salt_ids` says of each block whose quota it counts against; without, nobody's."""
        ...


class PullRoom(Protocol):
    """Staged slots for a run of blocks; whatever was not landed when it closes is aborted.

    Closing while a transfer still writes into the slots is forbidden: the puller joins it first.
    """

    ranges: Sequence[Sequence[PoolRange]]
    """Per block that got room (a prefix of those asked for), one range per part."""

    def land(self, block: int, checksums: Sequence[int]) -> None:
        """Block number `block` is complete and its checksums hold: commit it as RESIDENT."""
        ...

    def publish(self) -> None:
        """Announce what has landed. Once for many blocks costs little more than for one."""
        ...

    def close(self) -> None:
        """Give back what has not landed; announce the rest."""
        ...


@dataclass(frozen=True, slots=True)
class Followed:
    """A node on which a chain is being computed, and how long its next block is waited for."""

    node_id: NodeId
    patience_seconds: float


class Hinted(Protocol):
    """A chain that is being brought into DRAM for a router. Used on the event loop."""

    scheduled_blocks: int

    @property
    def is_done(self) -> bool: ...

    def readable_blocks(self) -> int: ...

    async def ended(self, timeout_seconds: float) -> None: ...

    def cancel(self) -> None: ...


class HintStore(Protocol):
    """What the server for routers asks of the store."""

    def hint(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        followed: Followed | None,
    ) -> Hinted:
        """Begin to bring a chain. Raises DrainingError, UnknownNamespaceError."""
        ...


class Puller(Protocol):
    """Brings blocks from other nodes into the pool."""

    async def pull(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        """Land as many leading blocks of `hashes` as peers hold; return how many.

        Never raises for a dead, slow or lying peer: that is 0 (or a shorter run) and a counter.
        """
        ...

    async def follow(
        self,
        followed: Followed,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        """As `pull`, from one node that gets the blocks only now; its patience ends it too."""
        ...
