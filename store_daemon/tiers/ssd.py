"""The SSD tier: appends records to segment files, reads them back, reclaims the oldest.

Order of a write: payload and header, fdatasync, row in the local index, return. So whatever was
acknowledged is found again after a kill, and nothing else is believed without its checksum. The
tier never raises for a failing drive: appends fail one by one, `state` says why, and after a pause
that doubles up to half a minute the next append tries again with a new segment.

Thread-safe: one writer at a time in `append`; everything else from any thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emberkv_proto.errors import IntegrityError, PreflightError
from emberkv_proto.shm_layout import align_up
from store_daemon.config import SsdSection
from store_daemon.files import DirectoryLock
from store_daemon.local_index import LocalIndex
from store_daemon.recovery import Recovered, recover
from store_daemon.tiers import segments
from store_daemon.tiers.open_segment import OpenSegment, Segment, SsdRecord
from store_daemon.tiers.segment_file import (
    aligned_memory,
    check_direct_io,
    direct_flag,
    read_record,
)
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
OK = "ok"

__all__ = ["SsdFailure", "SsdRecord", "SsdRow", "SsdTier"]


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
        lock: DirectoryLock,
        recovered: Recovered,
        clock: Callable[[], float],
    ) -> None:
        """Use `open()`."""
        self._config = config
        self._index = index
        self._directory_lock = lock
        self._clock = clock
        self._writer = threading.Lock()
        self._mutex = threading.RLock()
        """Held while rows change, in memory and in the index together."""
        self._free_pages: deque[memoryview] = deque()
        self._open: OpenSegment | None = None
        self._closed = False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._retry_at = 0.0
        self._next_number = recovered.highest_number + 1
        self._live = dict(recovered.changes.live)
        self._undeleted: dict[RowKey, SsdRow] = {}
        """Rows that the index failed to delete; tried again with the next change."""
        self._segments = {
            found.number: Segment(found.number, found.path, found.file_bytes, found.records_end)
            for found in recovered.segments
        }
        for row in self._live.values():
            self._segments[row.segment].rows[row.key] = row
        self._set_aside = {path: path.stat().st_size for path in recovered.set_aside}

        self.capacity_bytes = config.capacity_bytes
        self.state = OK
        self.corrupt_segments = recovered.corrupt_segments
        self.torn_records = recovered.torn_records
        self.rows_dropped = recovered.rows_dropped
        self.bytes_written = 0
        """To the drive: headers, padding and footers included."""
        self.payload_bytes_written = 0
        self.appended_records = 0
        self.failed_records = 0
        self.failed_reads = 0
        self.reclaimed_segments = 0

    @classmethod
    def open(
        cls, config: SsdSection, index: LocalIndex, clock: Callable[[], float] = time.monotonic
    ) -> SsdTier:
        """Lock the directory, recover what is in it and bring the index up to date.

        Raises:
            PreflightError: in use by another daemon, not writable, larger than its file system,
                turned off, or without O_DIRECT.
        """
        if config.capacity_bytes == 0:
            raise PreflightError("ssd.capacity_bytes is 0: the SSD tier is turned off")
        lock = DirectoryLock(config.path, "ssd.path")
        try:
            _check_capacity(config)
            check_direct_io(config.path, config.direct_io)
            stored = list(index.rows())  # may find the database damaged, so before the mark
            covered = index.covered_through()
            recovered = recover(config.path, stored, covered, config.direct_io)
            index.put_rows(recovered.changes.put)
            index.delete_rows(recovered.changes.delete)
            index.mark_covered(recovered.highest_number)
            return cls(config, index, lock, recovered, clock)
        except OSError as error:
            lock.release()
            raise PreflightError(f"ssd.path {config.path} cannot be used: {error}") from error
        except BaseException:
            lock.release()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, those set aside included."""
        with self._mutex:
            return sum(s.file_bytes for s in self._segments.values()) + sum(
                self._set_aside.values()
            )

    @property
    def largest_payload(self) -> int:
        """The longest part that fits in a segment."""
        return segments.largest_payload(self._config.segment_bytes)

    def recovered_rows(self) -> list[SsdRow]:
        """Every live row; after `open()`, what recovery found."""
        with self._mutex:
            return list(self._live.values())

    # -- writing -------------------------------------------------------------------------------

    def append(self, records: Sequence[SsdRecord]) -> list[SsdRow | SsdFailure]:
        """Store `records`, durably; one result for each. Blocks for the drive.

        A part that is stored already is written anew and its row replaced. Within one call the
        first record of a part counts for all.
        """
        if not self._writer.acquire(blocking=False):
            raise IntegrityError("two writers in SsdTier.append")
        try:
            return self._append(records)
        finally:
            self._writer.release()

    def _append(self, records: Sequence[SsdRecord]) -> list[SsdRow | SsdFailure]:
        outcome: dict[RowKey, SsdRow | SsdFailure] = {}
        keys: list[RowKey] = []
        waiting: deque[SsdRecord] = deque()
        for record in records:
            key = record.key
            keys.append(key)
            if key in outcome:
                continue
            refusal = self._refusal(record)
            # Overwritten below when the record is stored.
            outcome[key] = SsdFailure(refusal or self.state)
            if refusal is None:
                waiting.append(record)
        failure = self._store_all(waiting, outcome)
        for record in waiting:
            outcome[record.key] = SsdFailure(failure)
        results = [outcome[key] for key in keys]
        self.failed_records += sum(isinstance(result, SsdFailure) for result in results)
        return results

    def _store_all(
        self, waiting: deque[SsdRecord], outcome: dict[RowKey, SsdRow | SsdFailure]
    ) -> str:
        """Store from the left; what is still in `waiting` on return failed, for that reason."""
        if self._closed:
            return "ssd tier is closed"
        if self._clock() < self._retry_at:
            return self.state
        while waiting:
            try:
                target = self._open
                run = target.leading_run(waiting) if target is not None else []
                if target is None or not run:
                    target = self._open_new()
                    if target is None:
                        return (
                            f"ssd tier is full: {self.used_bytes} of {self.capacity_bytes} bytes"
                            " used; reclaim before appending"
                        )
                    run = target.leading_run(waiting)
                rows = target.write(run)
                self._record(rows, target.segment)
            except OSError as error:
                self._degrade(error)
                return self.state
            for row in rows:
                outcome[row.key] = row
                waiting.popleft()
            if self.state != OK:
                _log.info("ssd tier works again")
            self.state = OK
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        return ""

    def _refusal(self, record: SsdRecord) -> str | None:
        payload = record.payload
        if not record.is_storable:
            return "a key, part, parent or checksum is not of its size"
        if record.length < 1 or not len(payload) == payload.nbytes == align_up(record.length):
            return f"payload of {payload.nbytes} bytes for a length of {record.length}"
        if np.frombuffer(payload, np.uint8).ctypes.data % PAGE_BYTES:
            return f"payload is not on a boundary of {PAGE_BYTES} bytes"
        if payload.nbytes > self.largest_payload:
            return (
                f"payload of {record.length} bytes does not fit in a segment, which takes"
                f" {self.largest_payload}; raise ssd.segment_bytes"
            )
        return None

    def _open_new(self) -> OpenSegment | None:
        """Seal the open segment and begin another; None if the capacity is used up."""
        self._seal_open()
        config = self._config
        if self.used_bytes + config.segment_bytes > config.capacity_bytes:
            return None
        number = self._next_number
        self._next_number += 1
        opened = OpenSegment(config.path, number, config.segment_bytes, config.direct_io)
        with self._mutex:
            self._segments[number] = opened.segment
            self._open = opened
            self.bytes_written += PAGE_BYTES
        return opened

    def _record(self, rows: Sequence[SsdRow], segment: Segment) -> None:
        """Make written rows live, in the index first."""
        with self._mutex:
            self._delete_from_index()
            self._index.put_rows(rows)
            for row in rows:
                earlier = self._live.get(row.key)
                if earlier is not None:
                    del self._segments[earlier.segment].rows[row.key]
                self._live[row.key] = row
                segment.rows[row.key] = row
            end = rows[-1].end
            self.bytes_written += end - segment.records_end
            segment.records_end = end
            self.appended_records += len(rows)
            self.payload_bytes_written += sum(row.length for row in rows)

    def _seal_open(self) -> None:
        """End the open segment. Whatever fails, nothing is appended to it any more.

        Its rows are in the index; a footer only spares the next start a scan if that is lost.
        """
        if self._open is None:
            return
        opened, segment = self._open, self._open.segment
        self._open = None
        with self._mutex:
            try:
                self.bytes_written += opened.seal()
            finally:
                if not segment.rows:
                    del self._segments[segment.number]
                self._index.mark_covered(segment.number)

    def _degrade(self, error: OSError) -> None:
        self.state = f"degraded: {error}"
        self._retry_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        _log.warning("ssd tier %s", self.state)
        try:
            self._seal_open()  # after a failed write or sync its end is not to be trusted
        except OSError as again:
            _log.warning("ssd segment stays unsealed: %s", again)

    # -- reading -------------------------------------------------------------------------------

    def read_into(self, row: SsdRow, target: memoryview) -> None:
        """Read the payload of `row` into `target`: writable, 4 KiB aligned, whole pages.

        Bytes behind `row.length` are padding. A segment reclaimed meanwhile is a
        FileNotFoundError, and a read under way finishes. On any error `target` is undefined.

        Raises:
            CorruptionError: the record is another one or does not match its checksum.
            OSError: the drive failed, or the segment is gone.
        """
        wanted = align_up(row.length)
        if target.readonly or target.nbytes != len(target) or len(target) < wanted:
            raise IntegrityError(f"target must be {wanted} writable bytes")
        try:
            page = self._free_pages.pop()
        except IndexError:
            page = aligned_memory(PAGE_BYTES)
        try:
            path = self._config.path / segments.segment_name(row.segment)
            # Opened anew each time: reclaim may unlink it, and numbers are never used again.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct_flag(self._config.direct_io))
            try:
                read_record(fd, row, page, target)
            finally:
                os.close(fd)
        except BaseException:
            with self._mutex:
                self.failed_reads += 1
            raise
        finally:
            self._free_pages.append(page)

    def holds(self, row: SsdRow) -> bool:
        """Whether the part is stored where `row` says: not forgotten, reclaimed or moved since."""
        with self._mutex:
            return self._live.get(row.key) == row

    # -- removing ------------------------------------------------------------------------------

    def forget(self, rows: Sequence[SsdRow]) -> None:
        """Drop rows (a part that was written anew since stays). Space comes back by reclaim."""
        with self._mutex:
            gone = [row for row in rows if self._live.get(row.key) == row]
            self._drop(gone)

    def reclaim(self) -> list[SsdRow]:
        """Make room for one new segment: remove the oldest sealed ones and return their rows."""
        gone: list[SsdRow] = []
        with self._mutex:
            while self.used_bytes > self.capacity_bytes - self._config.segment_bytes:
                if self._set_aside:
                    path = min(self._set_aside)
                    path.unlink(missing_ok=True)
                    del self._set_aside[path]
                    continue
                open_number = self._open.segment.number if self._open else None
                sealed = [number for number in self._segments if number != open_number]
                if not sealed:
                    break
                segment = self._segments[min(sealed)]
                rows = list(segment.rows.values())
                self._drop(rows)
                gone += rows
                try:
                    segment.path.unlink(missing_ok=True)
                except OSError as error:
                    self.state = f"degraded: {error}"
                    break
                del self._segments[segment.number]
                self.reclaimed_segments += 1
        return gone

    def _drop(self, rows: Sequence[SsdRow]) -> None:
        for row in rows:
            del self._live[row.key]
            del self._segments[row.segment].rows[row.key]
            self._undeleted[row.key] = row
        try:
            self._delete_from_index()
        except OSError as error:  # rows that stay there point to nothing, or to checked bytes
            self.state = f"degraded: {error}"
            _log.warning("rows stay in the local index for now: %s", error)

    def _delete_from_index(self) -> None:
        if self._undeleted:
            self._index.delete_rows(list(self._undeleted.values()))
            self._undeleted.clear()

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Seal the open segment and give the directory up. A second call does nothing.

        The caller has ended appends; reads under way finish.
        """
        with self._writer:
            if self._closed:
                return
            self._closed = True
            try:
                self._seal_open()
            except OSError as error:
                _log.warning("ssd segment stays unsealed: %s", error)
            self._directory_lock.release()

    def check_integrity(self) -> None:
        """Assert that rows, extents, files and the local index agree. Reads no payload."""
        with self._mutex:
            by_segment = {
                key: row for segment in self._segments.values() for key, row in segment.rows.items()
            }
            assert by_segment == self._live, "rows of segments differ from the live rows"
            assert sum(len(s.rows) for s in self._segments.values()) == len(self._live)
            for segment in self._segments.values():
                size = segment.path.stat().st_size
                assert size == segment.file_bytes, f"{segment.path}: {size} bytes"
                end = PAGE_BYTES
                for row in sorted(segment.rows.values(), key=lambda row: row.offset):
                    assert row.segment == segment.number, f"{row} in segment {segment.number}"
                    assert row.offset >= end, f"{row} overlaps the record before it"
                    end = row.end
                assert end <= segment.records_end <= segment.file_bytes
            if self.state == OK:
                stored = {row.key: row for row in self._index.rows()}
                for key in self._undeleted:
                    stored.pop(key, None)
                assert stored == self._live, "local index differs from the live rows"


def _check_capacity(config: SsdSection) -> None:
    volume = os.statvfs(config.path)
    total = volume.f_blocks * volume.f_frsize
    if config.capacity_bytes > total:
        raise PreflightError(
            f"ssd.capacity_bytes is {config.capacity_bytes}, but the file system of"
            f" {config.path} has {total} bytes in all; lower it or set ssd.path to another drive"
        )
