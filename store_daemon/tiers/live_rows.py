"""Which row each part on SSD has, in memory, per segment and in the local index together.

What the index fails to delete is kept and tried again with the next change: until then it points to
nothing, or to bytes that are checked when they are read.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from store_daemon.local_index import LocalIndex
from store_daemon.tiers import segments
from store_daemon.tiers.backoff import Backoff
from store_daemon.tiers.drive import Drive
from store_daemon.tiers.drive_marker import KnownDrive
from store_daemon.tiers.open_segment import Segment
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow

_log = logging.getLogger(__name__)


class IndexFailedError(Exception):
    """The local index could not be written; nothing has changed."""


class LiveRows:
    """Thread-safe. `mutex` is held while rows change; who changes segments holds it as well."""

    def __init__(
        self,
        drives: tuple[Drive, ...],
        live: Mapping[RowKey, SsdRow],
        index: LocalIndex,
        clock: Callable[[], float],
    ) -> None:
        self.mutex = threading.RLock()
        self.drives = drives
        self.index_trouble = Backoff()
        self._live = dict(live)
        lengths = Counter(row.length for row in live.values())
        self.record_bytes = sum(segments.record_bytes(n) * count for n, count in lengths.items())
        """Of all live records, headers and padding included."""
        self._undeleted: dict[RowKey, SsdRow] = {}
        self._index = index
        self._clock = clock
        by_number = {n: found for drive in drives for n, found in drive.segments.items()}
        for key, row in live.items():  # there may be millions
            by_number[row.segment].rows[key] = row

    # -- asking --------------------------------------------------------------------------------

    def get(self, key: RowKey) -> SsdRow | None:
        return self._live.get(key)

    def all(self) -> list[SsdRow]:
        with self.mutex:
            return list(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def drive_of(self, number: int) -> Drive | None:
        """Where a segment is; None when it is gone."""
        for drive in self.drives:
            if number in drive.segments:
                return drive
        return None

    def segment(self, number: int) -> Segment:
        drive = self.drive_of(number)
        assert drive is not None, f"segment {number} is on no drive"
        return drive.segments[number]

    # -- changing ------------------------------------------------------------------------------

    def record(self, rows: Sequence[SsdRow], segment: Segment) -> None:
        """Make rows written to the end of `segment` live, in the index first.

        Raises IndexFailedError.
        """
        with self.mutex:
            try:
                self._delete_from_index()
                self._index.put_rows(rows)
            except OSError as error:
                raise IndexFailedError(str(error)) from error
            for row in rows:
                earlier = self._live.get(row.key)
                if earlier is not None:
                    del self.segment(earlier.segment).rows[row.key]
                    self.record_bytes -= segments.record_bytes(earlier.length)
                self._enter(row, segment)
            segment.records_end = rows[-1].end
            self.index_trouble.worked()

    def drop(self, rows: Iterable[SsdRow]) -> None:
        """Drop rows that are live."""
        with self.mutex:
            for row in rows:
                del self._live[row.key]
                del self.segment(row.segment).rows[row.key]
                self.record_bytes -= segments.record_bytes(row.length)
                self._undeleted[row.key] = row
            try:
                self._delete_from_index()
            except OSError as error:
                self.index_failed(error)

    def forget(self, rows: Sequence[SsdRow]) -> None:
        """As `drop`, but rows that are not live any more are passed over."""
        with self.mutex:
            self.drop([row for row in rows if self._live.get(row.key) == row])

    def take(self, rows: Sequence[SsdRow], highest_number: int) -> list[SsdRow]:
        """Make rows of a drive that came back live, where their part has none; return those.

        Raises OSError; nothing has changed then.
        """
        newest: dict[RowKey, SsdRow] = {}
        with self.mutex:
            for row in sorted(rows, key=lambda row: (row.segment, row.offset)):
                if row.key not in self._live:
                    newest[row.key] = row
            taken = list(newest.values())
            self._index.put_rows(taken)
            self._index.mark_covered(highest_number)
            for row in taken:
                self._enter(row, self.segment(row.segment))
                self._undeleted.pop(row.key, None)
        return taken

    def note_sealed(self, number: int) -> None:
        """The rows of all segments up to this one are in the index."""
        try:
            self._index.mark_covered(number)
        except OSError as error:  # the next start reads the footer
            self.index_failed(error)

    def note_drive(self, drive: Drive, *, has_rows: bool) -> None:
        assert drive.id is not None
        try:
            self._index.put_drive(drive.id, KnownDrive(drive.path, has_rows))
        except OSError as error:
            self.index_failed(error)

    def index_failed(self, error: Exception) -> None:
        self.index_trouble.failed(str(error), self._clock())
        _log.warning("the local index lags behind the ssd tier: %s", error)

    def _enter(self, row: SsdRow, segment: Segment) -> None:
        self._live[row.key] = row
        segment.rows[row.key] = row
        self.record_bytes += segments.record_bytes(row.length)

    def _delete_from_index(self) -> None:
        if self._undeleted:
            self._index.delete_rows(list(self._undeleted.values()))
            self._undeleted.clear()

    def check_integrity(self) -> None:
        """Assert that rows, extents and, while it works, the local index agree."""
        with self.mutex:
            rows: dict[RowKey, SsdRow] = {}
            count = 0
            numbers: list[int] = []
            for drive in self.drives:
                for number, segment in drive.segments.items():
                    assert number == segment.number
                    numbers.append(number)
                    rows |= segment.rows
                    count += len(segment.rows)
                    _check_extents(segment)
            assert len(set(numbers)) == len(numbers), "a segment number is used twice"
            assert rows == self._live, "rows of segments differ from the live rows"
            assert count == len(self._live)
            sizes = (segments.record_bytes(row.length) for row in self._live.values())
            assert sum(sizes) == self.record_bytes
            if self.index_trouble.why is None:
                stored = {row.key: row for row in self._index.rows()}
                for key in self._undeleted:
                    stored.pop(key, None)
                assert stored == self._live, "local index differs from the live rows"


def _check_extents(segment: Segment) -> None:
    end = PAGE_BYTES
    for row in sorted(segment.rows.values(), key=lambda row: row.offset):
        assert row.segment == segment.number, f"{row} in segment {segment.number}"
        assert row.offset >= end, f"{row} overlaps the record before it"
        end = row.end
    assert end <= segment.records_end
