"""Refuses, before anything is opened, a configuration that this machine cannot carry."""

from __future__ import annotations

import logging
import os
import resource
import stat
from collections.abc import Iterable
from pathlib import Path

from emberkv_proto.errors import PreflightError
from store_daemon.config import MIB, DaemonSettings, DramSection
from store_daemon.memory_room import MemoryRoom, memory_rooms
from store_daemon.tiers.drive_marker import MARKER_NAME
from store_daemon.tiers.pool_pages import (
    PoolFileSystem,
    file_bytes,
    file_system_of,
    huge_page_stock,
    huge_pages_fix,
    may_be_huge,
    shmem_policy,
)

log = logging.getLogger(__name__)
MAX_SOCKET_PATH_BYTES = 107
WANTED_FILES = 4096
LEAST_FILES = 256


def check_machine(settings: DaemonSettings) -> None:
    """Raises PreflightError with the numbers that do not fit and what to change.

    May raise the process's own soft limit of open files.
    """
    check_socket_path(settings.daemon.socket_path)
    check_pool_room(settings.dram)
    drives = settings.ssd.drives
    for drive in drives:
        # Of several drives one may be missing, and its mount point is no place to measure.
        if len(drives) == 1 or (drive.path / MARKER_NAME).is_file():
            check_ssd_room(drive.path, drive.capacity_bytes)
    raise_file_limit()


def check_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise PreflightError(
            f"daemon.socket_path {path} has {length} bytes, the limit is {MAX_SOCKET_PATH_BYTES};"
            " choose a shorter path"
        )
    directory = path.parent
    try:
        status = directory.stat()
    except OSError as error:
        raise PreflightError(
            f"the directory of daemon.socket_path, {directory}, cannot be used: {error.strerror};"
            " create it or set another path"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or not os.access(directory, os.W_OK | os.X_OK):
        raise PreflightError(
            f"the directory of daemon.socket_path, {directory}, is not writable for uid"
            f" {os.geteuid()}"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise PreflightError(
            f"the directory of daemon.socket_path, {directory}, can be written by every user:"
            " they could replace the socket; chmod o-w it or set another path"
        )


def check_pool_room(dram: DramSection) -> None:
    """Whether the file system has the bytes the pool does not hold already."""
    directory = dram.path.parent
    try:
        system = os.statvfs(directory)
    except OSError as error:
        raise PreflightError(
            f"the directory of dram.path, {directory}, cannot be used: {error.strerror};"
            " create it or set another path"
        ) from None
    file_system = file_system_of(directory)
    wanted = file_bytes(file_system, dram.extent_bytes, dram.capacity_bytes // dram.extent_bytes)
    held = dram.path.stat().st_blocks * 512 if dram.path.is_file() else 0
    free = system.f_bavail * system.f_frsize
    if file_system.is_hugetlbfs:
        if dram.path.is_file() and dram.path.stat().st_size == wanted:
            held = wanted  # what was mapped once is set aside for the file, touched or not
        check_huge_pages(file_system, wanted - held)
        if not system.f_blocks:
            return  # a mount without a limit of its own
    elif dram.huge_pages == "required":
        check_may_be_huge(file_system)
    if dram.populate and not file_system.is_hugetlbfs:
        check_memory(wanted - held, memory_rooms())
    if wanted > free + held:
        raise PreflightError(
            f"{directory} has {_readable(free + held)} free, dram.capacity_bytes asks"
            f" {_readable(dram.capacity_bytes)}; lower it or raise the mount's size"
        )


def check_huge_pages(file_system: PoolFileSystem, lacking_bytes: int) -> None:
    """Whether the kernel has as many huge pages as the pool does not hold already."""
    try:
        stock = huge_page_stock(file_system.page_bytes)
    except OSError as error:
        raise PreflightError(f"huge pages cannot be counted: {error}") from None
    wanted = -(-lacking_bytes // stock.page_bytes)
    if wanted > stock.available:
        raise PreflightError(
            f"dram.path is on hugetlbfs {file_system.mount_point} with {stock.available} free pages"
            f" of {_readable(stock.page_bytes)}, the pool needs {wanted}; set vm.nr_hugepages to"
            f" {stock.total + wanted - stock.available} or lower dram.capacity_bytes"
        )


def check_may_be_huge(file_system: PoolFileSystem) -> None:
    """Whether `dram.huge_pages: required` can be had at all."""
    if not may_be_huge(file_system, shmem_policy()):
        raise PreflightError(f"dram.huge_pages is required; {huge_pages_fix(file_system)}")


def check_memory(lacking_bytes: int, rooms: Iterable[MemoryRoom]) -> None:
    """Whether the machine and this process's control groups let it have so much more."""
    for room in rooms:
        if lacking_bytes > room.free_bytes:
            raise PreflightError(
                f"the pool needs {_readable(lacking_bytes)} more memory, {room.limited_by} leaves"
                f" {_readable(room.free_bytes)}; {room.fix}"
            )


def check_ssd_room(path: Path, capacity_bytes: int) -> None:
    """Whether the file system is large enough for what the segments do not take already."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    system = os.statvfs(existing)
    free = system.f_bavail * system.f_frsize
    held = (
        sum(p.stat().st_blocks * 512 for p in path.iterdir() if p.is_file())
        if (path.is_dir() and os.access(path, os.R_OK | os.X_OK))
        else 0
    )
    if capacity_bytes > free + held:
        raise PreflightError(
            f"{existing} has {_readable(free + held)} free, ssd.capacity_bytes asks"
            f" {_readable(capacity_bytes)}; lower it or set ssd.path to a larger disk"
        )


def raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        raise PreflightError(
            f"this process may open {soft} files, the daemon needs {LEAST_FILES}; raise ulimit -n"
        )


def _readable(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
