"""I/O on one segment file: create, write records, seal, read a record back.

With O_DIRECT the kernel moves bytes between the drive and the caller's memory without a copy in
the page cache; memory, offset and length must then be multiples of 4 KiB. Pages come from `mmap`.
Everything here blocks and raises OSError as the kernel gives it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Executor, wait
from pathlib import Path
from types import TracebackType

from client_sdk import faults
from emberkv_proto.errors import CorruptionError, PreflightError
from emberkv_proto.hashing import checksum
from emberkv_proto.shm_layout import align_up
from store_daemon.files import sync_directory
from store_daemon.tiers import segments
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow

SHARE_BYTES = 4 << 20
"""About what one thread writes of a long run by one call."""


def aligned_memory(byte_count: int) -> memoryview:
    """Zeroed memory on a page boundary; freed with its last view."""
    return memoryview(mmap.mmap(-1, align_up(byte_count)))


def direct_flag(direct_io: bool) -> int:
    return os.O_DIRECT if direct_io else 0


def allocated_bytes(status: os.stat_result) -> int:
    """What a file takes on its drive."""
    return status.st_blocks * 512  # of that unit on every file system


def read_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all `buffers` from `offset` on. A file that ends before raises OSError (EIO)."""
    waiting = list(buffers)
    while waiting:
        count = os.preadv(fd, waiting, offset)
        if count == 0:
            raise OSError(errno.EIO, f"file ends at byte {offset}")
        offset += count
        waiting = _rest(waiting, count)


def write_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all `buffers` at `offset`; at most IOV_MAX (1024) of them."""
    waiting = list(buffers)
    while waiting:
        count = os.pwritev(fd, waiting, offset)
        offset += count
        waiting = _rest(waiting, count)


def write_records(fd: int, buffers: Sequence[memoryview], offset: int, threads: Executor) -> None:
    """Write whole records at `offset` and make them durable; bounds as for `write_fully`.

    A long run is shared among threads, since a drive takes several writes at once faster than one.
    Nothing is written any more after the return.
    """
    if faults.hit(faults.SEGMENT_WRITE):
        if faults.is_armed(faults.MID_SEGMENT_WRITE):
            _write_in_two(fd, buffers, offset)
        else:
            _write_shares(fd, buffers, offset, threads)
    if faults.hit(faults.SEGMENT_SYNC):
        os.fdatasync(fd)


def _write_shares(fd: int, buffers: Sequence[memoryview], offset: int, threads: Executor) -> None:
    shares: list[tuple[int, list[memoryview]]] = []
    size = SHARE_BYTES
    for buffer in buffers:
        if size >= SHARE_BYTES:
            shares.append((offset, []))
            size = 0
        shares[-1][1].append(buffer)
        size += len(buffer)
        offset += len(buffer)
    # The first share is this thread's own; one that fails does not leave the others at work.
    others = [threads.submit(write_fully, fd, share, start) for start, share in shares[1:]]
    try:
        for start, share in shares[:1]:
            write_fully(fd, share, start)
    finally:
        wait(others)
    for other in others:
        other.result()


def _write_in_two(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the records with a point for faults before the last payload's second half."""
    last = buffers[-1]
    half = len(last) // 2 // PAGE_BYTES * PAGE_BYTES
    begun = [*buffers[:-1], *([last[:half]] if half else [])]
    write_fully(fd, begun, offset)
    if faults.hit(faults.MID_SEGMENT_WRITE):
        write_fully(fd, [last[half:]], offset + sum(map(len, begun)))


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]] if count else buffers[number:]
        count -= len(buffer)
    return []


def create_segment(path: Path, number: int, segment_bytes: int, direct_io: bool) -> int:
    """Create, allocate and head a new segment; return its descriptor, open for writing.

    Its room on the drive is taken here, so that a full disk shows now and not in mid-record.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct_flag(direct_io)
    fd = os.open(path, flags, 0o600)
    try:
        faults.hit(faults.SEGMENT_CREATE)
        os.posix_fallocate(fd, 0, segment_bytes)
        page = aligned_memory(PAGE_BYTES)
        header = segments.pack_segment_header(number)
        page[: len(header)] = header
        write_fully(fd, [page], 0)
        sync_directory(path.parent)
    except BaseException:
        os.close(fd)
        path.unlink()
        raise
    return fd


def seal_segment(fd: int, number: int, rows: Sequence[SsdRow], records_end: int) -> int:
    """Write the footer at `records_end`, cut the file behind it, make both durable.

    Returns the footer's length. After a crash on the way the file counts as not sealed.
    """
    footer = segments.pack_footer(number, rows)
    memory = aligned_memory(len(footer))
    memory[:] = footer
    write_fully(fd, [memory], records_end)
    os.ftruncate(fd, records_end + len(footer))
    os.fsync(fd)
    return len(footer)


def read_record(fd: int, row: SsdRow, page: memoryview, target: memoryview) -> None:
    """Read the payload of `row` straight into `target` (page aligned, whole pages).

    Raises:
        CorruptionError: another record stands there, or its bytes do not match its checksum.
        OSError: the drive failed, or the file is too short.
    """
    if faults.hit(faults.SEGMENT_READ):
        read_fully(fd, [page, target[: align_up(row.length)]], row.offset)
    found = segments.unpack_record_header(page, row.segment, row.offset)
    if found != row:
        raise CorruptionError(f"segment {row.segment} at {row.offset}: record of another block")
    if checksum(target[: row.length]) != row.checksum:
        raise CorruptionError(
            f"segment {row.segment} at {row.offset}: payload does not match its checksum"
        )


def check_direct_io(directory: Path, direct_io: bool) -> None:
    """Write and read one page in `directory` the way segments are.

    Raises:
        PreflightError: the file system refuses O_DIRECT, or the directory cannot be written.
    """
    path = directory / f"probe-{os.getpid()}.tmp"
    page = aligned_memory(PAGE_BYTES)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | direct_flag(direct_io)
        fd = os.open(path, flags, 0o600)
        try:
            write_fully(fd, [page], 0)
            read_fully(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return  # a full disk can still serve what it holds
        if error.errno == errno.EINVAL and direct_io:
            raise PreflightError(
                f"the file system of {directory} refuses O_DIRECT;"
                " set ssd.direct_io to false or ssd.path to another file system"
            ) from error
        raise PreflightError(f"ssd.path {directory} cannot be used: {error.strerror}") from error
    finally:
        path.unlink(missing_ok=True)


def remove_probes(directory: Path) -> None:
    """What a kill left of `check_direct_io` and `try_segment`; they may be large."""
    for path in directory.glob("probe-*.tmp"):
        path.unlink(missing_ok=True)


def try_segment(directory: Path, segment_bytes: int, direct_io: bool) -> None:
    """Do once, with a file of its own, all that a new segment needs. Raises OSError."""
    path = directory / f"probe-{os.getpid()}.tmp"
    page = aligned_memory(PAGE_BYTES)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | direct_flag(direct_io)
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, segment_bytes)
        write_fully(fd, [page], 0)
        os.fdatasync(fd)
        read_fully(fd, [page], 0)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


class SegmentReader:
    """One segment file read from end to end at recovery. A context manager."""

    def __init__(self, path: Path, direct_io: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct_flag(direct_io))
        self._page = aligned_memory(PAGE_BYTES)
        self._payload = aligned_memory(PAGE_BYTES)
        self.fd = self._fd
        self.file_bytes = os.fstat(self._fd).st_size

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def page(self, offset: int) -> memoryview:
        """The page at `offset`; valid until the next call."""
        read_fully(self._fd, [self._page], offset)
        return self._page

    def pages(self, offset: int, byte_count: int) -> memoryview:
        """Whole pages from `offset` on, in memory of their own."""
        memory = aligned_memory(byte_count)
        read_fully(self._fd, [memory], offset)
        return memory

    def check_record(self, row: SsdRow) -> None:
        """Raises CorruptionError or OSError unless the whole record of `row` is there."""
        if row.end > self.file_bytes:
            raise CorruptionError(f"segment {row.segment} ends before the record at {row.offset}")
        read_record(self._fd, row, self._page, self._room(row.length))

    def _room(self, byte_count: int) -> memoryview:
        wanted = align_up(byte_count)
        if len(self._payload) < wanted:
            self._payload = aligned_memory(wanted)
        return self._payload[:wanted]
