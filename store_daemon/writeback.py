"""DRAM to SSD: a bounded queue and one thread that appends. A full queue skips and counts.

When a block is queued is the mode's to say: when it is committed, when it is to leave DRAM, or when
it is asked for again. What failed is tried again later (see `retries`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from client_sdk import faults
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, checksum
from emberkv_proto.types import BlockHash
from store_daemon.block import UNWRITTEN, Block
from store_daemon.config import SsdSection
from store_daemon.holdings import Holdings
from store_daemon.namespaces import NamespaceBook
from store_daemon.retries import Retries
from store_daemon.ssd_changes import advise, follow, take_found
from store_daemon.tenants import Tenant
from store_daemon.tiers.changes import TierChanges
from store_daemon.tiers.segments import record_bytes
from store_daemon.tiers.ssd import SsdFailure, SsdRecord, SsdRow, SsdTier

log = logging.getLogger(__name__)
BATCH_BLOCKS = 256
RUN_BLOCKS = 32
"""Blocks of a chain that are ordered with the victim at its end (on_evict)."""
BATCH_BYTES = 64 << 20
LONGEST_WAIT_SECONDS = 0.25
"""For the byte rate of the drives; then it is seen whether the daemon ends."""


@dataclass(slots=True)
class _Written:
    """What one trip to the writing thread did. `results` are those of the records, in order."""

    corrupt: set[int] = field(default_factory=set)
    results: list[SsdRow | SsdFailure] = field(default_factory=list)
    before: TierChanges = field(default_factory=TierChanges)
    after: list[TierChanges] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the writing thread has at the moment."""

    hashes: frozenset[BlockHash]
    left: asyncio.Future[tuple[SsdRow, ...]]
    """Done when it has ended: the rows that are then to be forgotten. Do not cancel it."""


class WritebackQueue:
    """Blocks waiting for their SSD copy, oldest first.

    A block that is evicted while it waits is passed over. A batch in the thread pins its blocks.

    Args:
        on_written: told after each batch, when victims that waited for it may leave DRAM.
    """

    def __init__(
        self,
        holdings: Holdings,
        namespaces: NamespaceBook,
        ssd: SsdTier,
        config: SsdSection,
        executor: Executor,
        clock: Callable[[], float],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._holdings = holdings
        self._namespaces = namespaces
        self._ssd = ssd
        self._mode = config.writeback
        self._limit = config.queue_blocks
        self._most = config.queue_blocks
        """No more than this wait; above the limit only while it was lowered under them."""
        self._executor = executor
        self._clock = clock
        self._on_written = on_written
        self._waiting: deque[Block] = deque()
        self._queued: dict[Block, int] = {}
        """And how often their write has failed before."""
        self._retries = Retries(config.queue_blocks)
        holdings.is_being_saved = self.is_being_saved
        if self._mode == "on_reuse":
            holdings.on_reused = self._reused
        self.in_flight: Batch | None = None
        self._wake = asyncio.Event()
        self._is_closing = False
        self._piece_bytes = ssd.segment_bytes // 4
        advise(ssd, holdings)

    def __len__(self) -> int:
        return len(self._queued)

    def reconfigure(self, config: SsdSection) -> None:
        """Take over the queue's length and the byte rate; what waits already stays."""
        self._limit = config.queue_blocks
        self._most = max(self._limit, len(self._queued))
        self._ssd.set_write_rate(config.write_bytes_per_second)

    @property
    def retrying(self) -> int:
        """Blocks whose write failed and will be tried again."""
        return len(self._retries)

    def committed(self, block: Block) -> None:
        """The block, or a later part of it, has come to DRAM."""
        if self._mode == "on_commit":
            self.offer(block)

    def offer(self, block: Block) -> bool:
        """Queue a block; False if all it has in DRAM is on SSD, or there is no room."""
        if block in self._queued:
            return True
        if block.is_saved or block in self._retries:
            return False
        if len(self._queued) >= self._limit:
            self._holdings.counters["writeback_skipped_blocks"] += 1
            return False
        self._queue(block, 0)
        return True

    def is_being_saved(self, victim: Block) -> bool:
        """Whether a victim's SSD copy is on its way; in mode on_evict it is ordered now."""
        if victim.is_saved or not victim.in_dram or self._is_closing:
            return False
        if self._holdings.replicas.is_replica(victim):
            return False
        if not self._ssd.is_writable or self._must_wait:
            return False
        if self._mode != "on_evict":
            return victim in self._queued
        # A chain leaves from its end, and what stands before it goes next: one trip for all.
        run = [victim]
        blocks = self._holdings.catalog.blocks
        while len(run) < RUN_BLOCKS:
            above = blocks.get(run[-1].parent) if run[-1].parent is not None else None
            if above is None or not above.in_dram or above.is_saved or above in self._queued:
                break
            run.append(above)
        room = self._limit - len(self._queued)
        for block in reversed(run[: max(room, 1)]):
            self.offer(block)
        return victim in self._queued

    def retry(self, now: float) -> None:
        """Queue again what failed, when its time has come. Called regularly."""
        for block, attempts in self._retries.due(now).items():
            is_wanted = block.in_dram and not block.is_saved and not block.is_doomed
            if is_wanted and block not in self._queued and len(self._queued) < self._limit:
                self._holdings.counters["writeback_retried_blocks"] += 1
                self._queue(block, attempts)

    def wake(self) -> None:
        """See whether there are rows to forget or drives to look after."""
        if self._has_chores:
            self._wake.set()

    @property
    def _has_chores(self) -> bool:
        return bool(self._holdings.rows_to_forget) or self._ssd.wants_upkeep

    async def run(self) -> None:
        """Write until `close`; a batch once begun is always finished. Not to be cancelled."""
        while not (self._is_closing and not self._waiting):
            await self._wake.wait()
            self._wake.clear()
            while self._waiting or self._has_chores:
                if self._must_wait and not self._has_chores:
                    self._let_evict()
                    await asyncio.sleep(min(self._ssd.write_delay_seconds, LONGEST_WAIT_SECONDS))
                else:
                    await self.write_batch()

    def _let_evict(self) -> None:
        """Room for engines goes before copies: what waits for the byte rate may be evicted."""
        for block in self._waiting:
            if block.stays & UNWRITTEN:
                self._holdings.writing_ended(block)

    @property
    def _must_wait(self) -> bool:
        """Whether ssd.write_bytes_per_second is used up. What is left at the end is written."""
        return self._ssd.write_delay_seconds > 0 and not self._is_closing

    def close(self) -> None:
        """Let `run` return once the queue is empty."""
        self._is_closing = True
        self._wake.set()

    def abandon(self) -> None:
        """Let `run` return after the batch in flight."""
        self._holdings.counters["writeback_skipped_blocks"] += len(self._waiting)
        for block in self._waiting:
            self._leave_queue(block)
        self._waiting.clear()
        self.close()

    def check_integrity(self) -> None:
        assert set(self._waiting) <= set(self._queued)
        assert len(self._queued) <= self._most
        self._retries.check_integrity()
        for block in self._holdings.catalog.blocks.values():
            assert not block.stays & UNWRITTEN or block in self._queued, "it waits for no write"

    async def write_batch(self) -> None:
        """Forget the rows that wait for it and write the oldest blocks. Not to be cancelled."""
        blocks = self._next_blocks()
        forget, self._holdings.rows_to_forget = self._holdings.rows_to_forget, []
        records = [record for block in blocks for record in self._records(block)]
        unverified = {i for i, record in enumerate(records) if not self._is_verified(record)}
        loop = asyncio.get_running_loop()
        batch = Batch(frozenset(block.hash for block in blocks), loop.create_future())
        self.in_flight = batch
        try:
            written = await loop.run_in_executor(
                self._executor, self._write, records, unverified, forget
            )
        finally:
            for record in records:
                record.payload.release()
        self._take_over(blocks, records, written)
        self.in_flight = None
        batch.left.set_result(tuple(self._holdings.rows_to_forget))

    def _next_blocks(self) -> list[Block]:
        blocks: list[Block] = []
        size = 0
        if self._must_wait:
            return blocks
        most_bytes = min(BATCH_BYTES, self._ssd.write_bytes_per_second or BATCH_BYTES)
        ordered: Counter[Tenant] = Counter()
        """Bytes that this batch adds to each tenant's account."""
        while self._waiting and len(blocks) < BATCH_BLOCKS and size < most_bytes:
            block = self._waiting.popleft()
            if not block.in_dram or block.is_saved or block.is_doomed:
                self._leave_queue(block)
                continue
            if block.tenant is not None and not self._admit(block, block.tenant, ordered):
                self._leave_queue(block)
                continue
            self._holdings.catalog.pin(block)
            size += sum(c.slot_bytes for c in block.namespace.size_classes)
            blocks.append(block)
        return blocks

    def _admit(self, block: Block, tenant: Tenant, ordered: Counter[Tenant]) -> bool:
        """Whether the block fits in its tenant's quota, after older copies of the tenant went."""
        if tenant.quota.ssd_bytes is None:
            return True
        wanted = sum(
            record_bytes(slot.payload_bytes)
            for slot, row in zip(block.slots, block.rows, strict=True)
            if slot is not None and row is None
        )
        block.pins += 1  # its own rows are not what goes
        fits = self._holdings.quotas.admit_on_ssd(tenant, ordered[tenant] + wanted)
        block.pins -= 1
        if fits:
            ordered[tenant] += wanted
        else:
            self._holdings.counters["over_quota_unwritten_blocks"] += 1
        return fits

    def _queue(self, block: Block, attempts: int) -> None:
        self._queued[block] = attempts
        self._waiting.append(block)
        self._wake.set()

    def _reused(self, block: Block) -> None:
        if block.in_dram and not block.in_ssd:
            self.offer(block)

    def _leave_queue(self, block: Block) -> None:
        del self._queued[block]
        self._holdings.writing_ended(block)

    def _records(self, block: Block) -> list[SsdRecord]:
        return [
            SsdRecord(
                block.namespace.id,
                block.hash,
                part,
                block.parent,
                slot.payload_bytes,
                slot.checksum,
                self._holdings.pool.slot_view(slot),
                block.salt_id,
            )
            for part, slot in enumerate(block.slots)
            if slot is not None and block.rows[part] is None
        ]

    def _is_verified(self, record: SsdRecord) -> bool:
        return self._holdings.catalog.blocks[record.block_hash].is_verified

    def _write(
        self, records: Sequence[SsdRecord], unverified: set[int], forget: list[SsdRow]
    ) -> _Written:
        """In the writing thread. A tier that raises has failed all that it did not answer for."""
        written = _Written()
        try:
            self._write_to(written, records, unverified, forget)
        except OSError as error:
            log.warning("writeback failed: %s", error)
            missing = len(records) - len(written.corrupt) - len(written.results)
            written.results += [SsdFailure(str(error))] * missing
        return written

    def _write_to(
        self,
        written: _Written,
        records: Sequence[SsdRecord],
        unverified: set[int],
        forget: list[SsdRow],
    ) -> None:
        if forget:
            self._ssd.forget(forget)
        written.before = self._ssd.upkeep()
        if not records:
            return
        faults.hit(faults.WRITEBACK)
        records = [_summed(record) for record in records]
        written.corrupt = {
            i
            for i in unverified
            if checksum(records[i].payload[: records[i].length]) != records[i].checksum
        }
        good = [record for i, record in enumerate(records) if i not in written.corrupt]
        for piece in self._pieces(good):
            results = self._ssd.append(piece)
            written.results += results
            self._reclaim_and_retry(written, piece, results)

    def _pieces(self, records: Sequence[SsdRecord]) -> Iterator[list[SsdRecord]]:
        """Cut a batch so that reclaim, in between, finds room for what it keeps."""
        piece: list[SsdRecord] = []
        size = 0
        for record in records:
            if piece and size + len(record.payload) > self._piece_bytes:
                yield piece
                piece, size = [], 0
            piece.append(record)
            size += len(record.payload)
        if piece:
            yield piece

    def _reclaim_and_retry(
        self,
        written: _Written,
        piece: Sequence[SsdRecord],
        results: Sequence[SsdRow | SsdFailure],
    ) -> None:
        """One reclaim makes room for one segment; a piece may need several."""
        first = len(written.results) - len(piece)
        failed = [at for at, result in enumerate(results) if isinstance(result, SsdFailure)]
        changes = self._ssd.reclaim()
        written.after.append(changes)
        while failed and changes:
            again = self._ssd.append([piece[at] for at in failed])
            for at, result in zip(failed, again, strict=True):
                written.results[first + at] = result
            failed = [
                at
                for at, result in zip(failed, again, strict=True)
                if isinstance(result, SsdFailure)
            ]
            changes = self._ssd.reclaim()
            written.after.append(changes)

    def _take_over(self, blocks: list[Block], records: list[SsdRecord], written: _Written) -> None:
        """Enter the rows in the catalog, in the order in which things happened on disk."""
        holdings = self._holdings
        follow(holdings, written.before)
        results = iter(written.results)
        outcome = [
            None if number in written.corrupt else next(results) for number in range(len(records))
        ]
        counts = Counter(record.block_hash for record in records)
        saved: list[Block] = []
        at = 0
        for block in blocks:
            count = counts[block.hash]
            mine = outcome[at : at + count]
            at += count
            if self._settle(block, mine):
                saved.append(block)
        # Rows that the results above replaced are not live, and not to be taken.
        found = [row for row in written.before.found if self._ssd.holds(row)]
        take_found(holdings, self._namespaces, found)
        for changes in written.after:
            follow(holdings, changes)
        if saved:
            self._retries.worked(self._clock())
        for block in blocks:
            attempts = self._queued[block]
            self._leave_queue(block)
            if block not in saved and not (block.is_doomed or block.is_saved):
                self._fail(block, attempts)
        for row in written.before.lost:
            self._save_again(row)
        for block in saved:
            self.offer(block)  # a part of it was committed while the others were written
        holdings.unpin(blocks)
        holdings.publish()
        self._on_written()

    def _fail(self, block: Block, attempts: int) -> None:
        is_drive_failing = not self._ssd.is_writable
        if not self._retries.failed(block, attempts, is_drive_failing, self._clock()):
            self._holdings.counters["writeback_given_up_blocks"] += 1

    def _save_again(self, row: SsdRow) -> None:
        block = self._holdings.catalog.blocks.get(row.block_hash)
        if block is not None and block.in_dram:
            self.offer(block)

    def _settle(self, block: Block, outcome: Sequence[SsdRow | SsdFailure | None]) -> bool:
        """Enter a block's new rows, all or none; return whether it now has them."""
        rows = [result for result in outcome if isinstance(result, SsdRow)]
        if any(result is None for result in outcome):
            log.warning("recovered block dropped: hash=%s checksum", block.hash.hex()[:16])
            if not block.is_doomed:
                self._holdings.quarantine(block)
        places = list(block.rows)
        for row in rows:
            places[row.part] = row
            slot = block.slots[row.part]
            if slot is not None and slot.checksum == UNKNOWN_CHECKSUM:
                slot.checksum = row.checksum
        # Reclaim may have taken the rows that these were to join.
        if len(rows) < len(outcome) or block.is_doomed or not block.namespace.has_required(places):
            self._holdings.rows_to_forget += rows
            self._holdings.counters["writeback_failed_blocks"] += 1
            return False
        if len(rows) == sum(map(bool, block.slots)):  # only these were compared
            block.is_verified = True
        self._holdings.catalog.add_rows(block, rows)
        self._holdings.counters["writeback_blocks"] += 1
        return True


def _summed(record: SsdRecord) -> SsdRecord:
    """The record with its checksum, which its writer may have left to us."""
    if record.checksum != UNKNOWN_CHECKSUM:
        return record
    return replace(record, checksum=checksum(record.payload[: record.length]))
