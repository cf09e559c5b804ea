"""The background check of what is on SSD: at a low rate, behind everything that somebody waits for.

A record that does not match its checksum is dropped before a reader meets it: `removed` is
published, and written anew if DRAM has the block. Segments with several bad records are set aside
by the tier.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from store_daemon.config import SsdSection
from store_daemon.holdings import Holdings
from store_daemon.promotion import Promoter
from store_daemon.tiers.ssd import ScrubStep, SsdRow, SsdTier
from store_daemon.tiers.token_bucket import TokenBucket
from store_daemon.writeback import WritebackQueue

STEP_BYTES = 1 << 20
"""Read at a time; larger records are read whole."""
ASKED_BYTES_PER_SECOND = 64 << 20
"""When an operator asks for a scrub and none is configured."""
YIELD_SECONDS = 0.02
MOST_YIELDS = 50
"""How often a step gives way to readers and writers before it takes its turn all the same."""
FIRST_PASS_SECONDS = 60.0
"""Left to engines after a start."""
PASS_SECONDS = 3600.0
"""Rest between two passes in the background; a small tier is not read all day long."""
LONGEST_SLEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """What a scrub that was asked for will do."""

    records: int
    """In the tier now."""
    expected_seconds: float
    """At its rate, on an idle node."""


class Scrubbing:
    """One store's. Built inside the running loop; `run` is cancelled to end it."""

    def __init__(
        self,
        holdings: Holdings,
        ssd: SsdTier,
        executor: Executor,
        config: SsdSection,
        clock: Callable[[], float],
        promoter: Promoter,
        writeback: WritebackQueue,
    ) -> None:
        self._holdings = holdings
        self._ssd = ssd
        self._executor = executor
        self._configured = config.scrub_bytes_per_second
        self._bucket = TokenBucket(self._configured, clock())
        self._clock = clock
        self._promoter = promoter
        self._writeback = writeback
        self._is_asked = False
        self._starts_anew = False
        self._wake = asyncio.Event()
        self._next_pass_at = clock() + FIRST_PASS_SECONDS
        self.checked_records = 0
        """In the pass under way."""

    @property
    def is_asked(self) -> bool:
        """Whether a scrub that an operator asked for is under way."""
        return self._is_asked

    def set_rate(self, bytes_per_second: int) -> None:
        """Change the configured rate; 0 stops the background scrub, not one that was asked for."""
        self._configured = bytes_per_second
        self._bucket.per_second = self._rate
        self._wake.set()

    def scrub_now(self) -> ScrubPlan:
        """Begin with the oldest record and go on to the newest, also where no rate is configured.

        A scrub that is under way begins anew.
        """
        self._is_asked = self._starts_anew = True
        self._bucket.per_second = self._rate
        self._wake.set()
        return ScrubPlan(self._ssd.live_records, self._ssd.live_bytes / self._rate)

    async def run(self) -> None:
        """Scrub for ever, one pass after the other. Cancel it to end it."""
        while True:
            seconds = self._rest_seconds()
            if seconds:
                await self._sleep(min(seconds, LONGEST_SLEEP_SECONDS))
                continue
            await self._give_way()
            await self.step()

    async def step(self) -> ScrubStep:
        """Check the next records, whatever the rate and whoever waits; act on what is found."""
        if self._starts_anew:
            self._starts_anew = False
            self.checked_records = 0
            self._ssd.restart_scrub()
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(self._executor, self._ssd.scrub, STEP_BYTES)
        self._bucket.spend(done.read_bytes, self._clock())
        counters = self._holdings.counters
        counters["scrubbed_records"] += done.records
        counters["scrubbed_bytes"] += done.read_bytes
        counters["scrub_corrupt"] += len(done.corrupt)
        counters["ssd_read_errors"] += len(done.unreadable)
        self.checked_records += done.records
        self._lose(done.corrupt)
        self._lose(done.unreadable)
        self._holdings.publish()
        if done.is_end and not self._starts_anew:
            counters["scrub_passes"] += 1
            self.checked_records = 0
            self._is_asked = False
            self._bucket.per_second = self._rate
            self._next_pass_at = self._clock() + PASS_SECONDS
        return done

    @property
    def _rate(self) -> int:
        return self._configured or (ASKED_BYTES_PER_SECOND if self._is_asked else 0)

    def _rest_seconds(self) -> float:
        """How long there is nothing to do; 0 when a step is due."""
        if not self._rate:
            return LONGEST_SLEEP_SECONDS
        until_pass = 0.0 if self._is_asked else self._next_pass_at - self._clock()
        return max(0.0, until_pass, self._bucket.delay(self._clock()))

    async def _sleep(self, seconds: float) -> None:
        """As long, or until something was asked for."""
        self._wake.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def _give_way(self) -> None:
        for _ in range(MOST_YIELDS):
            if not self._promoter.in_flight and not len(self._writeback):
                return
            await asyncio.sleep(YIELD_SECONDS)

    def _lose(self, rows: Iterable[SsdRow]) -> None:
        catalog = self._holdings.catalog
        for row in rows:
            catalog.wake((row.block_hash,))
            block = catalog.blocks.get(row.block_hash)
            if block is None or row.part >= len(block.rows) or block.rows[row.part] != row:
                continue  # forgotten or replaced meanwhile
            self._holdings.lose_ssd(block)
            self._writeback.offer(block)
