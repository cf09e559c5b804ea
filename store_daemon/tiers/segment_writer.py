"""Appends records: one open segment at a time, on the drive with the most free bytes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from store_daemon.config import SsdSection
from store_daemon.tiers.drive import Drive
from store_daemon.tiers.live_rows import IndexFailedError, LiveRows
from store_daemon.tiers.open_segment import OpenSegment, Segment, SsdRecord
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow
from store_daemon.tiers.token_bucket import TokenBucket

_log = logging.getLogger(__name__)


class SegmentWriter:
    """Used by one thread at a time, which has a few to help it.

    A drive that fails is passed over for the others.
    """

    def __init__(
        self, config: SsdSection, rows: LiveRows, next_number: int, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._rows = rows
        self._clock = clock
        self._threads = ThreadPoolExecutor(config.io_threads, "ember-append")
        self._open: OpenSegment | None = None
        self._drive: Drive | None = None
        self.next_number = next_number
        """Of the next segment; never used twice, on whatever drive."""
        self.bytes_written = 0
        self.budget = TokenBucket(config.write_bytes_per_second, clock())

    @property
    def open_segment(self) -> Segment | None:
        return self._open.segment if self._open is not None else None

    def usable_drives(self) -> list[Drive]:
        now = self._clock()
        return [drive for drive in self._rows.drives if drive.is_usable(now)]

    def store_all(self, waiting: deque[SsdRecord]) -> list[SsdRow]:
        """Store from the left, durably; what is still in `waiting` on return was not stored."""
        stored: list[SsdRow] = []
        while waiting and not self._rows.index_trouble.is_resting(self._clock()):
            target = self._open
            run = target.leading_run(waiting) if target is not None else []
            if target is None or not run:
                target = self._open_next()
                if target is None:
                    break
                run = target.leading_run(waiting)
            try:
                rows = self._write_run(target, run)
            except IndexFailedError as error:
                self._rows.index_failed(error)
                self.seal_open()
                break
            stored += rows
            for _ in rows:
                waiting.popleft()
        return stored

    def _write_run(self, target: OpenSegment, run: Sequence[SsdRecord]) -> list[SsdRow]:
        """The rows; none if the drive did not take it, and its segment is then closed."""
        drive = self._drive
        assert drive is not None
        try:
            rows = target.write(run, self._threads)
        except OSError as error:
            self.drive_failed(drive, error)
            return []
        before = target.segment.records_end
        self._rows.record(rows, target.segment)
        self._count_written(drive, rows[-1].end - before)
        drive.worked()
        return rows

    def _open_next(self) -> OpenSegment | None:
        """Seal the open segment and begin another; None where none can be."""
        self.seal_open()
        while True:
            usable = [drive for drive in self.usable_drives() if drive.has_room]
            if not usable:
                return None
            drive = max(usable, key=lambda drive: drive.free_bytes)
            number = self.next_number
            self.next_number += 1
            opened = self._create(drive, number)
            if opened is not None:
                self._open, self._drive = opened, drive
                self._count_written(drive, PAGE_BYTES)
                return opened

    def _create(self, drive: Drive, number: int) -> OpenSegment | None:
        try:
            with self._rows.mutex:
                return drive.create(number)
        except OSError as error:
            self.drive_failed(drive, error)
            return None

    def seal_open(self) -> None:
        """End the open segment. Whatever fails, nothing is appended to it any more.

        Its rows move from the index to the footer; without one they stay there.
        """
        opened, drive = self._open, self._drive
        if opened is None or drive is None:
            return
        self._open = self._drive = None
        segment = opened.segment
        before = segment.disk_bytes
        rows = self._rows.of(segment.number)
        has_footer = False
        try:
            self._count_written(drive, opened.seal(rows))
            has_footer = bool(rows)
            drive.save_wear()
        except OSError as error:
            if not drive.trouble.is_resting(self._clock()):
                drive.failed(error, self._clock())
            _log.warning("ssd segment %s stays unsealed: %s", segment.path, error)
        with self._rows.mutex:
            drive.resize(segment, before)
            if not rows:
                drive.remove(segment.number)
            if has_footer:
                self._rows.note_sealed(segment, rows)
            else:
                self._rows.note_ended(segment.number)

    def close(self) -> None:
        """Seal the open segment and end the threads."""
        self.seal_open()
        self._threads.shutdown()

    def seal_open_on(self, drive: Drive) -> None:
        if self._drive is drive:
            self.seal_open()

    def drive_failed(self, drive: Drive, error: Exception) -> None:
        """A write failed: leave the drive alone for a while; it may not be readable either."""
        drive.failed_writes += 1
        drive.is_doubted = True
        drive.failed(error, self._clock())
        self.seal_open_on(drive)  # after a failed write or sync its end is not to be trusted

    def _count_written(self, drive: Drive, byte_count: int) -> None:
        drive.written_bytes_total += byte_count
        self.bytes_written += byte_count
        self.budget.spend(byte_count, self._clock())
