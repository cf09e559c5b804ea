"""Start of the SSD tier: which rows are live, after whatever end the last daemon came to.

The truth is in the segment files, the local index is its cache. A sealed segment's rows are those
of its footer, but for the ones the index says were forgotten since. The rows of a segment without
footer are in the index; where the index does not cover it, its records are read too, one after the
other up to the first that is torn. Scanning never looks behind a torn record: payload bytes are
strangers' and could be made to look like a record. Nothing is ever appended to a file found at
start; an open one is sealed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from emberkv_proto.errors import CorruptionError
from emberkv_proto.types import NamespaceId
from store_daemon.local_index import IndexContent
from store_daemon.tiers import segments
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.segment_file import SegmentReader, seal_segment
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow

_log = logging.getLogger(__name__)
CORRUPT_SUFFIX = ".corrupt"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file that stays in use."""

    number: int
    path: Path
    records_end: int
    rows: RowTable
    """Of every readable record that was not forgotten, by rising offset."""
    is_sealed: bool
    """Whether its footer holds all of its rows."""
    gone: tuple[SsdRow, ...]
    """Rows of the footer that the index must be told do not count."""

    def without(self, namespaces: Iterable[NamespaceId]) -> FoundSegment:
        """The segment with the rows of these namespaces among those that are gone."""
        ids = np.ascontiguousarray(self.rows.packed["namespace_id"]).view("<u8").reshape(-1, 2)
        is_out = np.zeros(len(self.rows), np.bool_)
        for namespace_id in namespaces:
            is_out |= (ids == np.frombuffer(namespace_id, "<u8")).all(axis=1)
        gone = (*self.gone, *self.rows.take(is_out)) if is_out.any() else self.gone
        return replace(self, rows=self.rows.take(~is_out), gone=gone)


@dataclass(frozen=True, slots=True)
class Recovered:
    """One directory after repair."""

    segments: tuple[FoundSegment, ...]
    set_aside: tuple[Path, ...]
    """Unreadable segment files, also those of earlier starts."""
    highest_number: int
    corrupt_segments: int
    torn_records: int


@dataclass(frozen=True, slots=True)
class _Inspection:
    rows: RowTable
    records_end: int
    is_sealed: bool = False
    torn: int = 0
    damaged: bool = False
    gone: tuple[SsdRow, ...] = ()
    """Rows of the footer that the index must be told do not count."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the index says about one segment."""

    rows: Sequence[SsdRow]
    forgotten: frozenset[int]
    is_covered: bool
    is_sealed: bool
    """Its rows are in its footer."""


def recover(
    directory: Path, content: IndexContent, covered_through: int, direct_io: bool
) -> Recovered:
    """Inspect and repair every segment file in `directory`.

    Files without a usable record are removed, or set aside under another name when they are
    damaged. Files that are not ours are left alone.

    Raises:
        OSError: the directory itself cannot be read.
    """
    by_segment: defaultdict[int, list[SsdRow]] = defaultdict(list)
    for row in content.rows:
        by_segment[row.segment].append(row)
    kept: list[FoundSegment] = []
    set_aside: list[Path] = []
    corrupt = torn = highest = 0
    for path in sorted(directory.iterdir()):
        number = segments.segment_number(path.name.removesuffix(CORRUPT_SUFFIX))
        if number is None:
            continue
        highest = max(highest, number)
        if path.name.endswith(CORRUPT_SUFFIX):
            set_aside.append(path)
            continue
        known = _Known(
            by_segment.get(number, ()),
            content.forgotten.get(number, frozenset()),
            number <= covered_through,
            number in content.sealed,
        )
        try:
            with SegmentReader(path, direct_io) as reader:
                found = _inspect(reader, number, known)
        except (OSError, CorruptionError) as error:
            corrupt += 1
            set_aside.append(set_segment_aside(path, error))
            continue
        corrupt += found.damaged
        torn += found.torn
        if not len(found.rows):
            path.unlink()
            continue
        kept.append(
            FoundSegment(number, path, found.records_end, found.rows, found.is_sealed, found.gone)
        )
    return Recovered(tuple(kept), tuple(set_aside), highest, corrupt, torn)


def _inspect(reader: SegmentReader, number: int, known: _Known) -> _Inspection:
    """Raises CorruptionError if the file is damaged and holds nothing, OSError if unreadable."""
    if reader.file_bytes == 0:  # killed while creating it
        return _Inspection(RowTable.of(()), PAGE_BYTES)
    never_begun = not any(reader.page(0))
    damaged = _has_bad_header(reader, number)
    footer = _footer(reader, number)
    if footer is not None and not damaged:
        return _read_footer(reader, footer, known)
    gone: tuple[SsdRow, ...] = ()
    believed = [row for row in known.rows if row.end <= reader.file_bytes]
    if damaged:
        # Something wrote over the file: believe only what reads back whole.
        listed = [
            row for row in (footer.rows if footer else ()) if row.offset not in known.forgotten
        ]
        candidates = {row.offset: row for row in (*believed, *listed)}.values()
        believed = [row for row in candidates if _is_whole(reader, row)]
        whole = {row.offset for row in believed}
        gone = tuple(row for row in listed if row.offset not in whole)
    known_end = max((row.end for row in believed), default=PAGE_BYTES)
    scanned: list[SsdRow] = []
    scanned_end, torn = PAGE_BYTES, 0
    if footer is None and (known.is_sealed or not known.is_covered):
        scanned, scanned_end, torn = _scan(reader, number, {row.offset: row for row in believed})
    by_offset = {row.offset: row for row in (*scanned, *believed)}
    rows = [by_offset[offset] for offset in sorted(by_offset) if offset not in known.forgotten]
    if damaged and not rows:
        if never_begun and not torn and not known.is_covered:
            return _Inspection(RowTable.of(()), PAGE_BYTES)
        raise CorruptionError(f"segment {number}: header damaged, no record readable")
    if footer is not None:
        table = RowTable.of(rows)
        return _Inspection(table, footer.start, True, 0, True, gone)
    records_end = max(scanned_end, known_end)
    is_sealed = False
    if rows:
        try:
            seal_segment(reader.fd, number, rows, records_end)
            is_sealed = True
        except OSError as error:  # a full or failing drive: tried again at the next start
            _log.warning("segment %d stays unsealed: %s", number, error)
    return _Inspection(RowTable.of(rows), records_end, is_sealed, torn, damaged)


def _read_footer(reader: SegmentReader, footer: _Footer, known: _Known) -> _Inspection:
    """A sealed segment that is as it should be."""
    table = footer.rows
    gone: tuple[SsdRow, ...] = ()
    if known.forgotten:
        forgotten = np.array(sorted(known.forgotten), np.uint64)
        counts = ~np.isin(table.packed["offset"], forgotten)
        if not known.is_sealed:
            gone = tuple(table.take(~counts))
        table = table.take(counts)
    # The footer was made of these, so they are in it; more would be an index of other files.
    extra = [
        row
        for row in known.rows
        if row.end <= footer.start
        and footer.rows.number_at(0, len(footer.rows), row.offset) is None
    ]
    if not extra:
        return _Inspection(table, footer.start, True, gone=gone)
    rows = sorted((*table, *extra), key=lambda row: row.offset)
    return _Inspection(RowTable.of(rows), footer.start)


def _has_bad_header(reader: SegmentReader, number: int) -> bool:
    try:
        segments.check_segment_header(reader.page(0), number)
    except CorruptionError as error:
        _log.warning("segment %d: %s", number, error)
        return True
    return False


def _is_whole(reader: SegmentReader, row: SsdRow) -> bool:
    try:
        reader.check_record(row)
    except (CorruptionError, OSError):
        return False  # counted by the caller as a dropped row
    return True


@dataclass(frozen=True, slots=True)
class _Footer:
    rows: RowTable
    start: int


def _footer(reader: SegmentReader, number: int) -> _Footer | None:
    """None if the segment was not sealed or its footer is damaged: then its records are read."""
    last = reader.file_bytes - PAGE_BYTES
    if last < PAGE_BYTES or last % PAGE_BYTES:
        return None
    try:
        trailer = segments.unpack_trailer(reader.page(last), number, reader.file_bytes)
        start = last - trailer.table_bytes
        table = reader.pages(start, trailer.table_bytes) if trailer.rows else memoryview(b"")
        rows = segments.footer_table(table, trailer, number, reader.file_bytes)
        return _Footer(RowTable(rows), start)
    except CorruptionError:
        return None


def _scan(
    reader: SegmentReader, number: int, known: Mapping[int, SsdRow]
) -> tuple[list[SsdRow], int, int]:
    """Records from the first on, where they end, and 1 if a torn one stopped it.

    Records that the index knew were acknowledged: their payload is not read here.
    """
    rows: list[SsdRow] = []
    offset = PAGE_BYTES
    while offset + PAGE_BYTES <= reader.file_bytes:
        page = reader.page(offset)
        if not any(page):
            return rows, offset, 0
        try:
            row = segments.unpack_record_header(page, number, offset)
            if known.get(offset) != row:
                reader.check_record(row)
        except CorruptionError as error:
            _log.info("segment %d is torn at byte %d: %s", number, offset, error)
            return rows, offset, 1
        rows.append(row)
        offset = row.end
    return rows, offset, int(offset < reader.file_bytes)


def set_segment_aside(path: Path, why: Exception) -> Path:
    """Rename a segment file that is not to be read any more. Raises OSError."""
    aside = path.with_name(path.name + CORRUPT_SUFFIX)
    path.rename(aside)
    _log.warning("segment %s is set aside as %s: %s", path.name, aside.name, why)
    return aside
