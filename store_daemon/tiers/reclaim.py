"""Makes room: takes whole segments out of use, the oldest first, and keeps what is worth it.

What is kept is re-appended and its new row is in the index before the old segment goes; a kill in
between leaves both copies, and the newer counts.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

from emberkv_proto.errors import CorruptionError
from store_daemon.tiers.changes import Kept, Moved, TierChanges, choose_kept
from store_daemon.tiers.drive import Drive
from store_daemon.tiers.live_rows import LiveRows
from store_daemon.tiers.open_segment import Segment, SsdRecord
from store_daemon.tiers.segment_file import aligned_memory, direct_flag, read_record
from store_daemon.tiers.segment_writer import SegmentWriter
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow

_log = logging.getLogger(__name__)

KEPT_SHARE = 0.5
"""Of a segment, how much may be re-appended when it is reclaimed: so each one frees room."""
MOVE_BYTES = 16 << 20
"""Memory for records on their way from one segment to another."""
CORRUPT_LIMIT = 3
"""Corrupt records after which a segment is not trusted any more."""


class Reclaimer:
    """Used by the thread that writes. Changes are reported in the order in which they happened."""

    def __init__(self, segment_bytes: int, rows: LiveRows, writer: SegmentWriter) -> None:
        self._kept_bytes = int(segment_bytes * KEPT_SHARE)
        self._rows = rows
        self._writer = writer
        self.is_pinned: Callable[[SsdRow], bool] = lambda row: False
        self.is_used: Callable[[SsdRow], bool] = lambda row: False
        self.suspects: deque[Segment] = deque()
        """Segments to set aside; may name some that are gone."""
        self.reclaimed_segments = 0
        self.corrupt_segments = 0
        self.reappended_records = 0
        self.reappended_bytes = 0
        self.unkept_records = 0
        """Pinned or read, but without room when their segment was to be reclaimed."""

    def make_room(self, changes: TierChanges) -> None:
        """Remove the oldest segments until one more fits on some drive.

        Segments that are mostly pinned are passed over.
        """
        passed_over: set[int] = set()
        while True:
            usable = self._writer.usable_drives()
            if not usable or any(drive.has_room for drive in usable):
                return
            drive = next((drive for drive in usable if drive.set_aside), None)
            if drive is not None:
                self._remove_set_aside(drive)
                continue
            sealed = [
                (number, drive)
                for drive in usable
                for number, segment in drive.segments.items()
                if segment is not self._writer.open_segment and number not in passed_over
            ]
            if not sealed:
                return
            number, drive = min(sealed, key=lambda pair: pair[0])
            if self._reclaim(drive, drive.segments[number], changes):
                self.reclaimed_segments += 1
            else:
                passed_over.add(number)

    def found_corrupt(self, segment: Segment) -> None:
        """A record did not match its checksum. From any thread."""
        segment.corrupt_records += 1
        if segment.corrupt_records >= CORRUPT_LIMIT:
            self.suspects.append(segment)

    def quarantine(self, changes: TierChanges) -> None:
        """Set segments aside in which records proved corrupt again and again."""
        while self.suspects:
            segment = self.suspects.popleft()
            if segment is self._writer.open_segment:
                self._writer.seal_open()
            drive = self._rows.drive_of(segment.number)
            if drive is not None:
                self._set_aside(drive, segment, changes)

    def _remove_set_aside(self, drive: Drive) -> None:
        try:
            with self._rows.mutex:
                drive.remove_set_aside()
        except OSError as error:
            self._writer.drive_failed(drive, error)

    def _reclaim(self, drive: Drive, segment: Segment, changes: TierChanges) -> bool:
        """Keep what is worth it and remove the rest; False if the segment stays."""
        kept = self._choose(segment)
        if kept is None or not self._re_append(drive, segment, kept.pinned, changes):
            return False
        self._re_append(drive, segment, kept.read, changes)
        tried = set(kept.pinned)
        late = [r for r in self._rows.of(segment.number) if r not in tried and self.is_pinned(r)]
        if not self._re_append(drive, segment, late, changes):  # pinned while others were copied
            return False
        changes.gone += self._rows.drop_segments([segment.number])
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._writer.drive_failed(drive, error)
            return False
        with self._rows.mutex:
            drive.remove(segment.number)
        return True

    def _set_aside(self, drive: Drive, segment: Segment, changes: TierChanges) -> None:
        """Save what can be read of what is worth it, and keep the file for whoever asks why."""
        kept = self._choose(segment) or Kept(self._rows.of(segment.number), ())
        self._re_append(drive, segment, (*kept.pinned, *kept.read), changes)
        changes.lost += self._rows.drop_segments([segment.number])
        try:
            with self._rows.mutex:
                why = CorruptionError(f"{segment.corrupt_records} corrupt records")
                drive.set_segment_aside(segment, why)
            self.corrupt_segments += 1
        except OSError as error:
            self._writer.drive_failed(drive, error)

    def _choose(self, segment: Segment) -> Kept | None:
        rows = self._rows.of(segment.number)
        was_read = segment.read.copy()
        return choose_kept(
            rows,
            self.is_pinned,
            lambda row: row.key in was_read or self.is_used(row),
            self._kept_bytes,
        )

    def _re_append(
        self, drive: Drive, segment: Segment, rows: Sequence[SsdRow], changes: TierChanges
    ) -> bool:
        """Whether there was room for all of them that can be read."""
        moving = deque(rows)
        if not moving:
            return True
        try:
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | direct_flag(drive.direct_io))
        except OSError as error:
            drive.is_doubted = True
            _log.warning("ssd segment %s is reclaimed unread: %s", segment.path, error)
            return True
        try:
            while moving:
                batch = self._read_batch(fd, drive, segment, moving)
                old = {record.key: row for row, record in batch}
                waiting = deque(record for _, record in batch)
                written = self._writer.store_all(waiting)
                changes.moved += [Moved(old[row.key], row) for row in written]
                self.reappended_records += len(written)
                self.reappended_bytes += sum(row.length for row in written)
                if waiting:
                    self.unkept_records += len(waiting) + len(moving)
                    return False
        finally:
            os.close(fd)
        return True

    def _read_batch(
        self, fd: int, drive: Drive, segment: Segment, moving: deque[SsdRow]
    ) -> list[tuple[SsdRow, SsdRecord]]:
        """Read records from the left, some at once; those that cannot be read are passed over."""
        batch: list[tuple[SsdRow, SsdRecord]] = []
        page = aligned_memory(PAGE_BYTES)
        size = 0
        while moving and size < MOVE_BYTES:
            row = moving.popleft()
            payload = aligned_memory(row.length)
            error = _read(fd, row, page, payload)
            if error is None:
                batch.append((row, SsdRecord.of(row, payload)))
                size += len(payload)
                continue
            _log.warning("ssd record is not kept: %s", error)
            if isinstance(error, CorruptionError):
                self.found_corrupt(segment)
            else:
                drive.failed_reads += 1
                drive.is_doubted = True
        return batch


def _read(
    fd: int, row: SsdRow, page: memoryview, payload: memoryview
) -> CorruptionError | OSError | None:
    """What is wrong with the record; None if it was read."""
    try:
        read_record(fd, row, page, payload)
    except (CorruptionError, OSError) as error:
        return error
    return None
