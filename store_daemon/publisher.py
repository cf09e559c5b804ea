"""The node's event log: numbered, replayable, with heartbeats whose digests are exact.

One event loop owns it. `emit` never waits: a subscriber pulls from its own cursor into a ring of
the latest events, and one that the ring has passed is told to take a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from client_sdk import faults
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    Event,
    EventBatch,
    Keys,
    SnapshotNeeded,
    SnapshotPage,
    TierCleared,
)
from emberkv_proto.hashing import xor_of
from emberkv_proto.types import (
    BucketChoice,
    EngineInfo,
    Incarnation,
    NodeId,
    NodeReport,
    Seq,
    Tier,
)
from store_daemon.bucket_ledger import BucketLedger
from store_daemon.bucket_scan import BucketScan
from store_daemon.ports import Residency

MAX_KEYS_PER_EVENT = 65536
MAX_KEYS_PER_BATCH = 65536
MAX_EVENTS_PER_BATCH = 4096
MAX_KEYS_PER_PAGE = 65536
MAX_SNAPSHOTS = 4
MAX_SCANS = 4
MAX_KEYS_PER_BUCKET = 1 << 19
"""A bucket of more fits no message; such a node has a hundred million blocks."""

Published = EventBatch | NodeReport | BucketRows | SnapshotNeeded


@dataclass(frozen=True, slots=True)
class BucketWish:
    """What a subscription asks for beside the events, to repair only what differs."""

    xors: bool = False
    rows: tuple[BucketChoice, ...] = ()


NO_BUCKETS = BucketWish()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a report says beside the tiers."""

    state: str = "recovering"
    engines: tuple[EngineInfo, ...] = ()
    grpc_address: str = ""


@dataclass(slots=True)
class TierLedger:
    """What the events of one tier add up to."""

    blocks: int = 0
    xor: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


class Publisher:
    """Implements `ports.EventSink`; serves subscriptions and snapshots.

    An incarnation starts with nothing resident: recovered blocks are emitted as stored too.
    """

    def __init__(
        self,
        node_id: NodeId,
        incarnation: Incarnation,
        residency: Residency,
        *,
        ring_events: int = 65536,
        batch_seconds: float = 0.005,
        heartbeat_seconds: float = 1.0,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._residency = residency
        self._ring: list[Event | None] = [None] * ring_events
        self._seq = 0
        self._batch_seconds = batch_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._unix_clock = unix_clock
        self._facts = NodeFacts()
        self._announced = 0
        self._ledgers: dict[Tier, TierLedger] = {}
        self._buckets = BucketLedger()
        self._scans: set[BucketScan] = set()
        self._wakes: set[asyncio.Event] = set()
        self._cursors: dict[asyncio.Event, int] = {}
        """Next event of each subscriber."""
        self.gaps = 0
        """Subscriptions that were told to take a snapshot."""
        self.snapshots = 0
        """Sent to their last page."""
        self.repairs = 0
        """Sets of buckets whose rows were gathered for a subscriber."""
        self._snapshots = asyncio.Semaphore(MAX_SNAPSHOTS)
        self._scan_gate = asyncio.Semaphore(MAX_SCANS)
        self._is_closed = False

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    @property
    def seq(self) -> Seq:
        """Number of the newest event; 0 before the first."""
        return Seq(self._seq)

    @property
    def oldest_seq(self) -> Seq:
        """The oldest event that can be replayed; `seq + 1` when there is none."""
        return Seq(max(1, self._seq - len(self._ring) + 1))

    @property
    def subscribers(self) -> int:
        return len(self._wakes)

    @property
    def lag_events(self) -> int:
        """How many events the slowest subscriber has not been given yet."""
        return max((self._seq + 1 - cursor for cursor in self._cursors.values()), default=0)

    def ledger(self, tier: Tier) -> TierLedger:
        """Sums over all events of a tier, for metrics."""
        return self._ledgers.setdefault(tier, TierLedger())

    def emit(self, event: Event) -> None:
        """Number an event (one with too many keys becomes several) and wake subscribers."""
        for piece in _pieces(event):
            if not faults.hit(faults.EVENT_PUBLISH):
                self._enter(piece)
                continue
            self._seq += 1
            self._ring[self._seq % len(self._ring)] = piece
            self._enter(piece)
        for wake in self._wakes:
            wake.set()

    def announce(self, facts: NodeFacts) -> None:
        """Change what reports say. Subscribers get a report at once, not a heartbeat later."""
        if facts != self._facts:
            self._facts = facts
            self._announced += 1
            for wake in self._wakes:
                wake.set()

    async def subscribe(
        self, incarnation: Incarnation, from_seq: Seq, wish: BucketWish = NO_BUCKETS
    ) -> AsyncGenerator[Published, None]:
        """Yield every event from `from_seq` on, in order, without gaps, with reports in between.

        A report's digests are the state right after `report.seq`, and all events up to it come
        before it and none after it; so it is with the rows of the buckets wished for. Ends with
        SnapshotNeeded when the events asked for cannot be had, or silently when the publisher
        closes. Close the iterator (`aclosing`).
        """
        cursor = max(1, from_seq)
        if incarnation != self._incarnation or cursor > self._seq + 1:
            self.gaps += 1
            yield SnapshotNeeded(self._incarnation, self.seq, self._node_id)
            return
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        self._wakes.add(wake)
        self._cursors[wake] = cursor
        due: deque[NodeReport | BucketRows | SnapshotNeeded] = deque()
        """Each to be sent right after its event; the oldest first."""
        report_due = loop.time()
        announced = self._announced
        wants_xors = wish.xors
        gathering = asyncio.create_task(self._gather(wish.rows, due, wake)) if wish.rows else None
        try:
            while not self._is_closed:
                if cursor < self.oldest_seq:
                    self.gaps += 1
                    yield SnapshotNeeded(self._incarnation, self.seq, self._node_id)
                    return
                if gathering is not None and gathering.done():
                    gathering.result()
                    gathering = None
                if not due and (loop.time() >= report_due or announced != self._announced):
                    due.append(self._report(with_xors=wants_xors))
                    wants_xors = False
                    report_due = loop.time() + self._heartbeat_seconds
                    announced = self._announced
                if due and cursor > due[0].seq:
                    published = due.popleft()
                    yield published
                    if isinstance(published, SnapshotNeeded):
                        return
                elif cursor <= self._seq:
                    batch = self._batch(cursor, due[0].seq if due else self._seq)
                    cursor = self._cursors[wake] = batch.seq_last + 1
                    yield batch
                else:
                    wake.clear()
                    heartbeat = loop.call_at(report_due, wake.set)
                    try:
                        await wake.wait()
                    finally:
                        heartbeat.cancel()
                    if cursor <= self._seq:
                        await asyncio.sleep(self._batch_seconds)  # let a batch gather
        finally:
            self._wakes.discard(wake)
            self._cursors.pop(wake, None)
            if gathering is not None:
                gathering.cancel()
                await asyncio.gather(gathering, return_exceptions=True)

    async def snapshot_pages(self) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the state right after one event, copied in one step; the last page says so.

        At most MAX_SNAPSHOTS are open at once; more wait. Close the iterator (`aclosing`).
        """
        async with self._snapshots:
            digests = self._residency.digests()  # which may tell of more events
            seq = self.seq
            pages = [
                (digest.tier, page)
                for digest in digests
                for page in _pages(self._residency.resident_keys(digest.tier).copy())
            ] or [(Tier.DRAM, np.empty(0, np.uint64))]
            for number, (tier, keys) in enumerate(pages, start=1):
                yield SnapshotPage(
                    self._node_id, self._incarnation, seq, tier, keys, number == len(pages)
                )
            self.snapshots += 1

    async def _gather(
        self,
        choices: Sequence[BucketChoice],
        due: deque[NodeReport | BucketRows | SnapshotNeeded],
        wake: asyncio.Event,
    ) -> None:
        """Add the rows of each bucket to `due`, as of the newest event then. MAX_SCANS at once."""
        async with self._scan_gate:
            scan = BucketScan(choices, self._residency.scan_keys)
            self._scans.add(scan)
            try:
                while scan.step():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                self.repairs += 1
                for tier, bucket in [(c.tier, bucket) for c in choices for bucket in c.buckets]:
                    keys = scan.keys(tier, bucket)
                    if len(keys) > MAX_KEYS_PER_BUCKET:
                        self.gaps += 1
                        due.append(SnapshotNeeded(self._incarnation, self.seq, self._node_id))
                    else:
                        due.append(
                            BucketRows(
                                self._node_id, self._incarnation, self.seq, tier, bucket, keys
                            )
                        )
                    wake.set()
                    await asyncio.sleep(0)
            finally:
                self._scans.discard(scan)

    def close(self) -> None:
        """End all subscriptions; for shutdown."""
        self._is_closed = True
        for wake in self._wakes:
            wake.set()

    def check_integrity(self) -> None:
        """Assert the conservation law: per tier, stored - removed == resident, same keys."""
        for seq in range(self.oldest_seq, self._seq + 1):
            assert self._ring[seq % len(self._ring)] is not None, f"event {seq} is missing"
        for digest in self._residency.digests():
            ledger = self.ledger(digest.tier)
            assert ledger.blocks == ledger.stored_blocks - ledger.removed_blocks
            assert (ledger.blocks, ledger.xor) == (digest.blocks, digest.xor), (
                f"{digest.tier.name}: events add up to {ledger.blocks} blocks, xor {ledger.xor:#x};"
                f" resident are {digest.blocks}, xor {digest.xor:#x}"
            )
            self._buckets.check(digest.tier, self._residency.resident_keys(digest.tier))

    def _report(self, *, with_xors: bool) -> NodeReport:
        digests = tuple(self._residency.digests())  # which may tell of more events
        return NodeReport(
            self._node_id,
            self._incarnation,
            self.seq,
            self._facts.state,
            digests,
            self._facts.engines,
            self._facts.grpc_address,
            self._unix_clock(),
            tuple(self._buckets.xors(digest.tier) for digest in digests) if with_xors else (),
        )

    def _batch(self, first: int, last: int) -> EventBatch:
        events: list[Event] = []
        keys = 0
        for seq in range(first, min(last, first + MAX_EVENTS_PER_BATCH - 1) + 1):
            event = self._ring[seq % len(self._ring)]
            assert event is not None
            keys += 0 if isinstance(event, TierCleared) else len(event.keys)
            if events and keys > MAX_KEYS_PER_BATCH:
                break
            events.append(event)
        return EventBatch(
            self._node_id, self._incarnation, Seq(first), tuple(events), self._unix_clock()
        )

    def _enter(self, event: Event) -> None:
        self._buckets.enter(event)
        for scan in self._scans:
            scan.enter(event)
        ledger = self.ledger(event.tier)
        match event:
            case BlocksStored(keys=keys):
                ledger.blocks += len(keys)
                ledger.stored_blocks += len(keys)
                ledger.xor ^= xor_of(keys)
            case BlocksRemoved(keys=keys):
                ledger.blocks -= len(keys)
                ledger.removed_blocks += len(keys)
                ledger.xor ^= xor_of(keys)
            case TierCleared():
                ledger.removed_blocks += ledger.blocks
                ledger.blocks = ledger.xor = 0


def _pieces(event: Event) -> Iterator[Event]:
    """The event, cut so that each piece fits in a message."""
    if isinstance(event, TierCleared) or 0 < len(event.keys) <= MAX_KEYS_PER_EVENT:
        yield event
        return
    for start in range(0, len(event.keys), MAX_KEYS_PER_EVENT):
        yield type(event)(event.tier, event.keys[start : start + MAX_KEYS_PER_EVENT])


def _pages(keys: Keys) -> list[Keys]:
    return [keys[i : i + MAX_KEYS_PER_PAGE] for i in range(0, len(keys), MAX_KEYS_PER_PAGE)]
