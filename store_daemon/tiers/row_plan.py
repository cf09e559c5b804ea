"""Which of the rows found on all drives are live, and what the index must be told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from store_daemon.local_index import IndexChanges, IndexContent
from store_daemon.recovery import FoundSegment
from store_daemon.tiers.row_book import RowBook
from store_daemon.tiers.row_table import RowTable, newest
from store_daemon.tiers.segments import SsdRow


@dataclass(frozen=True, slots=True)
class RowPlan:
    rows: RowBook
    changes: IndexChanges
    rows_dropped: int
    """Rows that the index counted on and whose record is no more."""


def plan_rows(content: IndexContent, found: Iterable[FoundSegment]) -> RowPlan:
    """Where a part has several records the newest counts."""
    kept = sorted(found, key=lambda segment: segment.number)
    table = RowTable.joined([segment.rows for segment in kept])
    ranges: dict[int, range] = {}
    end = 0
    for segment in kept:
        ranges[segment.number] = range(end, end + len(segment.rows))
        end += len(segment.rows)
    stand = newest(table)
    changes = changes_for(content, kept)
    superseded = tuple(table.rows(np.flatnonzero(~stand)))
    missing = Counter(dict(content.sealed))
    for number, gone in content.forgotten.items():
        if number in content.sealed:
            missing[number] -= len(gone)
    missing.update(row.segment for row in content.rows)
    missing.subtract({segment.number: len(segment.rows) for segment in kept})
    dropped = sum(count for count in missing.values() if count > 0)
    return RowPlan(
        RowBook(table, stand, ranges),
        IndexChanges(changes.put, (*changes.forget, *superseded), changes.sealed, changes.drop),
        dropped,
    )


def changes_for(content: IndexContent, kept: Iterable[FoundSegment]) -> IndexChanges:
    """What the index, which says `content`, must be told so that it fits the segments."""
    held = {(row.segment, row.offset) for row in content.rows}
    put: list[SsdRow] = []
    forget: list[SsdRow] = []
    sealed: dict[int, int] = {}
    numbers: set[int] = set()
    for segment in kept:
        numbers.add(segment.number)
        forget += segment.gone
        if not segment.is_sealed:
            put += [row for row in segment.rows if (row.segment, row.offset) not in held]
        elif segment.number not in content.sealed:
            sealed[segment.number] = len(segment.rows) + len(segment.gone)
    drop = tuple(sorted(content.segments - numbers))
    return IndexChanges(tuple(put), tuple(forget), sealed, drop)
