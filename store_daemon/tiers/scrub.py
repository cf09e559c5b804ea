"""Reads what is stored, record by record in the order of segments, and compares checksums."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from emberkv_proto.errors import CorruptionError
from emberkv_proto.shm_layout import align_up
from store_daemon.tiers import segments
from store_daemon.tiers.live_rows import LiveRows
from store_daemon.tiers.segment_file import aligned_memory
from store_daemon.tiers.segments import SsdRow

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ScrubStep:
    """What one step found."""

    records: int = 0
    read_bytes: int = 0
    corrupt: list[SsdRow] = field(default_factory=list)
    unreadable: list[SsdRow] = field(default_factory=list)
    is_end: bool = False
    """Every record that was there when its segment's turn came has been looked at."""


class Scrubber:
    """Used by one thread at a time. Holds the memory of the largest record it has read."""

    def __init__(self, rows: LiveRows, read: Callable[[SsdRow, memoryview], object]) -> None:
        self._rows = rows
        self._read = read
        self._segment = 0
        self._todo: deque[SsdRow] = deque()
        self._memory = aligned_memory(segments.PAGE_BYTES)

    def restart(self) -> None:
        """Begin with the oldest segment again."""
        self._segment = 0
        self._todo.clear()

    def step(self, most_bytes: int) -> ScrubStep:
        """Check the next records, at least one, until so many bytes were read."""
        done = ScrubStep()
        while done.read_bytes < most_bytes:
            if not self._todo:
                if self._next_segment():
                    continue  # it may have no live row
                self.restart()
                done.is_end = True
                break
            row = self._todo.popleft()
            if row in self._rows:
                self._check(row, done)
        return done

    def _next_segment(self) -> bool:
        with self._rows.mutex:
            later = [
                segment
                for drive in self._rows.drives
                for number, segment in drive.segments.items()
                if number > self._segment
            ]
            if not later:
                return False
            segment = min(later, key=lambda segment: segment.number)
            self._segment = segment.number
            self._todo.extend(self._rows.of(segment.number))
            return True

    def _check(self, row: SsdRow, done: ScrubStep) -> None:
        wanted = align_up(row.length)
        if len(self._memory) < wanted:
            self._memory = aligned_memory(wanted)
        done.records += 1
        done.read_bytes += segments.record_bytes(row.length)
        try:
            self._read(row, self._memory[:wanted])
        except CorruptionError as error:
            _log.warning("scrub: %s", error)
            done.corrupt.append(row)
        except OSError as error:
            if row in self._rows:  # and its segment was not reclaimed meanwhile
                _log.warning("scrub: segment %d at %d: %s", row.segment, row.offset, error)
                done.unreadable.append(row)
