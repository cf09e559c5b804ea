"""One directory of the SSD tier: its lock and marker, its segments, what it takes, how it fares.

A drive is attached while its lock is held and its segments are known. One that cannot be read any
more is detached: the tier drops its rows, tries again later, and reads its segments anew. One that
only refuses to be written stays attached and serves reads.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.errors import PreflightError
from store_daemon.config import SsdDriveSection
from store_daemon.files import DirectoryLock
from store_daemon.local_index import IndexContent
from store_daemon.recovery import CORRUPT_SUFFIX, Recovered, recover, set_segment_aside
from store_daemon.tiers import segments
from store_daemon.tiers.backoff import Backoff
from store_daemon.tiers.drive_marker import (
    ADOPT_NAME,
    MARKER_NAME,
    create_marker,
    read_marker,
    read_wear,
    write_wear,
)
from store_daemon.tiers.open_segment import OpenSegment, Segment
from store_daemon.tiers.segment_file import (
    aligned_memory,
    allocated_bytes,
    check_direct_io,
    direct_flag,
    read_fully,
    remove_probes,
    try_segment,
)
from store_daemon.tiers.segments import PAGE_BYTES

_log = logging.getLogger(__name__)
OK = "ok"
_NOT_THIS_DRIVE = "the directory is not this drive's any more"
DISK_TOLERANCE_BYTES = 64 * 1024
"""How far a file system's own blocks may change what a file takes."""


@dataclass(frozen=True, slots=True)
class DriveState:
    """What operators are shown of a drive."""

    path: Path
    drive_id: str | None
    """None until it was attached once."""
    state: str
    capacity_bytes: int
    used_bytes: int
    written_bytes_total: int
    """Ever, over all lives: the wear."""
    segments: int
    failed_reads: int
    failed_writes: int


class Drive:
    """Used by the tier, which serialises changes; `state()` may be asked from any thread."""

    def __init__(self, config: SsdDriveSection, segment_bytes: int, direct_io: bool) -> None:
        self.path = config.path
        self.capacity_bytes = config.capacity_bytes
        self.direct_io = direct_io
        self.id: str | None = None
        self.is_attached = False
        self.is_doubted = False
        """A read failed: whether the drive can be read at all is to be found out."""
        self.trouble = Backoff()
        self.segments: dict[int, Segment] = {}
        self.set_aside: dict[Path, int] = {}
        """Damaged segment files, the newest only, with what they take."""
        self.used_bytes = 0
        self.written_bytes_total = 0
        self.failed_reads = 0
        self.failed_writes = 0
        self._segment_bytes = segment_bytes
        self._lock: DirectoryLock | None = None

    # -- life ----------------------------------------------------------------------------------

    def attach(self, node_id: str, expected: str | None) -> None:
        """Lock the directory and find out whose drive it is; a new one is marked.

        `expected` is the drive that was here; an empty directory is not taken for it, unless an
        operator put a file named `adopt` there.

        Raises:
            PreflightError: in use, another node's, too small, or without O_DIRECT.
            OSError: the directory cannot be used, or the expected drive is not in it.
        """
        may_be_new = expected is None or (self.path / ADOPT_NAME).exists()
        if not may_be_new and read_marker(self.path) is None:
            raise OSError(
                errno.ENODEV,
                f"drive {expected} that was here is missing; mount it, or create"
                f" {self.path / ADOPT_NAME} to begin with an empty one",
            )
        lock = DirectoryLock(self.path, "ssd.path")
        try:
            marker = read_marker(self.path)
            if marker is not None and marker.node_id != node_id:
                raise PreflightError(
                    f"{self.path} belongs to node {marker.node_id!r}, this is node {node_id!r};"
                    " set node.id back or ssd.path to this node's directory"
                )
            _check_capacity(self.path, self.capacity_bytes)
            check_direct_io(self.path, self.direct_io)
            remove_probes(self.path)
            if marker is None:
                marker = create_marker(self.path, node_id)
            counted = self.written_bytes_total if marker.drive_id == self.id else 0
            self.written_bytes_total = max(read_wear(self.path), counted)
        except BaseException:
            lock.release()
            raise
        self.id = marker.drive_id
        self._lock = lock
        self.is_attached = True

    def recover(
        self,
        content: IndexContent,
        covered_through: int,
        taken: Collection[int],
    ) -> Recovered:
        """Take the segments of an attached drive into use, but for those whose number is taken.

        Raises OSError; nothing is in use then.
        """
        for path in list(self.path.iterdir()):
            if segments.segment_number(path.name) in taken:
                set_segment_aside(path, ValueError("another drive has a segment of this number"))
        found = recover(self.path, content, covered_through, self.direct_io)
        sizes = {
            path: allocated_bytes(path.stat())
            for path in (*found.set_aside, *(segment.path for segment in found.segments))
        }
        for segment in found.segments:
            self.add(
                Segment(
                    segment.number,
                    segment.path,
                    segment.records_end,
                    sizes[segment.path],
                    segment.is_sealed,
                )
            )
        for path in found.set_aside:
            self._put_aside(path, sizes[path])
        return found

    def detach(self) -> None:
        """Give the directory up and know nothing of its files. A second call does nothing."""
        self.is_attached = False
        self.is_doubted = False
        self.segments.clear()
        self.set_aside.clear()
        self.used_bytes = 0
        self.release()

    def release(self) -> None:
        """Give the directory up. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- health --------------------------------------------------------------------------------

    @property
    def state_text(self) -> str:
        why = self.trouble.why
        return OK if why is None else f"degraded: {self.path}: {why}"

    def state(self) -> DriveState:
        return DriveState(
            self.path,
            self.id,
            self.state_text,
            self.capacity_bytes,
            self.used_bytes,
            self.written_bytes_total,
            len(self.segments),
            self.failed_reads,
            self.failed_writes,
        )

    def failed(self, error: Exception, now: float) -> None:
        before = self.trouble.why
        self.trouble.failed(str(error), now)
        if self.trouble.why != before:
            _log.warning("ssd drive %s", self.state_text)

    def worked(self) -> None:
        if self.trouble.why is not None:
            _log.info("ssd drive %s works again", self.path)
        self.trouble.worked()

    def is_usable(self, now: float) -> bool:
        """Whether new segments may be tried here."""
        return self.is_attached and not self.trouble.is_resting(now)

    def check_readable(self) -> None:
        """Raises OSError or PreflightError unless this very drive can be read."""
        marker = read_marker(self.path)
        if marker is None or marker.drive_id != self.id:
            raise OSError(errno.ENODEV, _NOT_THIS_DRIVE)
        for segment in list(self.segments.values())[:1]:
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | direct_flag(self.direct_io))
            try:
                read_fully(fd, [aligned_memory(PAGE_BYTES)], 0)
            finally:
                os.close(fd)

    def try_writing(self) -> None:
        """Raises OSError if a new segment could not be written now."""
        try_segment(self.path, self._segment_bytes if self.has_room else PAGE_BYTES, self.direct_io)

    # -- segments ------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def has_room(self) -> bool:
        """Whether another segment fits."""
        return self._segment_bytes <= self.free_bytes

    def create(self, number: int) -> OpenSegment:
        """Begin a segment. Raises OSError and leaves nothing."""
        # Counted before it is written: a kill may make the drive look more worn, never less.
        self._save_wear(self.written_bytes_total + self._segment_bytes)
        opened = OpenSegment(self.path, number, self._segment_bytes, self.direct_io)
        self.add(opened.segment)
        return opened

    def save_wear(self) -> None:
        """Raises OSError."""
        self._save_wear(self.written_bytes_total)

    def _save_wear(self, written_bytes: int) -> None:
        if not (self.path / MARKER_NAME).exists():  # nothing is put in an empty mount point
            raise OSError(errno.ENODEV, _NOT_THIS_DRIVE)
        write_wear(self.path, written_bytes)

    def add(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self.used_bytes += segment.disk_bytes

    def resize(self, segment: Segment, before: int) -> None:
        """The file of `segment` took `before` bytes until now."""
        self.used_bytes += segment.disk_bytes - before

    def remove(self, number: int) -> None:
        """Know nothing of a segment whose file is gone."""
        self.used_bytes -= self.segments.pop(number).disk_bytes

    def set_segment_aside(self, segment: Segment, why: Exception) -> None:
        """Keep a damaged segment's file, but not as a segment. Raises OSError."""
        while self.set_aside:
            self.remove_set_aside()
        path = set_segment_aside(segment.path, why)
        self.remove(segment.number)
        self._put_aside(path, segment.disk_bytes)

    def _put_aside(self, path: Path, disk_bytes: int) -> None:
        """Account a damaged file; older ones make way for it. Raises OSError."""
        while self.set_aside:
            self.remove_set_aside()
        self.set_aside[path] = disk_bytes
        self.used_bytes += disk_bytes

    def remove_set_aside(self) -> None:
        """Delete the oldest damaged file. Raises OSError."""
        path = min(self.set_aside)
        path.unlink(missing_ok=True)
        self.used_bytes -= self.set_aside.pop(path)

    def check_integrity(self) -> None:
        """Assert that files take what they are accounted for."""
        if not self.is_attached:
            assert not self.segments, f"{self.path} is detached and has segments"
            assert not self.set_aside
            assert self.used_bytes == 0
            return
        taken = 0
        for segment in self.segments.values():
            status = segment.path.stat()
            found = allocated_bytes(status)
            assert abs(found - segment.disk_bytes) <= DISK_TOLERANCE_BYTES, (
                f"{segment.path} takes {found} bytes, accounted are {segment.disk_bytes}"
            )
            assert segment.records_end <= status.st_size
            taken += segment.disk_bytes
        assert len(self.set_aside) <= 1, "damaged files pile up"
        for path, size in self.set_aside.items():
            assert path.name.endswith(CORRUPT_SUFFIX)
            assert abs(allocated_bytes(path.stat()) - size) <= DISK_TOLERANCE_BYTES
            taken += size
        assert taken == self.used_bytes, f"{taken} bytes are taken, accounted are {self.used_bytes}"
        files = {segment.path for segment in self.segments.values()} | set(self.set_aside)
        for path in self.path.iterdir():
            number = segments.segment_number(path.name.removesuffix(CORRUPT_SUFFIX))
            if number is not None:
                assert path in files, f"{path} is not accounted for"


def _check_capacity(path: Path, capacity_bytes: int) -> None:
    volume = os.statvfs(path)
    total = volume.f_blocks * volume.f_frsize
    if capacity_bytes > total:
        raise PreflightError(
            f"ssd.capacity_bytes is {capacity_bytes}, but the file system of"
            f" {path} has {total} bytes in all; lower it or set ssd.path to another drive"
        )
