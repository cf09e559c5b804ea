"""The SSD tier: appends records to segment files, reads them back, reclaims the oldest.

Order of a write: payload and header, fdatasync, row in the local index, return. So whatever was
acknowledged is found again after a kill, and nothing else is believed without its checksum. The
tier never raises for a failing drive: its writes go to the others, `drive_states` says why, and
after a pause that doubles up to half a minute it is tried again. The rows of a drive that cannot be
read are dropped, and come back with it.

Thread-safe: one writer at a time in `append`, `upkeep` and `reclaim`; everything else from any
thread. `upkeep` and `reclaim` say what they did with rows that the caller knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.errors import CorruptionError, IntegrityError, PreflightError
from emberkv_proto.shm_layout import align_up
from store_daemon.config import SsdSection
from store_daemon.local_index import IndexContent, LocalIndex
from store_daemon.tiers import segments
from store_daemon.tiers.changes import TierChanges
from store_daemon.tiers.drive import OK, Drive, DriveState
from store_daemon.tiers.live_rows import LiveRows
from store_daemon.tiers.open_segment import Segment, SsdRecord
from store_daemon.tiers.reclaim import Reclaimer
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.scrub import Scrubber, ScrubStep
from store_daemon.tiers.segment_file import aligned_memory, direct_flag, read_record
from store_daemon.tiers.segment_writer import SegmentWriter
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow
from store_daemon.tiers.start import StartedTier, current, start_drives

_log = logging.getLogger(__name__)

__all__ = ["OK", "ScrubStep", "SsdFailure", "SsdRecord", "SsdRow", "SsdTier"]


@dataclass(frozen=True, slots=True)
class SsdFailure:
    """A record that was not stored."""

    reason: str


class SsdTier:
    """Counters are plain ints for the metrics to read."""

    def __init__(
        self,
        config: SsdSection,
        index: LocalIndex,
        started: StartedTier,
        clock: Callable[[], float],
    ) -> None:
        """Use `open()`."""
        self._config = config
        self._node_id = index.node_id
        self._index = index
        self._clock = clock
        self._writing_lock = threading.Lock()
        self._free_pages: deque[memoryview] = deque()
        self._expected = started.expected
        self._closed = False
        self._drives = started.drives
        self._rows = LiveRows(started.drives, started.rows, index, clock)
        self._writer = SegmentWriter(config, self._rows, started.highest_number + 1, clock)
        self._reclaimer = Reclaimer(config.segment_bytes, self._rows, self._writer)
        self._scrubber = Scrubber(self._rows, self._read_unseen)
        self._corrupt_at_start = started.corrupt_segments

        self.torn_records = started.torn_records
        self.rows_dropped = started.rows_dropped
        self.payload_bytes_written = 0
        """Of the records that were appended; each counts once, however often it moves."""
        self.appended_records = 0
        self.failed_records = 0
        self.failed_reads = 0

    @classmethod
    def open(
        cls, config: SsdSection, index: LocalIndex, clock: Callable[[], float] = time.monotonic
    ) -> SsdTier:
        """Lock the directories, recover what is in them and bring the index up to date.

        Of several drives some may be missing.

        Raises:
            PreflightError: in use by another daemon, not writable, larger than its file system,
                turned off, or without O_DIRECT.
        """
        return cls(config, index, start_drives(config, index, clock()), clock)

    # -- asking --------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """OK, or what is degraded and why."""
        problems = [drive.state_text for drive in self._drives if drive.trouble.why is not None]
        if self._rows.index_trouble.why is not None:
            problems.append(f"degraded: {self._rows.index_trouble.why}")
        return "; ".join(problems) or OK

    @property
    def is_writable(self) -> bool:
        """Whether an append would be tried now: a drive, and the index, did not just fail."""
        is_resting = self._rows.index_trouble.is_resting(self._clock())
        return not (self._closed or is_resting) and bool(self._writer.usable_drives())

    def drive_states(self) -> tuple[DriveState, ...]:
        return tuple(drive.state() for drive in self._drives)

    @property
    def capacity_bytes(self) -> int:
        return sum(drive.capacity_bytes for drive in self._drives)

    @property
    def used_bytes(self) -> int:
        """What all segment files take on their drives, those set aside included."""
        return sum(drive.used_bytes for drive in self._drives)

    @property
    def bytes_written(self) -> int:
        """To the drives: headers, padding, footers and what was re-appended included."""
        return self._writer.bytes_written

    @property
    def written_bytes_total(self) -> int:
        """Ever written to the drives, over all lives: their wear."""
        return sum(drive.written_bytes_total for drive in self._drives)

    @property
    def write_amplification(self) -> float:
        """Bytes written to the drives for each payload byte taken, in this life; 0 before one."""
        if not self.payload_bytes_written:
            return 0.0
        return self.bytes_written / self.payload_bytes_written

    @property
    def write_delay_seconds(self) -> float:
        """How long writes must wait for ssd.write_bytes_per_second; the caller waits, not `append`.

        What is written all the same is waited for later.
        """
        return self._writer.budget.delay(self._clock())

    @property
    def write_bytes_per_second(self) -> int:
        """0 is no limit."""
        return self._writer.budget.per_second

    def set_write_rate(self, bytes_per_second: int) -> None:
        """0 is no limit."""
        self._writer.budget.per_second = bytes_per_second

    @property
    def corrupt_segments(self) -> int:
        """Found damaged at start, or set aside since."""
        return self._corrupt_at_start + self._reclaimer.corrupt_segments

    @property
    def reclaimed_segments(self) -> int:
        return self._reclaimer.reclaimed_segments

    @property
    def reappended_records(self) -> int:
        return self._reclaimer.reappended_records

    @property
    def reappended_bytes(self) -> int:
        """Payload bytes that reclaim wrote anew."""
        return self._reclaimer.reappended_bytes

    @property
    def unkept_records(self) -> int:
        """Pinned or read, but without room when their segment was to be reclaimed."""
        return self._reclaimer.unkept_records

    @property
    def segment_bytes(self) -> int:
        return self._config.segment_bytes

    @property
    def largest_payload(self) -> int:
        """The longest part that fits in a segment."""
        return segments.largest_payload(self._config.segment_bytes)

    @property
    def wants_upkeep(self) -> bool:
        """Whether `upkeep` has something to do beside making room."""
        now = self._clock()
        return any(drive.is_doubted or drive.trouble.is_due(now) for drive in self._drives) or bool(
            self._reclaimer.suspects
        )

    @property
    def live_records(self) -> int:
        return len(self._rows)

    @property
    def live_bytes(self) -> int:
        """Of all live records, headers and padding included."""
        return self._rows.record_bytes

    def recovered_rows(self) -> list[SsdRow]:
        """Every live row. O(rows)."""
        return self._rows.all()

    def found_rows(self) -> RowTable:
        """After `open()`, what recovery found, packed."""
        return self._rows.found()

    def segment_path(self, row: SsdRow) -> Path:
        """The file that the record of a live row is in."""
        return self._rows.segment(row.segment).path

    def holds(self, row: SsdRow) -> bool:
        """Whether the part is stored where `row` says: not forgotten, reclaimed or moved since."""
        return row in self._rows

    def keep(self, is_pinned: Callable[[SsdRow], bool], is_used: Callable[[SsdRow], bool]) -> None:
        """Let reclaim ask, from the thread that writes, what must stay on SSD and what is worth it
        though the tier has not read it."""
        self._reclaimer.is_pinned, self._reclaimer.is_used = is_pinned, is_used

    # -- writing -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if not self._writing_lock.acquire(blocking=False):
            raise IntegrityError("two writers in the SSD tier")
        try:
            yield
        finally:
            self._writing_lock.release()

    def append(self, records: Sequence[SsdRecord]) -> list[SsdRow | SsdFailure]:
        """Store `records`, durably; one result for each. Blocks for the drive.

        A part that is stored already is written anew and its row replaced. Within one call the
        first record of a part counts for all.
        """
        with self._writing():
            outcome: dict[RowKey, SsdRow | SsdFailure] = {}
            waiting: deque[SsdRecord] = deque()
            for record in records:
                if record.key in outcome:
                    continue
                refusal = record.refusal(self.largest_payload)
                # Overwritten below when the record is stored.
                outcome[record.key] = SsdFailure(refusal or self.state)
                if refusal is None:
                    waiting.append(record)
            rows = [] if self._closed else self._writer.store_all(waiting)
            outcome |= {row.key: row for row in rows}
            if waiting:
                failure = SsdFailure(self._why_not_stored())
                outcome |= {record.key: failure for record in waiting}
            self.appended_records += len(rows)
            self.payload_bytes_written += sum(row.length for row in rows)
            results = [outcome[record.key] for record in records]
            self.failed_records += sum(isinstance(result, SsdFailure) for result in results)
            return results

    def _why_not_stored(self) -> str:
        if self._closed:
            return "ssd tier is closed"
        is_index_at_fault = self._rows.index_trouble.is_resting(self._clock())
        if is_index_at_fault or not self._writer.usable_drives():
            return self.state
        return (
            f"ssd tier is full: {self.used_bytes} of {self.capacity_bytes} bytes used;"
            " reclaim before appending"
        )

    # -- reading -------------------------------------------------------------------------------

    def read_into(self, row: SsdRow, target: memoryview) -> None:
        """Read the payload of `row` into `target`: writable, 4 KiB aligned, whole pages.

        Bytes behind `row.length` are padding. A record that was re-appended meanwhile is read
        where it is now. A segment reclaimed meanwhile is a FileNotFoundError, and a read under way
        finishes. On any error `target` is undefined.

        Raises:
            CorruptionError: the record is another one or does not match its checksum.
            OSError: the drive failed, or the segment is gone.
        """
        wanted = align_up(row.length)
        if target.readonly or target.nbytes != len(target) or len(target) < wanted:
            raise IntegrityError(f"target must be {wanted} writable bytes")
        try:
            try:
                self._read(row, target)
            except FileNotFoundError:
                now = self._rows.get(row.key)
                if now is None or now == row or not is_same_content(now, row):
                    raise
                self._read(now, target)
        except BaseException:
            with self._rows.mutex:
                self.failed_reads += 1
            raise

    def _read(self, row: SsdRow, target: memoryview) -> None:
        self._read_unseen(row, target).read.add(row.key)

    def _read_unseen(self, row: SsdRow, target: memoryview) -> Segment:
        """Read without counting it as a use; returns the segment."""
        drive = self._rows.drive_of(row.segment)
        segment = drive.segments.get(row.segment) if drive is not None else None
        if drive is None or segment is None:
            raise FileNotFoundError(f"segment {row.segment} is gone")
        try:
            page = self._free_pages.pop()
        except IndexError:
            page = aligned_memory(PAGE_BYTES)
        try:
            # Opened anew each time: reclaim may unlink it, and numbers are never used again.
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | direct_flag(drive.direct_io))
            try:
                read_record(fd, row, page, target)
            finally:
                os.close(fd)
        except CorruptionError:
            self._reclaimer.found_corrupt(segment)
            raise
        except OSError:
            if row.segment in drive.segments:  # and not reclaimed meanwhile
                drive.failed_reads += 1
                drive.is_doubted = True
            raise
        finally:
            self._free_pages.append(page)
        return segment

    def scrub(self, most_bytes: int) -> ScrubStep:
        """Check the next records; one caller at a time, but beside readers and the writer.

        What is found corrupt stays live until it is forgotten.
        """
        return self._scrubber.step(most_bytes)

    def restart_scrub(self) -> None:
        """Let the next step begin with the oldest record. Not while one is under way."""
        self._scrubber.restart()

    # -- removing ------------------------------------------------------------------------------

    def forget(self, rows: Sequence[SsdRow]) -> None:
        """Drop rows (a part that was written anew since stays). Space comes back by reclaim."""
        self._rows.forget(rows)

    def reclaim(self) -> TierChanges:
        """Make room for one new segment: remove the oldest sealed ones.

        What is pinned, and what was used since it was written, is re-appended first, up to half of
        a segment; a kill in between leaves both copies, and the newer counts. Segments of which
        more than half is pinned stay.
        """
        changes = TierChanges()
        with self._writing():
            self._reclaimer.make_room(changes)
        return changes

    def upkeep(self) -> TierChanges:
        """Try drives that failed, take corrupt segments out of use, then as `reclaim`."""
        changes = TierChanges()
        with self._writing():
            for drive in self._drives if not self._closed else ():
                self._look_after(drive, changes)
            self._reclaimer.quarantine(changes)
            self._reclaimer.make_room(changes)
        return changes

    def _look_after(self, drive: Drive, changes: TierChanges) -> None:
        if drive.is_attached and drive.is_doubted:
            drive.is_doubted = False
            try:
                drive.check_readable()
            except (OSError, PreflightError) as error:
                self._lose(drive, error, changes)
                return
        if not drive.trouble.is_due(self._clock()):
            return
        if not drive.is_attached:
            self._bring_back(drive, changes)
            return
        try:
            drive.try_writing()
        except OSError as error:
            self._writer.drive_failed(drive, error)
        else:
            drive.worked()

    def _lose(self, drive: Drive, error: Exception, changes: TierChanges) -> None:
        """A drive cannot be read: its blocks are misses until it is back."""
        self._writer.seal_open_on(drive)
        drive.failed(error, self._clock())
        with self._rows.mutex:
            # Before the rows are dropped: they are not forgotten ones.
            self._rows.note_drive(drive, has_rows=False)
            rows = self._rows.drop_segments(drive.segments)
            drive.detach()
        changes.lost += rows
        _log.warning("ssd drive %s is lost with %d records", drive.path, len(rows))

    def _bring_back(self, drive: Drive, changes: TierChanges) -> None:
        """Try to attach a drive again and take what is on it, as far as it is not elsewhere."""
        others = [other for other in self._drives if other is not drive]
        taken = {number for other in others for number in other.segments}
        try:
            drive.attach(self._node_id, drive.id or self._expected.get(drive.path))
            if any(other.is_attached and other.id == drive.id for other in others):
                raise PreflightError("it is the same drive as another of ssd.paths")
            with self._rows.mutex:
                found = drive.recover(IndexContent(), 0, taken)
                highest = max(self._writer.next_number - 1, found.highest_number)
                self._writer.next_number = highest + 1
                rows = self._rows.take(current(found.segments, self._index), highest)
        except (OSError, PreflightError) as error:
            with self._rows.mutex:
                drive.detach()
            drive.failed(error, self._clock())
            return
        self._rows.note_drive(drive, has_rows=True)
        self._corrupt_at_start += found.corrupt_segments
        self.torn_records += found.torn_records
        changes.found += rows
        drive.worked()
        _log.info("ssd drive %s brought back %d records", drive.path, len(rows))

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Seal the open segment and give the directories up. A second call does nothing.

        The caller has ended appends; reads under way finish.
        """
        with self._writing_lock:
            if self._closed:
                return
            self._closed = True
            self._writer.close()
            for drive in self._drives:
                drive.release()

    def check_integrity(self) -> None:
        """Assert that rows, extents, files and the local index agree. Reads no payload.

        Not while somebody writes: files change before what is known of them.
        """
        with self._rows.mutex:
            for drive in self._drives:
                drive.check_integrity()
            self._rows.check_integrity()


def is_same_content(one: SsdRow, other: SsdRow) -> bool:
    """Whether two rows name the same bytes of the same part, wherever they are."""
    return (one.key, one.length, one.checksum) == (other.key, other.length, other.checksum)
