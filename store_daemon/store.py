"""The store: sessions stage, commit and read blocks; peers lease and send them.

One event loop owns it. It acts on the plans of the pure cores (`catalog`, `eviction`, `leases`)
through `holdings` (places), `lending` (reads), `promotion` and `writeback` (moves).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from emberkv_proto.errors import (
    DrainingError,
    InvalidRequestError,
    LeaseExpiredError,
    UnknownLeaseError,
    UnknownStageError,
)
from emberkv_proto.events import Keys
from emberkv_proto.hashing import UNKNOWN_CHECKSUM
from emberkv_proto.layout import Namespace
from emberkv_proto.types import (
    AcquirePolicy,
    BlockHash,
    EngineInfo,
    NamespaceId,
    SaltId,
    StageState,
    Tier,
    TierDigest,
)
from store_daemon.arrivals import Arrivals, ReplicaArrivals
from store_daemon.block import Block, StoredNamespace
from store_daemon.config import DaemonSettings
from store_daemon.departures import patience_seconds
from store_daemon.hinted import HintedChain
from store_daemon.holdings import Holdings
from store_daemon.leases import PEERS as PEERS
from store_daemon.leases import ROUTERS, Lease, LeaseId, SessionId
from store_daemon.lending import Lender
from store_daemon.lending_terms import LendingTimes, Readers
from store_daemon.limbo import Limbo
from store_daemon.local_index import LocalIndex
from store_daemon.namespaces import NamespaceBook
from store_daemon.operations import Operations
from store_daemon.placements import Placements
from store_daemon.ports import EventSink, Followed, PeerGrant, Puller, PullTarget
from store_daemon.prefetching import NOTHING, Scheduled
from store_daemon.quotas import change_quotas, tenants_of
from store_daemon.replicas import ReplicaLimits
from store_daemon.scrubbing import Scrubbing
from store_daemon.sessions import Probed, Session, Staged, StagedPart, count_states, take_staged
from store_daemon.staging import grant_slots
from store_daemon.take_over import take_over_pool, take_over_rows
from store_daemon.tier_state import TierState, tier_states
from store_daemon.tiers.drive import DriveState
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.slots import Slot
from store_daemon.tiers.ssd import SsdTier
from store_daemon.writeback import WritebackQueue

log = logging.getLogger(__name__)
TICK_SECONDS = 0.1
RECOVERED_A_TURN = 1024


class BlockStore:
    """Implements `ports.Residency` and `ports.PeerStore`.

    Build it inside the running loop, `set_sink`, `recover`, then `start`; `close` ends it. The
    pool, the SSD tier and the index stay the caller's to close afterwards.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        pool: Pool,
        index: LocalIndex,
        ssd: SsdTier | None,
        clock: Callable[[], float],
    ) -> None:
        self.holdings = Holdings(
            settings.dram, pool, clock, tenants_of(settings), patience_seconds(settings.ssd)
        )
        self.holdings.on_resident = self._became_resident
        self.holdings.replicas.limits = _replica_limits(settings, pool)
        self.sessions: dict[SessionId, Session] = {}
        self.is_draining = False
        self._settings = settings
        self._index = index
        self.ssd = ssd
        self._clock = clock
        namespaces = self._namespaces = NamespaceBook(index, pool.slots)
        self._readers = ThreadPoolExecutor(settings.ssd.io_threads, "ember-read")
        self._writer = ThreadPoolExecutor(1, "ember-write")
        times = LendingTimes(settings.daemon.lease_seconds, settings.daemon.peer_timeout_seconds)
        readers = Readers(self._readers, settings.ssd.io_threads)
        self.lender = Lender(self.holdings, ssd, readers, times, clock)
        self.lender.limit_bytes = int(settings.daemon.lease_share * pool.slots.total_bytes)
        self.arrivals = Arrivals(self.holdings, namespaces, self._trim_soon)
        self.replica_arrivals = ReplicaArrivals(self.holdings, namespaces, self._trim_soon)
        """Room for blocks that peers send."""
        self.holdings.on_own = self._save_own
        self.writeback: WritebackQueue | None = None
        self.scrubbing: Scrubbing | None = None
        if ssd is not None:
            writeback = self.writeback = WritebackQueue(
                self.holdings, namespaces, ssd, settings.ssd, self._writer, clock, self._trim_soon
            )
            promoter = self.lender.promoter
            self.scrubbing = Scrubbing(
                self.holdings, ssd, self._readers, settings.ssd, clock, promoter, writeback
            )
        self.operations = Operations(
            self.holdings, index, self._namespaces, clock, self._wake_writeback, self._save
        )
        self._last_session = 0
        self._last_stage = 0
        self.limbo = Limbo()
        self.placements = Placements()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_trimming = False

    # ---- life ----

    def recover(self) -> None:
        """Take over what earlier lives left in the pool and on SSD; announces it as stored."""
        holdings, namespaces = self.holdings, self._namespaces.all()
        self._rest(take_over_pool(holdings, namespaces))
        if self.ssd is not None:
            take_over_rows(holdings, namespaces, self.ssd.found_rows())
        holdings.drop_incomplete()
        self.operations.recover_pins()
        holdings.counters["recovered_blocks_dram"] = holdings.blocks_of(Tier.DRAM)
        holdings.counters["recovered_blocks_ssd"] = holdings.blocks_of(Tier.SSD)
        holdings.publish()

    def start(self) -> None:
        """Begin writing back, expiring and verifying what was recovered."""
        loop = asyncio.get_running_loop()
        recovered = list(self.holdings.catalog.resident(Tier.DRAM))
        self._tasks = [
            loop.create_task(self._tick(), name="tick"),
            loop.create_task(self.lender.promoter.verify_all(recovered), name="verify"),
        ]
        if self.writeback is not None and self.scrubbing is not None:
            self._tasks.append(loop.create_task(self.writeback.run(), name="writeback"))
            self._tasks.append(loop.create_task(self.scrubbing.run(), name="scrub"))
            self._tasks.append(loop.create_task(self._offer(recovered), name="offer"))
        for task in self._tasks:
            task.add_done_callback(self._note_failure)

    async def _offer(self, recovered: Sequence[Block]) -> None:
        """Have written back what an earlier life left unwritten, a slice of the loop at a time."""
        assert self.writeback is not None
        for first in range(0, len(recovered), RECOVERED_A_TURN):
            for block in recovered[first : first + RECOVERED_A_TURN]:
                self.writeback.committed(block)
            self.writeback.wake()
            await asyncio.sleep(0)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A task that must run as long as the store has failed; /health says so."""
        if not task.cancelled() and task.exception() is not None:
            self.holdings.counters["failed_tasks"] += 1
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    def drain(self) -> None:
        """Take no new sessions, stages or reads; finish what was begun."""
        self.is_draining = self.arrivals.is_closed = self.replica_arrivals.is_closed = True

    async def close(self, flush_seconds: float) -> None:
        """End leases and moves, write back what is queued within `flush_seconds`, stop threads."""
        self.drain()
        for session in list(self.sessions.values()):
            self.end_session(session)
        await self.lender.close()
        for task in self._tasks:
            if task.get_name() != "writeback":
                task.cancel()
        if self.writeback is not None:
            self.writeback.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=flush_seconds)
        if self.writeback is not None:
            self.writeback.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lender.promoter.settle()
        # What is being written even now stays STAGED in the pool file.
        self.holdings.give_back([*self.limbo.rested(math.inf), *self.placements.settled()])
        self._readers.shutdown()
        self._writer.shutdown()

    def set_sink(self, sink: EventSink) -> None:
        """Where events go. Set it before `recover`."""
        self.holdings.sink = sink

    def set_puller(self, puller: Puller | None) -> None:
        """Peers to bring missing blocks from; None: there are none."""
        self.lender.pulls.puller = puller

    def reconfigure(self, settings: DaemonSettings) -> None:
        """Go on with other settings; only those that `live_settings` names may differ."""
        daemon = settings.daemon
        self.lender.set_times(LendingTimes(daemon.lease_seconds, daemon.peer_timeout_seconds))
        self.lender.limit_bytes = int(daemon.lease_share * self.holdings.pool.slots.total_bytes)
        self.holdings.reconfigure(settings.dram)
        self.holdings.replicas.limits = _replica_limits(settings, self.holdings.pool)
        change_quotas(self.holdings.tenants, self._settings, settings)
        if self.writeback is not None and self.scrubbing is not None:
            self.writeback.reconfigure(settings.ssd)
            self.scrubbing.set_rate(settings.ssd.scrub_bytes_per_second)
        self._settings = settings
        self._trim_soon()

    # ---- sessions ----

    def open_session(
        self, client: str, namespace: Namespace | None, part: int, engine: EngineInfo | None
    ) -> Session:
        """A session for one part of one namespace, or for an operator.

        Raises:
            DrainingError: no new sessions.
            InvalidRequestError: the part does not exist or does not fit an extent.
            PoolFullError: there is no room to keep the namespace.
        """
        own: StoredNamespace | None = None
        if namespace is not None:
            if self.is_draining:
                raise DrainingError("the daemon is shutting down and takes no new sessions")
            namespace.part_bytes(part)
            own = self._namespaces.enter(namespace)
        self._last_session += 1
        session = Session(SessionId(self._last_session), client, own, part, engine)
        self.sessions[session.id] = session
        return session

    def end_session(self, session: Session) -> None:
        """The client hung up: it neither reads nor writes any more. Frees all it borrowed."""
        self.holdings.give_back(self._end(session))

    def cut_session(self, session: Session) -> None:
        """We hung up on a client that may still write: slots rest, or `placements` keeps them."""
        free = self.holdings.give_back if session.is_remote else self._rest
        free(self._end(session))

    def heartbeat(self, session: Session) -> None:
        """Renew the session's leases."""
        now = self._clock()
        self.lender.leases.renew(session.id, now, now + self._settings.daemon.lease_seconds)

    # ---- writing ----

    def stage(
        self,
        session: Session,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        salt_id: SaltId | None = None,
    ) -> Staged:
        """Grant slots for the blocks of a chain run that are not there yet. O(len(hashes)).

        New blocks count against the quota of `salt_id`; None: nobody's. What a session keeps staged
        is under the same limit as what it leases; beyond it there is no space for it.
        """
        if self.is_draining:
            raise DrainingError("the daemon is shutting down and takes no new blocks")
        if parent is not None and parent in hashes:
            raise InvalidRequestError("a block cannot be its own ancestor")
        holdings = self.holdings
        tenant = holdings.tenants.of(salt_id)
        fitting = hashes[: self._blocks_to_stage(session)]
        beyond = len(hashes) - len(fitting)
        grants = grant_slots(holdings, session.own, session.part, fitting, parent, tenant)
        states = bytes(grants.states) + bytes([StageState.NO_SPACE]) * beyond
        grants.offsets.extend([0] * beyond)
        holdings.counters.update(count_states(states))
        holdings.publish()
        if not grants.granted:
            return Staged(0, states, grants.offsets)
        self._last_stage += 1
        session.stages[self._last_stage] = grants.granted
        self.placements.cover(session, self._last_stage)
        self._trim_soon()
        return Staged(self._last_stage, states, grants.offsets)

    def commit(
        self,
        session: Session,
        stage_id: int,
        hashes: Sequence[BlockHash],
        checksums: Sequence[int],
    ) -> int:
        """Publish written blocks of a stage; all or, if one was not granted, none.

        Without checksums, or where one is UNKNOWN_CHECKSUM, they are computed here, later.

        Raises:
            UnknownStageError: not this session's stage, or a block that is not staged in it.
            InvalidRequestError: not one checksum for each hash, a hash twice, or writes under way.
        """
        stage = self._stage(session, stage_id)
        if self.placements.is_written(stage_id):
            raise InvalidRequestError(f"stage {stage_id} is still being written")
        checksums = checksums or [UNKNOWN_CHECKSUM] * len(hashes)
        staged = take_staged(stage, stage_id, hashes, checksums)
        self.holdings.commit_parts(staged, session.part, checksums)
        if UNKNOWN_CHECKSUM in checksums:
            for one in staged:
                if one.slot.checksum == UNKNOWN_CHECKSUM:
                    self.lender.promoter.learn_checksums(one.block)
        if not stage:
            del session.stages[stage_id]
        self.placements.cover(session, stage_id)
        self.holdings.counters["committed_parts"] += len(hashes)
        self.holdings.publish()
        self._trim_soon()
        return len(hashes)

    def abort(self, session: Session, stage_id: int) -> None:
        """Give up what is still staged; the client writes no more. Raises UnknownStageError."""
        stage = self._stage(session, stage_id)
        del session.stages[stage_id]
        self.holdings.give_back(self._unstage(session, stage_id, stage))

    # ---- reading ----

    def probe(self, session: Session, hashes: Sequence[BlockHash]) -> Probed:
        """What of the chain is here, without touching recency. O(len(hashes))."""
        namespace, catalog = session.own, self.holdings.catalog
        catalog.wake(hashes)
        tiers = bytearray(len(hashes))
        for number, block_hash in enumerate(hashes):
            block = catalog.find(namespace, block_hash)
            if block is not None:
                tiers[number] = (block.in_dram << Tier.DRAM) | (block.in_ssd << Tier.SSD)
        hit = tiers.find(0)
        if namespace.is_hybrid:
            hit = len(catalog.usable_prefix(namespace, hashes))
        return Probed(len(hashes) if hit < 0 else hit, bytes(tiers))

    def acquire(
        self,
        session: Session,
        hashes: Sequence[BlockHash],
        policy: AcquirePolicy,
        deadline_seconds: float,
        recompute_seconds: float | None = None,
    ) -> Lease | None:
        """Lease the usable prefix; None when there is none. See `lending.Lender.acquire`."""
        if self.is_draining:
            raise DrainingError("the daemon is shutting down and lends no more")
        return self.lender.acquire(
            session.id,
            session.own,
            hashes,
            policy,
            deadline_seconds,
            self.replica_arrivals,
            recompute_seconds,
        )

    async def wait(
        self, session: Session, lease_id: LeaseId, from_block: int, seconds: float, until: int = 0
    ) -> Lease:
        return await self.lender.wait(session.id, lease_id, from_block, seconds, until)

    def release(self, session: Session, lease_ids: Iterable[int]) -> None:
        """End leases. One that ran out counts as ended; an unknown one raises after the others."""
        unknown: UnknownLeaseError | None = None
        for lease_id in lease_ids:
            try:
                self.lender.release(session.id, LeaseId(lease_id))
            except LeaseExpiredError:  # noqa: PERF203
                continue
            except UnknownLeaseError as error:
                unknown = error
        if unknown is not None:
            raise unknown

    def prefetch(
        self,
        session: Session,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        followed: Followed | None = None,
    ) -> Scheduled:
        if self.is_draining:
            return NOTHING
        if followed is not None:
            self.holdings.counters["handovers"] += 1
        target = self._target(followed)
        return self.lender.prefetch(
            session.id, session.own, hashes, deadline_seconds, target, followed
        )

    def cancel_prefetch(self, session: Session, prefetch_id: int) -> None:
        """Stop what a prefetch has not begun to move. One that ended is no error."""
        self.lender.prefetches.cancel(session.id, prefetch_id)
        self.holdings.publish()

    def _target(self, followed: Followed | None) -> PullTarget:
        """What is handed over is computed for this node: it is nobody's replica."""
        return self.replica_arrivals if followed is None else self.arrivals

    # ---- ports ----

    def hint(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        followed: Followed | None,
    ) -> HintedChain:
        """Begin to bring a chain for a router. Raises DrainingError, UnknownNamespaceError."""
        if self.is_draining:
            raise DrainingError("the daemon is shutting down and prefetches no more")
        namespace = self._namespaces.known(namespace_id)
        scheduled = self.lender.prefetch(
            ROUTERS, namespace, hashes, deadline_seconds, self._target(followed), followed
        )
        self.holdings.counters["handovers" if followed else "hints"] += 1
        return HintedChain(self.holdings, self.lender.prefetches, namespace, hashes, scheduled)

    def resident_keys(self, tier: Tier) -> Keys:
        self.holdings.publish()
        return self.holdings.catalog.resident_keys(tier)

    def scan_keys(self, tier: Tier) -> Iterator[Keys]:
        self.holdings.publish()
        for page in self.holdings.catalog.scan_keys(tier):
            yield page
            self.holdings.publish()

    def digests(self) -> tuple[TierDigest, ...]:
        self.holdings.publish()
        ledgers = self.holdings.catalog.ledgers
        return tuple(state.digest(ledgers[state.tier].xor) for state in self.tier_states())

    async def peer_acquire(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        lease_seconds: float,
        requester: str,
        wait_seconds: float = 0.0,
        ready_only: bool = False,
    ) -> PeerGrant:
        """Raises DrainingError, UnknownNamespaceError."""
        if self.is_draining:
            raise DrainingError("the daemon is shutting down and lends no more")
        own = self._namespaces.known(namespace_id)
        grant = await self.lender.peer_acquire(own, hashes, lease_seconds, wait_seconds, ready_only)
        log.debug("peer lease: to=%s blocks=%d", requester, grant.usable_blocks)
        return grant

    def peer_release(self, lease_id: int) -> None:
        """End a peer's lease. Raises UnknownLeaseError; one that ran out counts as ended."""
        with suppress(LeaseExpiredError):
            self.lender.release(PEERS, LeaseId(lease_id))
        self.holdings.publish()

    def may_read(self, lease_id: int, offset: int, length: int) -> bool:
        return self.lender.peer_ranges.may_read(lease_id, offset, length)

    # ---- asking ----

    def tier_states(self) -> tuple[TierState, ...]:
        return tier_states(self.holdings, self.ssd)

    def drive_states(self) -> tuple[DriveState, ...]:
        return self.ssd.drive_states() if self.ssd is not None else ()

    @property
    def staged_blocks(self) -> int:
        return sum(len(s) for session in self.sessions.values() for s in session.stages.values())

    def check_integrity(self) -> None:
        """Assert every invariant of the store and its parts. O(blocks); for tests and operators."""
        self.holdings.check_integrity()
        self.lender.check_integrity()
        self.limbo.check_integrity()
        self.placements.check_integrity()
        if self.writeback is not None:
            self.writeback.check_integrity()
        for session in self.sessions.values():
            session.check_integrity()

    def problems(self) -> list[str]:
        """Every invariant that does not hold, as text; empty when all do."""
        try:
            self.check_integrity()
        except AssertionError as error:
            return [str(error) or "an invariant does not hold"]
        return []

    # ---- inner steps ----

    def _blocks_to_stage(self, session: Session) -> int | None:
        """How many blocks more the session may have staged; None: as many as it likes."""
        if self.lender.limit_bytes is None:
            return None
        most = self.lender.limit_bytes // session.own.size_classes[session.part].slot_bytes
        return max(0, most - sum(map(len, session.stages.values())))

    def _stage(self, session: Session, stage_id: int) -> dict[BlockHash, StagedPart]:
        stage = session.stages.get(stage_id)
        if stage is None:
            raise UnknownStageError(
                f"stage {stage_id} is not held by this session; it was committed, aborted or lost"
            )
        return stage

    def _unstage(
        self, session: Session, stage_id: int, stage: dict[BlockHash, StagedPart]
    ) -> list[Slot]:
        """Give up a stage; the slots into which nothing is being written."""
        for staged in stage.values():
            self.holdings.abort_part(staged.block, session.part)
        self.holdings.publish()
        return self.placements.withdraw(stage_id, [staged.slot for staged in stage.values()])

    def _end(self, session: Session) -> list[Slot]:
        """What every way a session can end does; returns the slots it was writing."""
        del self.sessions[session.id]
        self.lender.end_session(session.id)
        slots: list[Slot] = []
        for stage_id, stage in session.stages.items():
            slots += self._unstage(session, stage_id, stage)
        session.stages.clear()
        return slots

    def _rest(self, slots: Iterable[Slot]) -> None:
        self.limbo.rest(slots, self._clock() + self._settings.daemon.lease_seconds)

    def _became_resident(self, blocks: Sequence[Block]) -> None:
        self.lender.blocks_arrived(blocks)
        for block in blocks if self.writeback is not None else ():
            if not self.holdings.replicas.is_replica(block):
                self._save_own(block)

    def _save_own(self, block: Block) -> None:
        if self.writeback is not None:
            self.writeback.committed(block)

    def _trim_soon(self) -> None:
        if not self._is_trimming and self.holdings.is_over_watermark:
            self._is_trimming = True
            asyncio.get_running_loop().call_soon(self._trim)

    def _trim(self) -> None:
        self._is_trimming = self.holdings.trim()
        self.holdings.publish()
        self._wake_writeback()
        if self._is_trimming:
            asyncio.get_running_loop().call_soon(self._trim)

    def tick(self) -> None:
        """Expire leases and wake resting slots. Called every TICK_SECONDS."""
        now = self._clock()
        self.lender.expire()
        self.lender.reconsider()
        self.holdings.expire_pins(now)
        self.holdings.shed_replicas()
        self.operations.forget_lost_pins()
        if self.writeback is not None:
            self.writeback.retry(now)
        self.holdings.give_back([*self.limbo.rested(now), *self.placements.settled()])
        self.holdings.publish()
        self._wake_writeback()
        self._trim_soon()

    def _save(self, block: Block) -> None:
        if self.writeback is not None and block.in_dram:
            self.writeback.offer(block)

    def _wake_writeback(self) -> None:
        """There may be rows to forget, or drives to look after."""
        if self.writeback is not None:
            self.writeback.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()


def _replica_limits(settings: DaemonSettings, pool: Pool) -> ReplicaLimits:
    peers = settings.peers
    return ReplicaLimits(
        int(peers.replica_share * pool.slots.total_bytes),
        peers.replicate_after_pulls,
        peers.replicate_seconds,
    )
