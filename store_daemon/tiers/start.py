"""Start of the SSD tier: which drives are there, and which rows are live over all of them.

The rows of a drive that is missing are dropped, and the local index remembers that they were
dropped and not forgotten: when the drive is back its segments are read again.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.errors import PreflightError
from store_daemon.block import VALUES_FAMILY
from store_daemon.config import SsdSection
from store_daemon.local_index import LocalIndex
from store_daemon.recovery import FoundSegment
from store_daemon.tiers.drive import Drive
from store_daemon.tiers.drive_marker import KnownDrive
from store_daemon.tiers.row_book import RowBook
from store_daemon.tiers.row_plan import plan_rows

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedTier:
    """The SSD tier as it is after repair."""

    drives: tuple[Drive, ...]
    expected: Mapping[Path, str]
    """By directory, the drive that was last there."""
    rows: RowBook
    highest_number: int
    corrupt_segments: int
    torn_records: int
    rows_dropped: int
    """Rows of the index whose record is no more."""


def start_drives(config: SsdSection, index: LocalIndex, now: float) -> StartedTier:
    """Attach and recover every drive, and bring the index up to date.

    Raises:
        PreflightError: a drive cannot be used as configured, or none can be used at all.
    """
    if not config.capacity_bytes:
        raise PreflightError("ssd.capacity_bytes is 0: the SSD tier is turned off")
    drives = tuple(Drive(drive, config.segment_bytes, config.direct_io) for drive in config.drives)
    try:
        return _start(drives, index, now)
    except OSError as error:
        _detach(drives)
        raise PreflightError(f"ssd.path {drives[0].path} cannot be used: {error}") from error
    except BaseException:
        _detach(drives)
        raise


def _detach(drives: tuple[Drive, ...]) -> None:
    for drive in drives:
        drive.detach()


def _start(drives: tuple[Drive, ...], index: LocalIndex, now: float) -> StartedTier:
    content = index.content()  # may find the database damaged, so before the rest
    covered = index.covered_through()
    known = index.drives()
    is_one_of_several = len(drives) > 1
    expected = {entry.path: drive_id for drive_id, entry in known.items()}
    if not is_one_of_several:
        expected = {}
    found_segments: list[FoundSegment] = []
    highest = max([covered, *content.segments])
    corrupt = torn = 0
    taken: set[int] = set()
    for drive in drives:
        try:
            drive.attach(index.node_id, expected.get(drive.path))
            assert drive.id is not None
            if any(other is not drive and other.id == drive.id for other in drives):
                raise PreflightError(f"{drive.path} is the same drive as another of ssd.paths")
            has_rows = drive.id in known and known[drive.id].has_rows
            found = drive.recover(content, covered if has_rows else 0, taken)
        except (OSError, PreflightError) as error:
            if not (is_one_of_several and _is_of_the_drive(error)):
                raise
            drive.detach()
            drive.failed(error, now)
            continue
        taken |= drive.segments.keys()
        found_segments += found.segments if has_rows else current(found.segments, index)
        highest = max(highest, found.highest_number)
        corrupt += found.corrupt_segments
        torn += found.torn_records
    if not any(drive.is_attached for drive in drives):
        raise PreflightError(
            "no directory of ssd.paths can be used: "
            + "; ".join(drive.state_text for drive in drives)
        )
    plan = plan_rows(content, found_segments)
    _note_drives(drives, index, known)
    index.apply(plan.changes)
    index.mark_covered(highest)
    for drive in drives:
        if drive.is_attached and drive.id is not None:
            index.put_drive(drive.id, KnownDrive(drive.path, has_rows=True))
    return StartedTier(drives, expected, plan.rows, highest, corrupt, torn, plan.rows_dropped)


def current(found: Iterable[FoundSegment], index: LocalIndex) -> list[FoundSegment]:
    """What of segments that were out of sight cannot be out of date.

    Blocks are what they were. Values may have been replaced or deleted meanwhile, and which of them
    were so before is not known either: none of them counts.
    """
    values = [
        namespace_id
        for namespace_id, namespace in index.namespaces().items()
        if namespace.engine_family == VALUES_FAMILY
    ]
    return [segment.without(values) for segment in found]


def _is_of_the_drive(error: Exception) -> bool:
    """Whether the drive is at fault; what only another configuration can mend stops the start."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno != errno.EINVAL  # as of a refused O_DIRECT


def _note_drives(
    drives: tuple[Drive, ...], index: LocalIndex, known: Mapping[str, KnownDrive]
) -> None:
    """Before rows are dropped: those of absent drives are not forgotten ones."""
    present = {drive.id for drive in drives if drive.is_attached}
    missing = {drive.path for drive in drives if not drive.is_attached}
    for drive_id, entry in known.items():
        if drive_id in present:
            continue
        if entry.path in missing:
            index.put_drive(drive_id, KnownDrive(entry.path, has_rows=False))
        else:
            index.forget_drive(drive_id)
