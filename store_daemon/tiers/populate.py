"""Brings every page of a new pool file into memory, step by step.

So a lack of memory is found at start, and no write gets a SIGBUS later. Terabytes take minutes:
each step tells how far it is, and looks whether the daemon is to stop.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from client_sdk import faults
from emberkv_proto.errors import PreflightError
from store_daemon.tiers.memory_calls import MADV_POPULATE_WRITE, advise

log = logging.getLogger(__name__)
MIB = 1 << 20
LARGEST_STEP_BYTES = 256 * MIB
SMALLEST_STEP_BYTES = 2 * MIB
STEPS = 64
REPORT_SECONDS = 2.0
"""Least time between two reports."""


class PopulateStoppedError(Exception):
    """The daemon was told to stop; the file is of no use as it is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is."""

    done_bytes: int
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        percent = 100 * self.done_bytes // self.total_bytes
        speed = self.done_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"populating the pool: {percent} % ({self.done_bytes // MIB} of"
            f" {self.total_bytes // MIB} MiB, {speed:.1f} GB/s)"
        )


def _never() -> bool:
    return False


def _log(progress: Progress) -> None:
    log.info("%s", progress)


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks on while the pool is populated, from the thread that does it."""

    should_stop: Callable[[], bool] = _never
    report: Callable[[Progress], None] = _log


UNWATCHED = Watch()


def step_bytes(total_bytes: int, page_bytes: int) -> int:
    """Pages of one step together: a 64th of all, within bounds, and whole pages."""
    wanted = min(max(total_bytes // STEPS, SMALLEST_STEP_BYTES), LARGEST_STEP_BYTES)
    return max(wanted // page_bytes, 1) * page_bytes


def populate(
    fd: int,
    address: int,
    total_bytes: int,
    page_bytes: int,
    watch: Watch = UNWATCHED,
) -> None:
    """Touch all pages of the file, which is mapped at `address`. Blocks.

    Raises:
        PopulateStoppedError: the watch said so.
        PreflightError: there is not so much memory, with how far it came.
    """
    began = reported = time.monotonic()
    step = step_bytes(total_bytes, page_bytes)
    is_mapped = True
    for start in range(0, total_bytes, step):
        if watch.should_stop():
            raise PopulateStoppedError
        length = min(step, total_bytes - start)
        try:
            faults.hit(faults.POPULATE)
            is_mapped = is_mapped and _populate_mapping(address + start, length)
            if not is_mapped:
                os.posix_fallocate(fd, start, length)
        except OSError as error:
            raise PreflightError(
                f"memory ran out after {start // MIB} MiB of the {total_bytes // MIB} MiB pool"
                f" ({error.strerror}); lower dram.capacity_bytes, raise the mount's size, or give"
                " this process more memory"
            ) from None
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS or start + length == total_bytes:
            reported = now
            watch.report(Progress(start + length, total_bytes, now - began))


def _populate_mapping(address: int, length: int) -> bool:
    """By faults on the mapping, which heed huge pages and policies; False: too old a kernel."""
    try:
        advise(address, length, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
