"""Which rows of the SSD tier count now: by part, and by segment. Not thread-safe.

Rows found at start stay packed in one table with a bit each; those written since are objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from store_daemon.tiers.row_table import Mask, RowTable
from store_daemon.tiers.segments import RowKey, SsdRow, record_bytes, record_sizes


class RowBook:
    """All calls but the iterators are O(log rows).

    Args:
        found: rows by place.
        stand: which of them count.
        ranges: per segment, its rows in `found`.
    """

    def __init__(self, found: RowTable, stand: Mask, ranges: Mapping[int, range]) -> None:
        self._found = found
        self._stand = stand.copy()
        self._ranges = dict(ranges)
        self._found_counts = {
            segment: int(np.count_nonzero(stand[numbers.start : numbers.stop]))
            for segment, numbers in ranges.items()
        }
        self._standing = sum(self._found_counts.values())
        self.record_bytes = int(record_sizes(found.packed["length"][stand]).sum())
        """Of all live records, headers and padding included."""
        self._written: dict[RowKey, SsdRow] = {}
        self._by_segment: dict[int, dict[int, SsdRow]] = {}

    def __len__(self) -> int:
        return self._standing + len(self._written)

    def __iter__(self) -> Iterator[SsdRow]:
        yield from self._found.rows(np.flatnonzero(self._stand))
        yield from self._written.values()

    def __contains__(self, row: SsdRow) -> bool:
        return self._written.get(row.key) == row or self._standing_number(row) is not None

    def find(self, key: RowKey) -> SsdRow | None:
        """The row of this part. The first call may sort the rows found."""
        written = self._written.get(key)
        if written is not None or not self._standing:
            return written
        for number in self._found.find(key.block_hash):
            if self._stand[number] and (row := self._found.row(number)).key == key:
                return row
        return None

    def add(self, row: SsdRow) -> None:
        """A row was written; its part has no other."""
        assert row.key not in self._written
        self.record_bytes += record_bytes(row.length)
        self._written[row.key] = row
        self._by_segment.setdefault(row.segment, {})[row.offset] = row

    def remove(self, row: SsdRow) -> None:
        """A row counts no more."""
        self.record_bytes -= record_bytes(row.length)
        if self._written.get(row.key) == row:
            del self._written[row.key]
            rows = self._by_segment[row.segment]
            del rows[row.offset]
            if not rows:
                del self._by_segment[row.segment]
            return
        number = self._standing_number(row)
        assert number is not None, f"{row} is not live"
        self._stand[number] = False
        self._found_counts[row.segment] -= 1
        self._standing -= 1

    def count(self, segment: int) -> int:
        """Live rows of a segment."""
        return self._found_counts.get(segment, 0) + len(self._by_segment.get(segment, ()))

    def of(self, segment: int) -> list[SsdRow]:
        """Live rows of a segment, by rising offset. O(its rows)."""
        written = self._by_segment.get(segment, {})
        rows = [written[offset] for offset in sorted(written)]
        numbers = self._ranges.get(segment)
        if numbers is None or not self._found_counts[segment]:
            return rows
        stand = self._stand[numbers.start : numbers.stop]
        found = self._found.rows(np.flatnonzero(stand) + numbers.start)
        return sorted((*found, *rows), key=lambda row: row.offset) if rows else found

    def table(self) -> RowTable:
        """The rows found at start that still count, packed."""
        return self._found.take(self._stand)

    def check_integrity(self) -> None:
        """Assert that each part has one row and the counts are those of the rows."""
        assert len({row.key for row in self}) == len(self), "one part has two rows"
        assert self.record_bytes == sum(record_bytes(row.length) for row in self)
        assert self._standing == np.count_nonzero(self._stand)
        by_segment = [row for rows in self._by_segment.values() for row in rows.values()]
        assert {row.key: row for row in by_segment} == self._written
        segments = {*self._ranges, *self._by_segment}
        assert sum(map(self.count, segments)) == len(self)

    def _standing_number(self, row: SsdRow) -> int | None:
        """Number of the row among those found, if it is there and counts."""
        numbers = self._ranges.get(row.segment)
        if numbers is None:
            return None
        number = self._found.number_at(numbers.start, numbers.stop, row.offset)
        if number is None or not self._stand[number] or self._found.row(number) != row:
            return None
        return number
