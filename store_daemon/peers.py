"""Brings blocks from other nodes into the pool: ask the index, lease, read, verify, land."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from client_sdk.index_client import IndexedNode
from client_sdk.tls import Tls
from emberkv_proto.errors import (
    CorruptionError,
    DeadlineError,
    EmberError,
    InvalidRequestError,
    LeaseExpiredError,
    PoolFullError,
    StaleIncarnationError,
    UnavailableError,
)
from emberkv_proto.hashing import index_keys
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, NamespaceId, NodeHit, NodeId
from store_daemon.failed_fetches import FailedFetches
from store_daemon.peer_client import PeerClient
from store_daemon.peer_health import HealthLimits, PeerHealth
from store_daemon.peer_transfer import PeerTransfers, TransferLimits
from store_daemon.ports import PullTarget
from store_daemon.transport.base import Peer, Transport, TransportAddress

log = logging.getLogger(__name__)


class IndexQueries(Protocol):
    """What a puller asks of the global index (`client_sdk.index_client.IndexClient`)."""

    async def query(
        self, keys: npt.NDArray[np.uint64], *, timeout_seconds: float | None = None
    ) -> list[NodeHit]: ...

    async def nodes(self, *, timeout_seconds: float | None = None) -> list[IndexedNode]: ...


@dataclass(frozen=True, slots=True)
class PullLimits:
    index_seconds: float = 0.1
    nodes_seconds: float = 1.0
    """How long the nodes' addresses are believed."""
    acquire_seconds: float = 2.0
    release_seconds: float = 1.0
    lease_margin_seconds: float = 2.0
    blame_seconds: float = 0.1
    """A peer that let a shorter deadline pass is not held to have failed."""
    blocks_per_pull: int = 4096
    failed_block_seconds: float = 2.0
    """A peer that did not give a block is not asked for it again: its event is on the way."""
    failed_peer_seconds: float = 1.0
    """One that could not be reached is not asked for anything; then its breaker decides."""


@dataclass(slots=True)
class PullCounters:
    pulls: int = 0
    """Pulls that went to a peer."""
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    unheld: int = 0
    """Pulls for which no peer that may be asked holds the first block."""
    failures: Counter[str] = field(default_factory=Counter)
    """By reason; see `failure_reason`, and too_slow, no_room, stale_index and index."""


@dataclass(slots=True)
class _Pull:
    """One pull in progress, for those that want the same first block."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    landed: list[BlockHash] = field(default_factory=list)


class PeerPuller:
    """Implements `ports.Puller`. Belongs to one event loop; blocking reads run in its threads.

    Slots are given back only after the thread that writes into them has ended, whatever happened.
    """

    def __init__(
        self,
        node_id: NodeId,
        pool: memoryview,
        index: IndexQueries,
        transport: Transport,
        *,
        limits: PullLimits | None = None,
        transfer_limits: TransferLimits | None = None,
        health_limits: HealthLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        self._node_id = node_id
        self._index = index
        self._transport = transport
        self._limits = limits or PullLimits()
        self._health_limits = health_limits or HealthLimits()
        self._clock = clock
        self._client = PeerClient(node_id, tls)
        self._transfers = PeerTransfers(pool, transport, transfer_limits, clock)
        self._health: dict[NodeId, PeerHealth] = {}
        self._peers: dict[NodeId, Peer] = {}
        self._failed = FailedFetches(
            self._limits.failed_block_seconds, self._limits.failed_peer_seconds
        )
        self._addresses: dict[NodeId, str] = {}
        self._addresses_until = float("-inf")
        self._pulls: dict[tuple[NamespaceId, BlockHash], _Pull] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.counters = PullCounters()

    async def pull(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        """As `ports.Puller.pull`. Blocks that another pull landed meanwhile are counted too."""
        deadline = self._clock() + deadline_seconds
        landed = 0
        while landed < len(hashes) and self._clock() < deadline and not self._is_closed:
            wanted = hashes[landed:]
            name = (namespace.id, wanted[0])
            other = self._pulls.get(name)
            if other is None:
                mine = self._pulls[name] = _Pull()
                try:
                    before = hashes[landed - 1] if landed else parent
                    await self._pull_alone(namespace, before, wanted, target, deadline, mine)
                finally:
                    del self._pulls[name]
                    mine.done.set()
                return landed + len(mine.landed)
            try:
                await asyncio.wait_for(other.done.wait(), deadline - self._clock())
            except asyncio.TimeoutError:
                break
            landed += _common_prefix(other.landed, wanted)
        return landed

    async def close(self) -> None:
        """Fail pulls in progress, wait for them and their threads, drop all connections."""
        self._is_closed = True
        self._transfers.cancel()
        for pull in list(self._pulls.values()):
            await pull.done.wait()
        if self._releases:
            await asyncio.wait(self._releases)
        await self._client.close()
        for peer in self._peers.values():
            self._transport.close(peer)
        self._peers.clear()
        self._transfers.close()

    def check_integrity(self) -> None:
        """Assert that breakers are sound and that transfers belong to pulls in progress."""
        for health in self._health.values():
            health.check_integrity()
        self._failed.check_integrity()
        assert self._transfers.running <= len(self._pulls)
        assert not any(pull.done.is_set() for pull in self._pulls.values())
        assert not (self._is_closed and (self._pulls or self._peers))

    async def _pull_alone(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline: float,
        mine: _Pull,
    ) -> None:
        try:
            hit = await self._choose(hashes, deadline)
        except EmberError as error:
            self._count_failure("index", error)
            return
        if hit is None:
            self.counters.unheld += 1
            return
        wanted = hashes[: min(hit.hit_blocks, self._limits.blocks_per_pull)]
        health = self._health_of(hit.node_id)
        started = self._clock()
        block_bytes = sum(namespace.part_bytes(part) for part in range(namespace.parts))
        if health.estimate_seconds(len(wanted) * block_bytes, started) > deadline - started:
            self._count_failure("too_slow")
            return
        self.counters.pulls += 1
        health.begin(started)
        try:
            await self._pull_from(hit.node_id, namespace, parent, wanted, target, deadline, mine)
            health.succeed()
        except EmberError as error:
            waited = self._clock() - started
            self._count_failure(failure_reason(error), error, hit.node_id)
            if not mine.landed:
                self._failed.lacks(hit.node_id, hashes[0], self._clock())
            if is_blamed(error, bool(mine.landed), waited, self._limits.blame_seconds):
                health.fail(self._clock())
                if isinstance(error, UnavailableError | DeadlineError):
                    self._failed.is_away(hit.node_id, self._clock())
            elif mine.landed:
                health.succeed()
        finally:
            health.abandon()  # cancelled, or an error that says nothing of the peer
            landed_bytes = len(mine.landed) * block_bytes
            self.counters.pulled_blocks += len(mine.landed)
            self.counters.pulled_bytes += landed_bytes
            if mine.landed:
                now = self._clock()
                health.measured(landed_bytes, now - started, now)

    async def _choose(self, hashes: Sequence[BlockHash], deadline: float) -> NodeHit | None:
        """The best peer to ask, by the index's word. Raises EmberError when the index is away."""
        asked = hashes[: self._limits.blocks_per_pull]
        hits = await self._index.query(
            index_keys(asked), timeout_seconds=self._index_seconds(deadline)
        )
        if not any(hit.hit_blocks and hit.node_id != self._node_id for hit in hits):
            return None
        now = self._clock()
        if now >= self._addresses_until:
            nodes = await self._index.nodes(timeout_seconds=self._index_seconds(deadline))
            self._addresses = {
                node.node_id: node.grpc_address
                for node in nodes
                if node.state == "ok" and node.grpc_address and node.node_id != self._node_id
            }
            self._addresses_until = now + self._limits.nodes_seconds
            await self._client.retain(set(self._addresses.values()))
        now = self._clock()
        healthy = {
            node_id
            for node_id in self._addresses
            if self._health_of(node_id).may_try(now)
            and self._failed.may_ask(node_id, hashes[0], now)
        }
        return best_hit(hits, healthy)

    async def _pull_from(
        self,
        node_id: NodeId,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline: float,
        mine: _Pull,
    ) -> None:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineError("no time left to ask a peer")
        address = self._addresses[node_id]
        remote = await self._client.acquire(
            address,
            namespace,
            hashes,
            min(left + self._limits.lease_margin_seconds, 60.0),
            min(left, self._limits.acquire_seconds),
        )
        try:
            usable = remote.grant.usable_blocks
            if usable == 0:
                self._count_failure("stale_index")
                self._failed.lacks(node_id, hashes[0], self._clock())
                return
            peer = self._connected(node_id, remote.source)
            try:
                room = target.allot(namespace, parent, hashes[:usable], remote.grant.salt_ids)
            except PoolFullError as error:
                self._count_failure("no_room", error)
                return
            try:
                await self._transfers.run(peer, remote, room, hashes, deadline, mine.landed)
            finally:
                room.close()
        finally:
            if remote.grant.lease_id:
                self._release_later(address, remote.grant.lease_id)

    def _connected(self, node_id: NodeId, source: TransportAddress) -> Peer:
        peer = self._peers.get(node_id)
        if peer is not None and peer.address == source:
            return peer
        if peer is not None:
            self._transport.close(self._peers.pop(node_id))  # an earlier life of it
        peer = self._peers[node_id] = self._transport.connect(source)
        return peer

    def _release_later(self, address: str, lease_id: int) -> None:
        """End the lease without making the pull wait for the answer."""
        task = asyncio.create_task(self._release(address, lease_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, address: str, lease_id: int) -> None:
        try:
            await self._client.release(address, lease_id, self._limits.release_seconds)
        except EmberError as error:
            self._count_failure("release", error)  # its clock ends it

    def _health_of(self, node_id: NodeId) -> PeerHealth:
        health = self._health.get(node_id)
        if health is None:
            health = self._health[node_id] = PeerHealth(self._health_limits)
        return health

    def _index_seconds(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineError("no time left to ask the index")
        return min(self._limits.index_seconds, left)

    def _count_failure(
        self, reason: str, error: EmberError | None = None, node_id: NodeId | None = None
    ) -> None:
        self.counters.failures[reason] += 1
        log.info("pull from %s: %s: %s", node_id or "a peer", reason, error or "gave up")


def best_hit(hits: Sequence[NodeHit], askable: set[NodeId]) -> NodeHit | None:
    """The longest hit of a node that may be asked; of equals, the one with most in DRAM."""
    usable = [hit for hit in hits if hit.hit_blocks and hit.node_id in askable]
    return max(usable, key=lambda hit: (hit.hit_blocks, hit.dram_blocks), default=None)


_REASONS: Mapping[type[EmberError], str] = {
    DeadlineError: "deadline",
    LeaseExpiredError: "lease",
    StaleIncarnationError: "incarnation",
    CorruptionError: "checksum",
    UnavailableError: "unavailable",
    InvalidRequestError: "protocol",
}


def failure_reason(error: EmberError) -> str:
    """The counter of an error; "refused" is a peer that answered with an error of its own."""
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), "refused")


def is_blamed(
    error: EmberError, has_landed: bool, waited_seconds: float, blame_seconds: float
) -> bool:
    """Whether the breaker counts this. A tight deadline that passed is no failure of the peer."""
    if isinstance(error, DeadlineError):
        return not has_landed and waited_seconds >= blame_seconds
    return isinstance(error, UnavailableError | InvalidRequestError | CorruptionError)


def _common_prefix(landed: Sequence[BlockHash], wanted: Sequence[BlockHash]) -> int:
    count = 0
    for one, other in zip(landed, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
