"""Start of the SSD tier: which rows are live, after whatever end the last daemon came to.

The truth is in the segment files, the local index is its cache. A segment up to the index's
`covered_through` has all its rows there; what is missing from it was forgotten on purpose. Of
later segments the footer is read or, where there is none, the records one after the other up to
the first that is torn. Scanning never looks behind a torn record: payload bytes are strangers' and
could be made to look like a record. Nothing is ever appended to a file found at start; an open one
is sealed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.errors import CorruptionError
from store_daemon.tiers import segments
from store_daemon.tiers.segment_file import SegmentReader, seal_segment
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow

_log = logging.getLogger(__name__)
CORRUPT_SUFFIX = ".corrupt"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file that stays in use."""

    number: int
    path: Path
    file_bytes: int
    records_end: int


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What the index must be told so that it holds exactly `live`."""

    live: Mapping[RowKey, SsdRow]
    put: tuple[SsdRow, ...]
    delete: tuple[SsdRow, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """One directory after repair."""

    segments: tuple[FoundSegment, ...]
    set_aside: tuple[Path, ...]
    """Unreadable segment files, also those of earlier starts."""
    rows: tuple[SsdRow, ...]
    """Of every readable record; a part may have several, here and in other directories."""
    highest_number: int
    corrupt_segments: int
    torn_records: int


@dataclass(frozen=True, slots=True)
class _Inspection:
    rows: tuple[SsdRow, ...]
    records_end: int
    file_bytes: int
    torn: int
    damaged: bool


def plan_rows(stored: Iterable[SsdRow], found: Iterable[SsdRow]) -> RowChanges:
    """Pure. Where a part has several records the newest wins."""
    live: dict[RowKey, SsdRow] = {}
    for row in found:
        held = live.get(row.key)
        if held is None or (held.segment, held.offset) < (row.segment, row.offset):
            live[row.key] = row
    in_index = {row.key: row for row in stored}
    return RowChanges(
        live,
        put=tuple(row for key, row in live.items() if in_index.get(key) != row),
        delete=tuple(row for key, row in in_index.items() if key not in live),
    )


def recover(
    directory: Path,
    stored: Mapping[int, Sequence[SsdRow]],
    covered_through: int,
    direct_io: bool,
) -> Recovered:
    """Inspect and repair every segment file in `directory`; `stored` are the index's, by segment.

    Files without a usable record are removed, or set aside under another name when they are
    damaged. Files that are not ours are left alone.

    Raises:
        OSError: the directory itself cannot be read.
    """
    kept: list[FoundSegment] = []
    set_aside: list[Path] = []
    rows: list[SsdRow] = []
    corrupt = torn = highest = 0
    for path in sorted(directory.iterdir()):
        number = segments.segment_number(path.name.removesuffix(CORRUPT_SUFFIX))
        if number is None:
            continue
        highest = max(highest, number)
        if path.name.endswith(CORRUPT_SUFFIX):
            set_aside.append(path)
            continue
        try:
            with SegmentReader(path, direct_io) as reader:
                covered = number <= covered_through
                found = _inspect(reader, number, stored.get(number, ()), covered)
        except (OSError, CorruptionError) as error:
            corrupt += 1
            set_aside.append(set_segment_aside(path, error))
            continue
        corrupt += found.damaged
        torn += found.torn
        if not found.rows:
            path.unlink()
            continue
        rows += found.rows
        kept.append(FoundSegment(number, path, found.file_bytes, found.records_end))
    return Recovered(tuple(kept), tuple(set_aside), tuple(rows), highest, corrupt, torn)


def by_segment(rows: Iterable[SsdRow]) -> Mapping[int, Sequence[SsdRow]]:
    """Pure."""
    found: defaultdict[int, list[SsdRow]] = defaultdict(list)
    for row in rows:
        found[row.segment].append(row)
    return found


def _inspect(
    reader: SegmentReader, number: int, stored: Sequence[SsdRow], covered: bool
) -> _Inspection:
    """Raises CorruptionError if the file is damaged and holds nothing, OSError if unreadable."""
    if reader.file_bytes == 0:  # killed while creating it
        return _Inspection((), PAGE_BYTES, 0, 0, False)
    known = [row for row in stored if row.end <= reader.file_bytes]
    never_begun = not any(reader.page(0))
    damaged = _has_bad_header(reader, number)
    if damaged:
        # Something wrote over the file: believe only what reads back whole.
        known = [row for row in known if _is_whole(reader, row)]
    known_end = max((row.end for row in known), default=PAGE_BYTES)
    if covered:
        if damaged and not known:
            raise CorruptionError(f"segment {number}: header damaged, no record readable")
        return _Inspection(tuple(known), known_end, reader.file_bytes, 0, damaged)
    footer = None if damaged else _footer(reader, number)
    if footer is not None:
        return _Inspection((*footer.rows, *known), footer.start, reader.file_bytes, 0, False)
    scanned, scanned_end, torn = _scan(reader, number, {row.offset: row for row in known})
    rows = tuple({row.offset: row for row in (*scanned, *known)}.values())
    if damaged and not rows:
        if never_begun and not torn:
            return _Inspection((), PAGE_BYTES, reader.file_bytes, 0, False)
        raise CorruptionError(f"segment {number}: header damaged, no record readable")
    records_end = max(scanned_end, known_end)
    file_bytes = reader.file_bytes
    if rows:
        try:
            file_bytes = records_end + seal_segment(reader.fd, number, rows, records_end)
        except OSError as error:  # a full or failing drive: scanned again at the next start
            _log.warning("segment %d stays unsealed: %s", number, error)
    return _Inspection(rows, records_end, file_bytes, torn, damaged)


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
    rows: list[SsdRow]
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
        rows = segments.unpack_footer_table(table, trailer, number, reader.file_bytes)
        return _Footer(rows, start)
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
