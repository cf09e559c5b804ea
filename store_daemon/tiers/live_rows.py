"""Which row each part on SSD has, in memory, per segment and in the local index together.

What the index cannot be told to forget is kept and tried again with the next change: until then it
points to nothing, or to bytes that are checked when they are read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from store_daemon.local_index import IndexChanges, IndexContent, LocalIndex
from store_daemon.recovery import FoundSegment
from store_daemon.tiers.backoff import Backoff
from store_daemon.tiers.drive import Drive
from store_daemon.tiers.drive_marker import KnownDrive
from store_daemon.tiers.open_segment import Segment
from store_daemon.tiers.row_book import RowBook
from store_daemon.tiers.row_plan import changes_for
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow

_log = logging.getLogger(__name__)


class IndexFailedError(Exception):
    """The local index could not be written; nothing has changed."""


class LiveRows:
    """Thread-safe. `mutex` is held while rows change; who changes segments holds it as well."""

    def __init__(
        self,
        drives: tuple[Drive, ...],
        rows: RowBook,
        index: LocalIndex,
        clock: Callable[[], float],
    ) -> None:
        self.mutex = threading.RLock()
        self.drives = drives
        self.index_trouble = Backoff()
        self._live = rows
        self._unforgotten: list[SsdRow] = []
        self._undropped: set[int] = set()
        self._index = index
        self._clock = clock

    # -- asking --------------------------------------------------------------------------------

    def get(self, key: RowKey) -> SsdRow | None:
        return self._live.find(key)

    def __contains__(self, row: SsdRow) -> bool:
        return row in self._live

    def all(self) -> list[SsdRow]:
        with self.mutex:
            return list(self._live)

    def found(self) -> RowTable:
        """Those of an earlier life, packed."""
        with self.mutex:
            return self._live.table()

    def of(self, number: int) -> list[SsdRow]:
        """Those of a segment, by rising offset."""
        with self.mutex:
            return self._live.of(number)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def record_bytes(self) -> int:
        """Of all live records, headers and padding included."""
        return self._live.record_bytes

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
                self._forget_in_index()
                self._index.put_rows(rows)
            except OSError as error:
                raise IndexFailedError(str(error)) from error
            for row in rows:
                earlier = self._live.find(row.key)
                if earlier is not None:
                    self._live.remove(earlier)
                    self._unforgotten.append(earlier)
                self._live.add(row)
            segment.records_end = rows[-1].end
            self.index_trouble.worked()
            self._try_to_forget()

    def forget(self, rows: Sequence[SsdRow]) -> None:
        """Drop rows; those that are not live any more are passed over."""
        with self.mutex:
            for row in rows:
                if row in self._live:
                    self._live.remove(row)
                    self._unforgotten.append(row)
            self._try_to_forget()

    def drop_segments(self, numbers: Iterable[int]) -> list[SsdRow]:
        """Drop the rows of segments that are no more, or not to be had for now; return them."""
        with self.mutex:
            gone: list[SsdRow] = []
            for number in numbers:
                gone += self._live.of(number)
                self._undropped.add(number)
                self.segment(number).is_sealed = False
            for row in gone:
                self._live.remove(row)
            self._try_to_forget()
        return gone

    def take(self, found: Sequence[FoundSegment], highest_number: int) -> list[SsdRow]:
        """Make rows of a drive that came back live, where their part has none; return those.

        Raises OSError; nothing has changed then.
        """
        newest: dict[RowKey, SsdRow] = {}
        superseded: list[SsdRow] = []
        with self.mutex:
            for segment in sorted(found, key=lambda segment: segment.number):
                for row in segment.rows:
                    if self._live.find(row.key) is not None:
                        superseded.append(row)
                        continue
                    if row.key in newest:
                        superseded.append(newest[row.key])
                    newest[row.key] = row
            self._forget_in_index()
            changes = changes_for(IndexContent(), found)
            self._index.apply(
                IndexChanges(changes.put, (*changes.forget, *superseded), changes.sealed, ())
            )
            self._index.mark_covered(highest_number)
            for row in newest.values():
                self._live.add(row)
        return list(newest.values())

    def note_sealed(self, segment: Segment, rows: Sequence[SsdRow]) -> None:
        """Its footer holds `rows`: what was live when it was begun."""
        with self.mutex:
            gone = [row for row in rows if row not in self._live]  # forgotten since
            try:
                self._forget_in_index()
                self._index.mark_sealed(segment.number, len(rows), gone)
                segment.is_sealed = True
            except OSError as error:  # the next start reads the footer
                self.index_failed(error)

    def note_ended(self, number: int) -> None:
        """A segment without footer: its rows, if any, stay in the index."""
        with self.mutex:
            try:
                self._index.mark_covered(number)
            except OSError as error:  # the next start reads the records
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

    def _try_to_forget(self) -> None:
        try:
            self._forget_in_index()
        except OSError as error:
            self.index_failed(error)

    def _forget_in_index(self) -> None:
        if self._unforgotten:
            self._index.forget_rows(self._unforgotten)
            self._unforgotten.clear()
        if self._undropped:
            self._index.drop_segments(self._undropped)
            self._undropped.clear()

    def check_integrity(self) -> None:
        """Assert that rows, extents and, while it works, the local index agree."""
        with self.mutex:
            self._live.check_integrity()
            numbers = [number for drive in self.drives for number in drive.segments]
            assert len(set(numbers)) == len(numbers), "a segment number is used twice"
            assert sum(map(self._live.count, numbers)) == len(self._live)
            for number in numbers:
                segment = self.segment(number)
                assert number == segment.number
                _check_extents(segment, self._live.of(number))
            if self.index_trouble.why is None:
                self._check_index([self.segment(number) for number in numbers])

    def _check_index(self, segments: Sequence[Segment]) -> None:
        """Assert that the next start would find the live rows."""
        content = self._index.content()
        unsealed = [segment.number for segment in segments if not segment.is_sealed]
        live = {row for number in unsealed for row in self._live.of(number)}
        assert set(content.rows) == live, "local index differs from the live rows"
        for segment in segments:
            gone = content.forgotten.get(segment.number, frozenset())
            rows = self._live.of(segment.number)
            assert not any(row.offset in gone for row in rows), "a row is live and forgotten"
            if segment.is_sealed:
                missing = content.sealed[segment.number] - len(rows)
                assert missing == len(gone), f"{segment}: {missing} rows are gone"


def _check_extents(segment: Segment, rows: Sequence[SsdRow]) -> None:
    end = PAGE_BYTES
    for row in rows:
        assert row.segment == segment.number, f"{row} in segment {segment.number}"
        assert row.offset >= end, f"{row} overlaps the record before it"
        end = row.end
    assert end <= segment.records_end
