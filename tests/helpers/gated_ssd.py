"""An SSD whose reads wait until the test lets them through."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

from store_daemon.block import Block
from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.slots import Slot
from tests.helpers.store import SmallStore

PATIENCE_SECONDS = 40.0
MANY = 100_000


class GatedReads:
    """Reads that have begun hold a daemon thread until `let_through`.

    They pass in the order in which the promoter asked for them. The order in which its threads
    arrive is not that one: a thread that took its job first may come here second.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._asked: list[SsdRow] = []
        self.begun: list[SsdRow] = []

    def let_through(self, count: int | None = None) -> None:
        """So many reads more, in the order they were asked for; all from now on by default."""
        with self._changed:
            self._allowed += MANY if count is None else count
            self._changed.notify_all()

    async def until_begun(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.begun) < count:
            assert time.monotonic() < deadline, f"{len(self.begun)} reads begun, wanted {count}"
            await asyncio.sleep(0.001)

    def ask(self, rows: dict[int, SsdRow]) -> None:
        with self._changed:
            self._asked.extend(rows.values())

    def withdraw(self, rows: dict[int, SsdRow]) -> None:
        with self._changed:
            for row in rows.values():
                del self._asked[self._turn(row)]
            self._changed.notify_all()

    def pass_one(self, row: SsdRow) -> None:
        with self._changed:
            self.begun.append(row)
            may_go = self._changed.wait_for(
                lambda: self._turn(row) < self._allowed, PATIENCE_SECONDS
            )
            assert may_go, "the test never let the read through"

    def _turn(self, row: SsdRow) -> int:
        """Of the newest read of it: earlier ones have settled."""
        return max(turn for turn, asked in enumerate(self._asked) if asked is row)


@contextlib.contextmanager
def gated_reads(small: SmallStore) -> Iterator[GatedReads]:
    """Promotions wait at their reads inside the block; what waits at its end is let through."""
    ssd, promoter = small.ssd, small.store.lender.promoter
    assert ssd is not None
    gate = GatedReads()
    read_into, begin, withdraw = ssd.read_into, promoter._begin, promoter.withdraw

    def ask_then_begin(
        block: Block, slots: dict[int, Slot], rows: dict[int, SsdRow], job: Callable[[], None]
    ) -> None:
        gate.ask(rows)
        begin(block, slots, rows, job)

    def withdraw_both(block: Block) -> bool:
        move = promoter._moving.get(block)
        if not withdraw(block):
            return False
        assert move is not None
        gate.withdraw(move.rows)
        return True

    def wait_then_read(row: SsdRow, target: memoryview) -> None:
        gate.pass_one(row)
        read_into(row, target)

    with (
        mock.patch.object(ssd, "read_into", wait_then_read),
        mock.patch.object(promoter, "_begin", ask_then_begin),
        mock.patch.object(promoter, "withdraw", withdraw_both),
    ):
        try:
            yield gate
        finally:
            gate.let_through()
