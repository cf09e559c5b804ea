"""Which staged slots an engine on another host may write, and what is being written right now.

Bytes that a NIC is bringing cannot be called back by ending the stage. So the slots of a stage that
ends in the middle of a write stay taken until whoever brings the bytes has made sure of their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from store_daemon.leases import LeaseId
from store_daemon.peer_ranges import PeerRanges
from store_daemon.ports import PoolRange
from store_daemon.sessions import Session
from store_daemon.tiers.slots import Slot

MAX_WRITES = 256
"""At once, of all engines; each holds a connection and a thread."""


class Placement:
    """One write under way. `end` it, from any thread, once no byte of it can arrive any more."""

    def __init__(self, stage_id: int, abort: Callable[[], None], table: Placements) -> None:
        self.stage_id = stage_id
        self.abort = abort
        self._table = table

    def end(self) -> None:
        self._table.ended(self)


class Placements:
    """`begin`, `Placement.end` and `is_written` from any thread; the rest on the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges = PeerRanges(lambda: 0.0)
        self._under_way: dict[int, list[Placement]] = {}
        self._kept: dict[int, list[Slot]] = {}
        """Slots of stages that ended while they were written."""

    def __iter__(self) -> Iterator[Slot]:
        """The slots that are neither free nor anybody's."""
        for slots in self._kept.values():
            yield from slots

    @property
    def kept_bytes(self) -> int:
        return sum(slot.payload_bytes for slot in self)

    def cover(self, session: Session, stage_id: int) -> None:
        """Let the session's engine, if it is on another host, write what the stage has left."""
        if not session.is_remote:
            return
        stage = session.stages.get(stage_id)
        if stage:
            self.allow(stage_id, [staged.slot for staged in stage.values()])
        else:
            self.withdraw(stage_id, [])

    def allow(self, stage_id: int, slots: Iterable[Slot]) -> None:
        """Writes into these slots of a stage may begin, and into none else of it."""
        with self._lock:
            self._ranges.allow(LeaseId(stage_id), slots, float("inf"))

    def begin(
        self, stage_id: int, ranges: Sequence[PoolRange], abort: Callable[[], None]
    ) -> Placement | None:
        """None: not a stage that may write there. `abort` (quick, from any thread) ends it soon."""
        with self._lock:
            if sum(map(len, self._under_way.values())) >= MAX_WRITES or not all(
                self._ranges.may_read(stage_id, wanted.offset, wanted.length) for wanted in ranges
            ):
                return None
            placement = Placement(stage_id, abort, self)
            self._under_way.setdefault(stage_id, []).append(placement)
            return placement

    def is_written(self, stage_id: int) -> bool:
        with self._lock:
            return stage_id in self._under_way

    def ended(self, placement: Placement) -> None:
        with self._lock:
            same = self._under_way[placement.stage_id]
            same.remove(placement)
            if not same:
                del self._under_way[placement.stage_id]

    def withdraw(self, stage_id: int, slots: list[Slot]) -> list[Slot]:
        """A stage ended, with these slots uncommitted: those of them that are free at once.

        What is being written is aborted; `settled` gives its slots back once it has ended.
        """
        with self._lock:
            self._ranges.end(LeaseId(stage_id))
            placements = list(self._under_way.get(stage_id, ()))
            if placements:
                self._kept[stage_id] = slots
        for placement in placements:
            placement.abort()
        return [] if placements else slots

    def settled(self) -> list[Slot]:
        """Take out the kept slots into which nothing is written any more."""
        with self._lock:
            over = [stage_id for stage_id in self._kept if stage_id not in self._under_way]
            return [slot for stage_id in over for slot in self._kept.pop(stage_id)]

    def check_integrity(self) -> None:
        """Assert that no write goes on unknown, and that a kept slot is kept once."""
        with self._lock:
            assert all(self._under_way.values()), "a stage is kept as written by nobody"
            places = [(slot.extent.number, slot.number) for slot in self]
            assert len(set(places)) == len(places), "a slot is kept twice"
            for slot in self:
                assert slot.number not in slot.extent.free, "a kept slot is free"
                assert slot.number not in slot.extent.occupants, "a kept slot is occupied"
