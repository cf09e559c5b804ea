"""An SSD whose reads wait until the test lets them through."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.ssd import SsdTier

PATIENCE_SECONDS = 20.0
MANY = 100_000


class GatedReads:
    """Reads that have begun hold a daemon thread until `let_through`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self.begun: list[SsdRow] = []

    def let_through(self, count: int | None = None) -> None:
        """So many reads more, in the order they began; all from now on by default."""
        with self._changed:
            self._allowed += MANY if count is None else count
            self._changed.notify_all()

    async def until_begun(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.begun) < count:
            assert time.monotonic() < deadline, f"{len(self.begun)} reads begun, wanted {count}"
            await asyncio.sleep(0.001)

    def pass_one(self, row: SsdRow) -> None:
        with self._changed:
            number = len(self.begun)
            self.begun.append(row)
            may_go = self._changed.wait_for(lambda: number < self._allowed, PATIENCE_SECONDS)
            assert may_go, "the test never let the read through"


@contextlib.contextmanager
def gated_reads(ssd: SsdTier | None) -> Iterator[GatedReads]:
    """Reads of the tier wait inside the block; whatever waits at its end is let through."""
    assert ssd is not None
    gate = GatedReads()
    read_into = ssd.read_into

    def wait_then_read(row: SsdRow, target: memoryview) -> None:
        gate.pass_one(row)
        read_into(row, target)

    with mock.patch.object(ssd, "read_into", wait_then_read):
        try:
            yield gate
        finally:
            gate.let_through()
