"""Brings blocks from other nodes into the pool: ask the index, lease, read, verify, land.

A run is planned owner by owner (`pull_plan`): what one owner has is brought in windows, then the
index is asked who has the rest. An owner that failed is not asked again within the same pull.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from client_sdk.index_client import IndexedNode
from client_sdk.tls import Tls
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    PoolFullError,
    UnavailableError,
)
from emberkv_proto.hashing import index_keys
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, Incarnation, NodeHit, NodeId
from store_daemon.failed_fetches import FailedFetches
from store_daemon.leases_ahead import LeasesAhead
from store_daemon.peer_client import PeerClient, RemoteGrant
from store_daemon.peer_connections import PeerConnections
from store_daemon.peer_health import HealthLimits, PeerHealth
from store_daemon.peer_transfer import PeerTransfers, TransferLimits
from store_daemon.ports import Followed, PullTarget
from store_daemon.pull_failures import failure_reason, is_blamed
from store_daemon.pull_plan import Owner, PullCosts, choose_owner
from store_daemon.shared_pulls import SharedPull, SharedPulls
from store_daemon.transport.base import Transport

log = logging.getLogger(__name__)
FOLLOW_AGAIN_SECONDS = 0.4
LONGEST_LEASE_SECONDS = 60.0


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
    lease_seconds: float = 10.0
    """For one window, unless it is expected to take a good part of that: so long a node that died
    while it pulled keeps blocks of the owner's from eviction."""
    lease_times_expected: float = 5.0
    blame_seconds: float = 0.1
    """A peer that let a shorter deadline pass is not held to have failed."""
    blocks_per_pull: int = 4096
    lease_bytes: int = 64 << 20
    """What one lease is for, between the next two numbers of blocks: the owner brings so much from
    its drive before the first byte travels, and then the next as much meanwhile."""
    least_lease_blocks: int = 8
    most_lease_blocks: int = 256
    longest_wait_seconds: float = 0.5
    """For the next block of a node that is followed; then it is asked again."""
    owners_per_pull: int = 8
    """After so many owners a pull is over."""
    costs: PullCosts = field(default_factory=PullCosts)
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
    shared_blocks: int = 0
    """Blocks that were wanted while another pull was bringing them."""
    followed_blocks: int = 0
    """Of the pulled ones, those that came from a node while it computed them."""
    from_peer: Counter[NodeId] = field(default_factory=Counter)
    """Pulled bytes by owner."""
    failures: Counter[str] = field(default_factory=Counter)
    """By reason; see `failure_reason`, and too_slow, no_room, stale_index and index."""


@dataclass(slots=True, eq=False)
class _Run:
    """One pull: what it is for, and what it learns."""

    namespace: Namespace
    target: PullTarget
    deadline: float
    excluded: set[NodeId] = field(default_factory=set)
    """Owners that have given what they will."""
    has_room: bool = True
    was_refused: bool = False
    """The owner that was asked last has none of the blocks."""

    @property
    def block_bytes(self) -> int:
        return sum(self.namespace.part_bytes(part) for part in range(self.namespace.parts))


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is asked of one owner."""

    node_id: NodeId
    blocks: int
    longest: int
    """What the owner of the longest run has; nobody is known to go on behind it."""


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
        self._limits = limits or PullLimits()
        self._health_limits = health_limits or HealthLimits()
        self._clock = clock
        self._client = PeerClient(node_id, tls)
        self._transfers = PeerTransfers(pool, transport, transfer_limits, clock)
        self._health: dict[NodeId, PeerHealth] = {}
        self._lives: dict[NodeId, Incarnation] = {}
        self._connections = PeerConnections(transport)
        self._failed = FailedFetches(
            self._limits.failed_block_seconds, self._limits.failed_peer_seconds
        )
        self._addresses: dict[NodeId, str] = {}
        self._addresses_until = float("-inf")
        self._shared = SharedPulls()
        self._pulls: set[asyncio.Event] = set()
        """Set when the pull is over."""
        self._asked_bytes: Counter[NodeId] = Counter()
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
        run = _Run(namespace, target, self._clock() + deadline_seconds)
        with self._running():
            return await self._pull(run, parent, hashes)

    async def follow(
        self,
        followed: Followed,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        """As `ports.Puller.follow`. The index is not asked: the blocks come as they are made."""
        run = _Run(namespace, target, self._clock() + deadline_seconds)
        with self._running():
            landed, is_whole = 0, True
            while is_whole:
                landed = await self._landed_by_others(run, hashes, landed)
                wanted = hashes[landed : landed + self._limits.blocks_per_pull]
                if not wanted or not self._may_go_on(run):
                    break
                before = hashes[landed - 1] if landed else parent
                mine = self._shared.begin(namespace.id, wanted)
                try:
                    await self._follow(run, followed, before, wanted, mine)
                    is_whole = len(mine.landed) == mine.expected
                finally:
                    mine.end()
                self.counters.followed_blocks += len(mine.landed)
                landed += len(mine.landed)
            return landed

    async def close(self) -> None:
        """Fail pulls in progress, wait for them and their threads, drop all connections."""
        self._is_closed = True
        self._transfers.cancel()
        for over in list(self._pulls):
            await over.wait()
        if self._releases:
            await asyncio.wait(self._releases)
        await self._client.close()
        self._connections.close()
        self._transfers.close()

    def check_integrity(self) -> None:
        """Assert that breakers are sound and that transfers belong to pulls in progress."""
        for health in self._health.values():
            health.check_integrity()
        self._failed.check_integrity()
        self._shared.check_integrity()
        assert self._transfers.running <= len(self._pulls)
        assert self._pulls or not len(self._shared), "blocks in flight without a pull"
        assert self._pulls or not +self._asked_bytes, "bytes are asked for without a pull"
        assert not (self._is_closed and (self._pulls or len(self._connections)))

    @contextmanager
    def _running(self) -> Iterator[None]:
        over = asyncio.Event()
        self._pulls.add(over)
        try:
            yield
        finally:
            self._pulls.discard(over)
            over.set()

    async def _pull(self, run: _Run, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> int:
        landed, owners = 0, 0
        while True:
            landed = await self._landed_by_others(run, hashes, landed)
            if landed == len(hashes) or not (self._may_go_on(run) and run.has_room):
                break
            if owners == self._limits.owners_per_pull:
                break
            owners += 1
            before = hashes[landed - 1] if landed else parent
            wanted = hashes[landed : landed + self._limits.blocks_per_pull]
            mine = self._shared.begin(run.namespace.id, wanted)
            try:
                was_asked = await self._pull_alone(run, before, wanted, mine, landed == 0)
            finally:
                mine.end()
            landed += len(mine.landed)
            if not was_asked:
                break
        return landed

    async def _landed_by_others(self, run: _Run, hashes: Sequence[BlockHash], landed: int) -> int:
        """How many leading blocks are here when the pulls that bring the next ones have ended."""
        other: SharedPull | None = None
        while landed < len(hashes) and self._may_go_on(run):
            if other is not None and other.has_landed(hashes[landed]):
                self.counters.shared_blocks += 1
                landed += 1
                continue
            other = self._shared.bringing(run.namespace.id, hashes[landed])
            if other is None:
                break
            await other.moved(run.deadline - self._clock())
        return landed

    def _may_go_on(self, run: _Run) -> bool:
        return self._clock() < run.deadline and not self._is_closed

    async def _pull_alone(
        self,
        run: _Run,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        mine: SharedPull,
        is_first: bool,
    ) -> bool:
        """Bring what one owner has of the run; False when there is none to ask."""
        try:
            plan = await self._choose(run, hashes)
        except EmberError as error:
            self._count_failure("index", error)
            return False
        if plan is None:
            self.counters.unheld += is_first and not run.excluded
            return False
        now = self._clock()
        speed = self._health_of(plan.node_id).bytes_per_second(now)
        in_time = int((run.deadline - now) * speed / run.block_bytes)
        if not in_time:
            self._count_failure("too_slow")
            return False
        mine.keep(min(plan.blocks, in_time))
        wanted = hashes[: mine.expected]
        with self._asking(plan.node_id, run, mine, len(wanted)):
            await self._pull_from(run, plan.node_id, parent, wanted, mine)
        if run.was_refused and not mine.landed:
            self._count_failure("stale_index", node_id=plan.node_id)
            self._failed.lacks(plan.node_id, hashes[0], self._clock())
        return len(mine.landed) < plan.longest or plan.longest == len(hashes)

    async def _follow(
        self,
        run: _Run,
        followed: Followed,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        mine: SharedPull,
    ) -> None:
        node_id, now = followed.node_id, self._clock()
        try:
            await self._refresh_addresses(run.deadline)
            if node_id not in self._addresses:  # it may have come back since
                self._addresses_until = now
                await self._refresh_addresses(run.deadline)
        except EmberError as error:
            self._count_failure("index", error)
            return
        if node_id not in self._addresses:
            self._count_failure("unfollowable", node_id=node_id)
            return
        window, waited_since = self._window_blocks(run), now
        while len(mine.landed) < mine.expected and run.has_room and self._may_go_on(run):
            first, began = len(mine.landed), self._clock()
            patience = waited_since + followed.patience_seconds - began
            if patience <= 0 or not self._health_of(node_id).may_try(began):
                self._count_failure("unfollowable", node_id=node_id)
                return
            before = hashes[first - 1] if first else parent
            wanted = hashes[first : min(first + window, mine.expected)]
            seconds = min(patience, self._limits.longest_wait_seconds)
            with self._asking(node_id, run, mine, len(wanted)):
                await self._pull_from(run, node_id, before, wanted, mine, seconds)
            if len(mine.landed) > first:
                waited_since = self._clock()
            elif not run.was_refused:
                if node_id not in run.excluded:
                    return  # its blocks are here already
                # A daemon that has just come back is reached at the second or third try; one that
                # stays away opens the breaker.
                run.excluded.discard(node_id)
                await asyncio.sleep(FOLLOW_AGAIN_SECONDS)

    @contextmanager
    def _asking(self, node_id: NodeId, run: _Run, mine: SharedPull, blocks: int) -> Iterator[None]:
        """Count and judge one request for so many blocks; EmberErrors end here."""
        health, counters = self._health_of(node_id), self.counters
        started, before = self._clock(), len(mine.landed)
        asked = blocks * run.block_bytes
        run.was_refused = False
        self._asked_bytes[node_id] += asked
        counters.pulls += 1
        health.begin(started)
        try:
            yield
            health.succeed()
        except EmberError as error:
            waited = self._clock() - started
            has_landed = len(mine.landed) > before
            self._count_failure(failure_reason(error), error, node_id)
            run.excluded.add(node_id)
            if not has_landed:
                self._failed.lacks(node_id, mine.next_block, self._clock())
            if is_blamed(error, has_landed, waited, self._limits.blame_seconds):
                health.fail(self._clock())
                if isinstance(error, UnavailableError | DeadlineError):
                    self._failed.is_away(node_id, self._clock())
            elif has_landed:
                health.succeed()
        finally:
            health.abandon()  # cancelled, or an error that says nothing of the peer
            self._asked_bytes[node_id] -= asked
            landed_bytes = (len(mine.landed) - before) * run.block_bytes
            counters.pulled_blocks += len(mine.landed) - before
            counters.pulled_bytes += landed_bytes
            if landed_bytes:
                counters.from_peer[node_id] += landed_bytes
                now = self._clock()
                health.measured(landed_bytes, now - started, now)

    async def _choose(self, run: _Run, hashes: Sequence[BlockHash]) -> _Planned | None:
        """Whom to ask, by the index's word. Raises EmberError when the index is away."""
        hits = await self._index.query(
            index_keys(hashes), timeout_seconds=self._index_seconds(run.deadline)
        )
        hits = [hit for hit in hits if hit.hit_blocks and hit.node_id not in run.excluded]
        if not any(hit.node_id != self._node_id for hit in hits):
            return None
        await self._refresh_addresses(run.deadline)
        now = self._clock()
        owners = [
            Owner(
                hit,
                self._health_of(hit.node_id).bytes_per_second(now),
                self._asked_bytes[hit.node_id],
            )
            for hit in hits
            if self._may_ask(hit, hashes[0], now)
        ]
        owner = choose_owner(owners, run.block_bytes, self._limits.costs)
        if owner is None:
            return None
        longest = max(one.hit.hit_blocks for one in owners)
        return _Planned(owner.hit.node_id, owner.hit.hit_blocks, longest)

    def _may_ask(self, hit: NodeHit, first: BlockHash, now: float) -> bool:
        return (
            hit.node_id in self._addresses
            and self._health_of(hit.node_id).may_try(now)
            and self._failed.may_ask(hit.node_id, first, now)
        )

    async def _refresh_addresses(self, deadline: float) -> None:
        """Raises EmberError when the index is away."""
        now = self._clock()
        if now < self._addresses_until:
            return
        nodes = await self._index.nodes(timeout_seconds=self._index_seconds(deadline))
        for node in nodes:
            if self._lives.get(node.node_id, node.incarnation) != node.incarnation:
                # What was learnt of its life before says nothing of this one.
                self._health.pop(node.node_id, None)
                self._failed.is_back(node.node_id)
        self._lives = {node.node_id: node.incarnation for node in nodes}
        self._addresses = {
            node.node_id: node.grpc_address
            for node in nodes
            if node.state == "ok" and node.grpc_address and node.node_id != self._node_id
        }
        self._addresses_until = now + self._limits.nodes_seconds
        self._forget_the_gone()
        await self._client.retain(set(self._addresses.values()))

    def _forget_the_gone(self) -> None:
        """Nodes come and go under ever new names; nothing is kept of those no index knows."""
        asked = self._asked_bytes = +self._asked_bytes
        kept = {*self._lives, *asked}
        self._connections.retain(kept)
        self._health = {node: health for node, health in self._health.items() if node in kept}

    async def _pull_from(
        self,
        run: _Run,
        node_id: NodeId,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        mine: SharedPull,
        wait_seconds: float = 0.0,
    ) -> None:
        """Bring what the owner gives of the run, window by window."""
        if run.deadline <= self._clock():
            raise DeadlineError("no time left to ask a peer")
        address, limits, window_blocks = (
            self._addresses[node_id],
            self._limits,
            self._window_blocks(run),
        )

        speed = self._health_of(node_id).bytes_per_second(self._clock())

        def ask(window: Sequence[BlockHash]) -> Coroutine[None, None, RemoteGrant]:
            left = max(0.001, run.deadline - self._clock())
            expected = len(window) * run.block_bytes / speed
            needed = max(limits.lease_seconds, limits.lease_times_expected * expected)
            seconds = min(left + limits.lease_margin_seconds, needed, LONGEST_LEASE_SECONDS)
            timeout = min(left, limits.acquire_seconds)
            return self._client.acquire(
                address, run.namespace, window, seconds, timeout, wait_seconds
            )

        def give_back(remote: RemoteGrant) -> None:
            if remote.grant.lease_id:
                self._release_later(address, remote.grant.lease_id)

        first = 0
        leases = LeasesAhead(ask, hashes, window_blocks, partial(self._give_back_later, address))
        try:
            while (remote := await leases.next()) is not None:
                window = hashes[first : first + window_blocks]
                before = hashes[first - 1] if first else parent
                try:
                    is_whole = await self._read(run, node_id, before, window, remote, mine)
                finally:
                    give_back(remote)
                if not is_whole:
                    return
                first += len(window)
        finally:
            leases.close()

    async def _read(
        self,
        run: _Run,
        node_id: NodeId,
        parent: BlockHash | None,
        window: Sequence[BlockHash],
        remote: RemoteGrant,
        mine: SharedPull,
    ) -> bool:
        """Land what is granted of one window; False when that is not all of it."""
        usable = remote.grant.usable_blocks
        if usable < len(window):
            run.excluded.add(node_id)
        if usable == 0:
            run.was_refused = True
            return False
        peer = self._connections.to(node_id, remote.source)
        try:
            room = run.target.allot(run.namespace, parent, window[:usable], remote.grant.salt_ids)
        except PoolFullError as error:
            run.has_room = False
            self._count_failure("no_room", error)
            return False
        try:
            run.has_room = len(room.ranges) >= usable
            await self._transfers.run(peer, remote, room, window, run.deadline, mine.land)
        finally:
            room.close()
        return run.has_room and usable == len(window)

    def _window_blocks(self, run: _Run) -> int:
        limits = self._limits
        fitting = limits.lease_bytes // max(1, run.block_bytes)
        return min(max(fitting, limits.least_lease_blocks), limits.most_lease_blocks)

    def _release_later(self, address: str, lease_id: int) -> None:
        """End the lease without making the pull wait for the answer."""
        task = asyncio.create_task(self._release(address, lease_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _give_back_later(self, address: str, asked: asyncio.Task[RemoteGrant]) -> None:
        """End the lease that a request may bring yet."""
        task = asyncio.create_task(self._give_back(address, asked))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _give_back(self, address: str, asked: asyncio.Task[RemoteGrant]) -> None:
        try:
            remote = await asked
        except EmberError as error:
            self._count_failure(failure_reason(error), error)
            return
        if remote.grant.lease_id:
            await self._release(address, remote.grant.lease_id)

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
