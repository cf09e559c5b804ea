"""Brings blocks within reach: SSD to DRAM, and a first checksum for what recovery found in DRAM.

Each move holds a pin on its block, so that a lease that ends early cannot free slots a thread is
writing. A move that a thread has begun always settles, on the loop, whatever became of those who
asked; one that still waits for a thread can be withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass

from client_sdk import faults
from emberkv_proto.errors import CorruptionError
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, checksum
from store_daemon.bandwidth import ReadSpeed
from store_daemon.block import Block
from store_daemon.holdings import Holdings
from store_daemon.tiers.slots import Slot
from store_daemon.tiers.ssd import SsdRow, SsdTier, is_same_content

log = logging.getLogger(__name__)

MOST_LEARNING = 64
"""Most blocks on the move at which another is taken up, and pinned, for its checksum alone."""

VERIFY_TURN_BLOCKS = 32
VERIFY_TURN_BYTES = 8 << 20
"""What a recovered pool's check gives the threads at a time: what a read may have to wait for."""


@dataclass(eq=False, slots=True)
class _Move:
    """One block on its way."""

    block: Block
    slots: dict[int, Slot]
    """Where its parts will be; empty when only checksums are computed."""
    rows: dict[int, SsdRow]
    work: ConcurrentFuture[None]
    settled: asyncio.Future[None]
    stopwatch: _Stopwatch


@dataclass(slots=True)
class _Stopwatch:
    """When a thread began and ended a move; it writes, the loop reads."""

    began: float | None = None
    seconds: float | None = None


class Promoter:
    """Moves in flight, one for a block at most.

    Args:
        on_settled: told, on the loop, of each block that was moved and whether it can be read now.
            Not told of withdrawn moves.
        clock: monotonic seconds; says how old a measured speed is.
    """

    def __init__(
        self,
        holdings: Holdings,
        ssd: SsdTier | None,
        executor: Executor,
        on_settled: Callable[[Block, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holdings = holdings
        self._ssd = ssd
        self._executor = executor
        self._on_settled = on_settled
        self._clock = clock
        self._moving: dict[Block, _Move] = {}
        self.speed = ReadSpeed()
        """Of reads from SSD, a block's parts together, its checksums included."""

    @property
    def in_flight(self) -> int:
        return len(self._moving)

    def is_moving(self, block: Block) -> bool:
        return block in self._moving

    @property
    def stalled_seconds(self) -> float:
        """For how long the oldest read that a thread is at has been going on. O(moves)."""
        began = [
            move.stopwatch.began
            for move in self._moving.values()
            if move.rows and move.stopwatch.began is not None and move.stopwatch.seconds is None
        ]
        return time.perf_counter() - min(began) if began else 0.0

    def bring(self, block: Block, parts: Iterable[int]) -> bool:
        """Begin to make these parts readable in DRAM; False when that is not possible now.

        A block that is on the move is let move: ask again when it has settled.
        """
        if block in self._moving:
            return True
        if block.is_doomed:
            return False
        missing = [part for part in parts if block.slots[part] is None]
        if not missing:
            slots = _slots_of(block)
            self._begin(block, {}, {}, lambda: self._verify(slots))
            return True
        rows = {part: row for part in missing if (row := block.rows[part]) is not None}
        if len(rows) < len(missing) or self._ssd is None:
            return False
        room = self._holdings.take_all(block.namespace, missing, block.tenant)
        if room is None:
            self._holdings.counters["no_space_promotions"] += 1
            return False
        self._begin(block, room, rows, lambda: self._read(room, rows))
        return True

    def learn_checksums(self, block: Block) -> None:
        """Compute what its writer left out, unless too many wait for that: then later, when
        somebody needs it."""
        if len(self._moving) < MOST_LEARNING:
            self.bring(block, ())
        else:
            self._holdings.counters["unsummed_blocks_put_off"] += 1

    def withdraw(self, block: Block) -> bool:
        """Call a move off that no thread has begun; return whether it was.

        Checksums are computed all the same: they serve whoever comes next.
        """
        move = self._moving.get(block)
        if move is None or not move.rows or not move.work.cancel():
            return False
        del self._moving[block]
        self._holdings.counters["withdrawn_moves"] += 1
        self._holdings.give_back(move.slots.values())
        self._holdings.unpin([block])
        return True

    async def verify_all(self, blocks: Iterable[Block]) -> None:
        """Check recovered DRAM blocks a few at a time, so that later reads need not wait for it."""
        begun = turn_bytes = 0
        for block in blocks:
            if not block.in_dram or block.is_verified:
                continue
            self.bring(block, ())
            begun, turn_bytes = begun + 1, turn_bytes + block.dram_bytes
            if begun == VERIFY_TURN_BLOCKS or turn_bytes >= VERIFY_TURN_BYTES:
                begun = turn_bytes = 0
                await self.settle()
        await self.settle()

    async def settle(self) -> None:
        """Wait for every move in flight. Bounded by the I/O of those."""
        while self._moving:
            await asyncio.wait([move.settled for move in self._moving.values()])

    def check_integrity(self) -> None:
        """Assert that each move holds its block, and that what it fills is nobody else's."""
        self.speed.check_integrity()
        slots: set[int] = set()
        for block, move in self._moving.items():
            assert move.block is block
            assert block.pins > 0, "a block moves that nobody holds"
            assert set(move.slots) == set(move.rows)
            offsets = {slot.offset for slot in move.slots.values()}
            assert not offsets & slots, "two moves fill one slot"
            slots |= offsets
            for slot in move.slots.values():
                assert slot.number not in slot.extent.occupants, "a move fills a resident's slot"
                assert slot.number not in slot.extent.free, "a move fills a free slot"

    def _begin(
        self,
        block: Block,
        slots: dict[int, Slot],
        rows: dict[int, SsdRow],
        job: Callable[[], None],
    ) -> None:
        self._holdings.catalog.pin(block)
        stopwatch = _Stopwatch()
        work = self._executor.submit(_timed, job, stopwatch)
        move = _Move(block, slots, rows, work, asyncio.wrap_future(work), stopwatch)
        self._moving[block] = move
        move.settled.add_done_callback(lambda done: self._finish(move))

    def _finish(self, move: _Move) -> None:
        if move.settled.cancelled():
            return  # withdrawn
        block = move.block
        del self._moving[block]
        error = move.settled.exception()
        is_readable = False
        if error is None and move.rows and move.stopwatch.seconds is not None:
            read_bytes = sum(row.length for row in move.rows.values())
            self.speed.measured(read_bytes, move.stopwatch.seconds, self._clock())
        try:
            if not move.slots:
                is_readable = self._finish_verify(block, error)
            elif error is None and _can_land(block, move.rows):
                self._holdings.land(block, move.slots)
                is_readable = True
            else:
                self._holdings.give_back(move.slots.values())
                if error is not None:
                    self._lose(block, move.rows, error)
        finally:  # also after an error that is nobody's fault but ours
            self._on_settled(block, is_readable)
            self._holdings.unpin([block])
            self._holdings.publish()

    def _finish_verify(self, block: Block, error: BaseException | None) -> bool:
        if block.is_doomed:
            return False
        if error is None:
            block.is_verified = True
            return True
        log.warning("recovered block dropped: hash=%s %s", block.hash.hex()[:16], error)
        self._holdings.quarantine(block)
        return False

    def _lose(self, block: Block, rows: dict[int, SsdRow], error: BaseException) -> None:
        assert self._ssd is not None
        if isinstance(error, FileNotFoundError) and not all(map(self._ssd.holds, rows.values())):
            # Its segment was the oldest; whoever reclaimed it says so to the catalog.
            self._holdings.counters["reclaimed_reads"] += 1
            return
        if isinstance(error, CorruptionError):
            self._holdings.counters["corrupt_blocks"] += 1
        elif isinstance(error, OSError):
            self._holdings.counters["ssd_read_errors"] += 1
        else:
            raise error
        log.warning("ssd block dropped: hash=%s %s", block.hash.hex()[:16], error)
        if block.in_ssd and not block.is_doomed:
            self._holdings.lose_ssd(block)

    def _read(self, slots: dict[int, Slot], rows: dict[int, SsdRow]) -> None:
        assert self._ssd is not None
        faults.hit(faults.PROMOTE)
        for part, row in rows.items():
            with self._holdings.pool.slot_view(slots[part]) as target:
                self._ssd.read_into(row, target)

    def _verify(self, slots: list[Slot]) -> None:
        for slot in slots:
            with self._holdings.pool.payload(slot) as payload:
                found = checksum(payload)
                if slot.checksum == UNKNOWN_CHECKSUM:
                    slot.checksum = found  # its writer left that to us
                elif found != slot.checksum:
                    raise CorruptionError(f"slot at {slot.offset}: checksum does not match")


def _timed(job: Callable[[], None], stopwatch: _Stopwatch) -> None:
    began = stopwatch.began = time.perf_counter()
    try:
        job()
    finally:
        stopwatch.seconds = time.perf_counter() - began


def _can_land(block: Block, rows: dict[int, SsdRow]) -> bool:
    """Whether the block still wants what was read, and the rows read still stand."""
    return not block.is_doomed and all(
        (now := block.rows[part]) is not None
        and is_same_content(now, row)  # it may have moved
        and block.slots[part] is None
        and not block.writers >> part & 1
        for part, row in rows.items()
    )


def _slots_of(block: Block) -> list[Slot]:
    return [slot for slot in block.slots if slot is not None]
