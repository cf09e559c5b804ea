"""Enters pages that a file holds already into a mapping's page tables, ahead of the first copy.

A first copy into a fresh mapping takes a page fault for each 4 KiB, about half a second a GiB.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STEP_BYTES = 8 << 20
"""How much is entered by one system call, of some milliseconds: what allocates or frees large
memory meanwhile, in any thread of the process, waits for it."""
_MADV_POPULATE_WRITE = 23
_REST_SHARE = 3.0
"""Of the time that a step took: who must not hold up others rests so long after it."""


@dataclass(frozen=True, slots=True)
class Extent:
    start: int
    length: int


def held_extents(descriptor: int, length: int) -> Iterator[Extent]:
    """Where the file has memory behind it, in order; a file system that does not tell: everywhere.

    The descriptor's position moves. Raises OSError.
    """
    end = 0
    while end < length:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        end = min(os.lseek(descriptor, start, os.SEEK_HOLE), length)
        if start < end:
            yield Extent(start, end - start)


def steps(extent: Extent) -> Iterator[Extent]:
    stop = extent.start + extent.length
    for start in range(extent.start, stop, STEP_BYTES):
        yield Extent(start, min(STEP_BYTES, stop - start))


def enter_pages(address: int, length: int) -> bool:
    """Whether it was done: not on a kernel before 5.14. Holes take memory by it.

    Other threads run, and may use the mapping, meanwhile.
    """
    # mmap.madvise would keep the interpreter lock all the while; ctypes does not.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return not madvise(address, length, _MADV_POPULATE_WRITE)


def enter_beside(address: int, extents: Iterable[Extent], is_over: threading.Event) -> None:
    """Enter pages of the mapping at `address` beside work that must not wait, until `is_over`.

    It rests for longer than it works. A low priority would not do: on a busy machine whoever holds
    the interpreter lock, or the kernel's for the process's memory, with it holds up everybody.
    """
    for extent in extents:
        for step in steps(extent):
            begun = time.monotonic()
            if is_over.is_set() or not enter_pages(address + step.start, step.length):
                return
            is_over.wait(_REST_SHARE * (time.monotonic() - begun))
