"""DRAM to SSD: a bounded queue and one thread that appends. A full queue skips and counts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from client_sdk import faults
from emberkv_proto.hashing import checksum
from store_daemon.block import Block
from store_daemon.holdings import Holdings
from store_daemon.namespaces import NamespaceBook
from store_daemon.ssd_changes import advise, follow, take_found
from store_daemon.tiers.changes import TierChanges
from store_daemon.tiers.ssd import SsdFailure, SsdRecord, SsdRow, SsdTier

log = logging.getLogger(__name__)
BATCH_BLOCKS = 32
BATCH_BYTES = 64 << 20


@dataclass(slots=True)
class _Written:
    """What one trip to the writing thread did. `results` are those of the records, in order."""

    corrupt: set[int] = field(default_factory=set)
    results: list[SsdRow | SsdFailure] = field(default_factory=list)
    before: TierChanges = field(default_factory=TierChanges)
    after: list[TierChanges] = field(default_factory=list)


class WritebackQueue:
    """Blocks waiting for their SSD copy, oldest first.

    A block that is evicted while it waits is passed over. A batch in the thread pins its blocks.
    """

    def __init__(
        self,
        holdings: Holdings,
        namespaces: NamespaceBook,
        ssd: SsdTier,
        queue_blocks: int,
        executor: Executor,
    ) -> None:
        self._holdings = holdings
        self._namespaces = namespaces
        self._ssd = ssd
        self._limit = queue_blocks
        self._most = queue_blocks
        """No more than this wait; above the limit only while it was lowered under them."""
        self._executor = executor
        self._waiting: deque[Block] = deque()
        self._queued: set[Block] = set()
        self._wake = asyncio.Event()
        self._is_closing = False
        advise(ssd, holdings)

    def __len__(self) -> int:
        return len(self._queued)

    def limit_to(self, queue_blocks: int) -> None:
        """Another limit for what is offered from now on."""
        self._limit, self._most = queue_blocks, max(queue_blocks, len(self._queued))

    def offer(self, block: Block) -> None:
        """Queue a block, unless all it has in DRAM is on SSD or it is queued already."""
        if block.is_saved or block in self._queued:
            return
        if len(self._queued) >= self._limit:
            self._holdings.counters["writeback_skipped_blocks"] += 1
            return
        self._queued.add(block)
        self._waiting.append(block)
        self._wake.set()

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
                await self.write_batch()

    def close(self) -> None:
        """Let `run` return once the queue is empty."""
        self._is_closing = True
        self._wake.set()

    def abandon(self) -> None:
        """Let `run` return after the batch in flight."""
        self._holdings.counters["writeback_skipped_blocks"] += len(self._waiting)
        self._queued.difference_update(self._waiting)
        self._waiting.clear()
        self.close()

    def check_integrity(self) -> None:
        assert set(self._waiting) <= self._queued
        assert len(self._queued) <= self._most

    async def write_batch(self) -> None:
        """Forget the rows that wait for it and write the oldest blocks. Not to be cancelled."""
        blocks = self._next_blocks()
        forget, self._holdings.rows_to_forget = self._holdings.rows_to_forget, []
        records = [record for block in blocks for record in self._records(block)]
        unverified = {i for i, record in enumerate(records) if not self._is_verified(record)}
        loop = asyncio.get_running_loop()
        try:
            written = await loop.run_in_executor(
                self._executor, self._write, records, unverified, forget
            )
        finally:
            for record in records:
                record.payload.release()
        self._take_over(blocks, records, written)

    def _next_blocks(self) -> list[Block]:
        blocks: list[Block] = []
        size = 0
        while self._waiting and len(blocks) < BATCH_BLOCKS and size < BATCH_BYTES:
            block = self._waiting.popleft()
            if not block.in_dram or block.is_saved or block.is_doomed:
                self._queued.discard(block)
                continue
            self._holdings.catalog.pin(block)
            size += sum(c.slot_bytes for c in block.namespace.size_classes)
            blocks.append(block)
        return blocks

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
        written.corrupt = {
            i
            for i in unverified
            if checksum(records[i].payload[: records[i].length]) != records[i].checksum
        }
        good = [record for i, record in enumerate(records) if i not in written.corrupt]
        written.results = self._ssd.append(good)
        written.after.append(self._ssd.reclaim())
        # One reclaim makes room for one segment; a batch may need several.
        while written.after[-1]:
            failed = [i for i, r in enumerate(written.results) if isinstance(r, SsdFailure)]
            if not failed:
                break
            for i, result in zip(failed, self._ssd.append([good[i] for i in failed]), strict=True):
                written.results[i] = result
            written.after.append(self._ssd.reclaim())

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
        for block in blocks:
            self._queued.discard(block)
        for row in written.before.lost:
            self._save_again(row)
        for block in saved:
            self.offer(block)  # a part of it was committed while the others were written
        holdings.unpin(blocks)
        holdings.publish()

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
        # Reclaim may have taken the rows that these were to join.
        if len(rows) < len(outcome) or block.is_doomed or not block.namespace.has_required(places):
            self._holdings.rows_to_forget += rows
            self._holdings.counters["writeback_failed_blocks"] += 1
            return False
        block.is_verified = True
        self._holdings.catalog.add_rows(block, rows)
        self._holdings.counters["writeback_blocks"] += 1
        return True
