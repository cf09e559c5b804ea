"""Maps the pool file, and sees to it that its pages are there, huge and where they should be."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from emberkv_proto.errors import PreflightError
from store_daemon.config import DramSection
from store_daemon.tiers import numa
from store_daemon.tiers.memory_calls import MADV_HUGEPAGE, address_of, advise
from store_daemon.tiers.pool_pages import (
    PoolFileSystem,
    huge_bytes,
    huge_pages_fix,
    may_be_huge,
    shmem_policy,
)
from store_daemon.tiers.populate import Watch, populate

log = logging.getLogger(__name__)
HUGE_SHARE = 0.9
"""Of the pool; less than this in huge pages is not what `huge_pages: required` asks for."""


def map_pool(fd: int, size: int, path: Path) -> mmap.mmap:
    """Raises PreflightError; on hugetlbfs, which sets pages aside now, when there are too few."""
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        os.ftruncate(fd, 0)
        raise PreflightError(
            f"pool file {path} of {size} bytes cannot be mapped: {error.strerror}; lower"
            " dram.capacity_bytes, or on hugetlbfs raise vm.nr_hugepages"
        ) from None


def prepare(
    fd: int,
    mapping: mmap.mmap,
    config: DramSection,
    file_system: PoolFileSystem,
    is_ours: bool,
    watch: Watch,
) -> int | None:
    """Ask for huge pages and memory nodes, then bring in what a new file lacks.

    Returns how many bytes are in huge pages, where that is known. Raises as `Pool.open`.
    """
    size = len(mapping)
    with address_of(mapping) as address:
        _advise_huge(address, size, config, file_system)
        if is_ours:
            return size if file_system.is_hugetlbfs else None
        nodes = numa.chosen_nodes(config.numa_node, numa.memory_nodes())
        try:
            numa.place(address, size, config.numa_node, nodes)
            if config.populate:
                populate(fd, address, size, file_system.page_bytes, watch)
            return _count_huge(fd, size, config, file_system)
        except BaseException:
            os.ftruncate(fd, 0)  # its pages are of no use, and others may need them
            raise


def _advise_huge(address: int, size: int, config: DramSection, file_system: PoolFileSystem) -> None:
    if file_system.is_hugetlbfs or config.huge_pages == "off":
        return
    if not may_be_huge(file_system, shmem_policy()):
        level = logging.DEBUG if config.huge_pages == "auto" else logging.WARNING
        log.log(level, "pool: no huge pages: %s", huge_pages_fix(file_system))
        return
    try:
        advise(address, size, MADV_HUGEPAGE)
    except OSError as error:
        log.warning("pool: huge pages are refused: %s", error)


def _count_huge(fd: int, size: int, config: DramSection, file_system: PoolFileSystem) -> int:
    """Bytes of a new pool in huge pages. Raises PreflightError where more are required."""
    if file_system.is_hugetlbfs:
        found = size
    elif config.huge_pages == "off" or not may_be_huge(file_system, shmem_policy()):
        found = 0
    else:
        found = huge_bytes(os.fstat(fd).st_ino)
    log.info("pool: %d of %d MiB are in huge pages", found >> 20, size >> 20)
    if config.huge_pages == "required" and found < HUGE_SHARE * size:
        raise PreflightError(
            f"dram.huge_pages is required, but only {found >> 20} of {size >> 20} MiB of the pool"
            f" are in huge pages; {huge_pages_fix(file_system)}"
        )
    return found
