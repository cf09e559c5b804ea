"""Brings blocks from other nodes into the pool: ask the index, lease, read, verify, land.

A run is planned owner by owner (`pull_plan`): what one owner has is brought in windows, then the
index is asked who has the rest. An owner that failed is not asked again within the same pull.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from client_sdk.index_client import IndexedNode
from client_sdk.tls import Tls
from client_sdk.transport.base import BusyHereError
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
from store_daemon.likely_owner import LikelyOwner
from store_daemon.owner_leases import OwnerLeases
from store_daemon.peer_client import LeaseOwner, PeerClient, RemoteGrant, Wish
from store_daemon.peer_connections import PeerConnections
from store_daemon.peer_health import HealthLimits, PeerHealth
from store_daemon.peer_transfer import PeerTransfers, TransferLimits
from store_daemon.ports import Followed, PullTarget
from store_daemon.pull_failures import failure_reason, is_blamed
from store_daemon.pull_limits import PullCounters, PullLimits
from store_daemon.pull_plan import Owner, choose_owner
from store_daemon.quick_leases import QuickLeases
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

    owner: LeaseOwner
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
        self._transfers = PeerTransfers(pool, transport, transfer_limits, clock)
        self._health: dict[NodeId, PeerHealth] = {}
        self._lives: dict[NodeId, Incarnation] = {}
        self._connections = PeerConnections(transport)
        self._leases = OwnerLeases(
            PeerClient(node_id, tls),
            QuickLeases(node_id, transport, self._connections),
            self._limits.release_seconds,
            self._count_failure,
        )
        self._likely = LikelyOwner()
        self._failed = FailedFetches(
            self._limits.failed_block_seconds, self._limits.failed_peer_seconds
        )
        self._addresses: dict[NodeId, str] = {}
        self._addresses_until = float("-inf")
        self._shared = SharedPulls()
        self._pulls: set[asyncio.Event] = set()
        """Set when the pull is over."""
        self._asked_bytes: Counter[NodeId] = Counter()
        self._is_closed = False
        self.counters = PullCounters()

    @property
    def quick_leases(self) -> int:
        """Leases that were given at owners' transport ports."""
        return self._leases.quick_leases

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
        self._leases.cancel()
        for over in list(self._pulls):
            await over.wait()
        await self._leases.close()
        self._connections.close()
        self._transfers.close()

    def check_integrity(self) -> None:
        """Assert that breakers are sound and that transfers belong to pulls in progress."""
        for health in self._health.values():
            health.check_integrity()
        self._failed.check_integrity()
        self._shared.check_integrity()
        self._leases.check_integrity()
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
        if is_first and await self._pull_likely(run, parent, hashes, mine):
            return True
        try:
            plan = await self._choose(run, hashes)
        except EmberError as error:
            self._count_failure("index", error)
            return False
        if plan is None:
            self.counters.unheld += is_first and not run.excluded
            return False
        in_time = self._blocks_in_time(run, plan.owner.node_id)
        if not in_time:
            self._count_failure("too_slow")
            return False
        mine.keep(min(plan.blocks, in_time))
        wanted = hashes[: mine.expected]
        with self._asking(plan.owner.node_id, run, mine, len(wanted)):
            await self._pull_from(run, plan.owner, parent, wanted, mine)
        if run.was_refused and not mine.landed:
            self._count_failure("stale_index", node_id=plan.owner.node_id)
            self._failed.lacks(plan.owner.node_id, hashes[0], self._clock())
        return len(mine.landed) < plan.longest or plan.longest == len(hashes)

    async def _pull_likely(
        self,
        run: _Run,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        mine: SharedPull,
    ) -> bool:
        """Bring what the likely owner lends at once; False: it lends nothing, ask the index."""
        node_id = self._likely.guess(self._clock())
        if node_id is None or node_id not in self._addresses:
            return False
        owner = LeaseOwner(node_id, self._addresses[node_id])
        if not self._may_guess(owner, hashes[0]):
            return False
        in_time = self._blocks_in_time(run, node_id)
        if not in_time:
            return False
        self.counters.guesses += 1
        hashes = hashes[: min(mine.expected, in_time)]
        window = hashes[: self._window_blocks(run)]
        seconds = min(self._limits.guess_seconds, run.deadline - self._clock())
        try:
            lent = await self._leases.ask_at_once(owner, self._wish(run, node_id, window), seconds)
        except BusyHereError:
            return False
        if lent is None:
            self.counters.wrong_guesses += 1
            self._likely.was_wrong()
            return False
        if not self._health_of(node_id).may_try(self._clock()):
            self._leases.give_back(owner, lent)  # others tried it meanwhile
            return False
        is_whole = lent.grant.usable_blocks == len(window)
        mine.keep(len(hashes) if is_whole else lent.grant.usable_blocks)
        with self._asking(node_id, run, mine, mine.expected):
            await self._pull_from(run, owner, parent, hashes[: mine.expected], mine, 0.0, lent)
            # What it does not have in DRAM may be on its drive, which the index knows.
            run.excluded.discard(node_id)
        return True

    def _blocks_in_time(self, run: _Run, node_id: NodeId) -> int:
        """How many blocks may come from there before the deadline."""
        now = self._clock()
        speed = self._health_of(node_id).bytes_per_second(now)
        return int((run.deadline - now) * speed / run.block_bytes)

    def _may_guess(self, owner: LeaseOwner, first: BlockHash) -> bool:
        now, node_id = self._clock(), owner.node_id
        return (
            not self._asked_bytes[node_id]  # else another owner may be the better one
            and self._leases.may_be_quick(owner)
            and self._health_of(node_id).may_try(now)
            and self._failed.may_ask(node_id, first, now)
        )

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
                owner = LeaseOwner(node_id, self._addresses[node_id])
                await self._pull_from(run, owner, before, wanted, mine, seconds)
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
                self._likely.gave(node_id, now)

    async def _choose(self, run: _Run, hashes: Sequence[BlockHash]) -> _Planned | None:
        """Whom to ask, by the index's word. Raises EmberError when the index is away."""
        query = self._index.query(
            index_keys(hashes), timeout_seconds=self._index_seconds(run.deadline)
        )
        # Beside each other: what nobody holds is rarely asked for.
        hits, _ = await asyncio.gather(query, self._refresh_addresses(run.deadline))
        hits = [hit for hit in hits if hit.hit_blocks and hit.node_id not in run.excluded]
        if not any(hit.node_id != self._node_id for hit in hits):
            return None
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
        node_id = owner.hit.node_id
        there = LeaseOwner(node_id, self._addresses[node_id])
        return _Planned(there, owner.hit.hit_blocks, longest)

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
        await self._leases.retain(self._addresses)

    def _forget_the_gone(self) -> None:
        """Nodes come and go under ever new names; nothing is kept of those no index knows."""
        asked = self._asked_bytes = +self._asked_bytes
        kept = {*self._lives, *asked}
        self._connections.retain(kept)
        self._health = {node: health for node, health in self._health.items() if node in kept}

    async def _pull_from(
        self,
        run: _Run,
        owner: LeaseOwner,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        mine: SharedPull,
        wait_seconds: float = 0.0,
        lent: RemoteGrant | None = None,
    ) -> None:
        """Bring what the owner gives of the run, window by window; the first may be `lent`."""
        limits, window_blocks = self._limits, self._window_blocks(run)
        unused = [lent] if lent is not None else []

        async def ask(window: Sequence[BlockHash]) -> RemoteGrant:
            if unused:
                return unused.pop()
            left = run.deadline - self._clock()
            if left <= 0:
                raise DeadlineError("no time left to ask a peer")
            wish = self._wish(run, owner.node_id, window, wait_seconds)
            is_first = window[0] == hashes[0]
            return await self._leases.ask(owner, wish, min(left, limits.acquire_seconds), is_first)

        first = 0
        leases = LeasesAhead(
            ask, hashes, window_blocks, partial(self._leases.give_back_later, owner)
        )
        try:
            while (remote := await leases.next()) is not None:
                window = hashes[first : first + window_blocks]
                before = hashes[first - 1] if first else parent
                try:
                    is_whole = await self._read(run, owner.node_id, before, window, remote, mine)
                finally:
                    self._leases.give_back(owner, remote)
                if not is_whole:
                    return
                first += len(window)
        finally:
            leases.close()

    def _wish(
        self, run: _Run, node_id: NodeId, window: Sequence[BlockHash], wait_seconds: float = 0.0
    ) -> Wish:
        """For the window at that owner."""
        limits, now = self._limits, self._clock()
        speed = self._health_of(node_id).bytes_per_second(now)
        expected = len(window) * run.block_bytes / speed
        needed = max(limits.lease_seconds, limits.lease_times_expected * expected)
        left = max(0.001, run.deadline - now)
        seconds = min(left + limits.lease_margin_seconds, needed, LONGEST_LEASE_SECONDS)
        first_blocks = self._transfers.limits.first_blocks(run.block_bytes, run.namespace.parts)
        return Wish(run.namespace, window, seconds, first_blocks, wait_seconds)

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
