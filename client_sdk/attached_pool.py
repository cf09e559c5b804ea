"""The daemon's pool as a client maps it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from client_sdk.page_entries import Extent, enter_pages, steps
from emberkv_proto.errors import InvalidRequestError, UnavailableError

STAT_BLOCK_BYTES = 512


class PartPlace(NamedTuple):
    """Part number `number` of a caller's buffer, and where it is in the pool."""

    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """Many parts of a caller's buffer, by number, and where each is in the pool."""

    numbers: Sequence[int]
    offsets: Sequence[int]

    @staticmethod
    def of(parts: Sequence[PartPlace]) -> PartPlaces:
        return PartPlaces([part.number for part in parts], [part.offset for part in parts])


@dataclass(slots=True)
class _Run:
    """Bytes that are next to each other both in the caller's buffer and in the pool."""

    start: int
    offset: int
    length: int


class PoolShape:
    """A daemon's pool as its offsets are checked, wherever it is."""

    def __init__(self, pool_bytes: int, part_bytes: int) -> None:
        """Raises UnavailableError when not one part fits."""
        if not 0 < part_bytes <= pool_bytes:
            raise UnavailableError(
                f"the daemon announced a pool of {pool_bytes} bytes with blocks of {part_bytes}"
            )
        self.pool_bytes = pool_bytes
        self.part_bytes = part_bytes

    def holds(self, offset: int) -> bool:
        """Whether one part at `offset` lies within the pool."""
        return 0 <= offset <= self.pool_bytes - self.part_bytes

    def holds_all(self, offsets: Sequence[int]) -> bool:
        """`holds` for each of many."""
        return not offsets or (min(offsets) >= 0 and self.holds(max(offsets)))


class PoolMapping:
    """A pool file's bytes in this process; each file is mapped once, whoever attaches it.

    So its pages are faulted in, and registered with a GPU's driver, once for all sessions.
    """

    def __init__(self, mapped: mmap.mmap, held_bytes: int) -> None:
        """`held_bytes`: what memory the file has got so far."""
        self.bytes = memoryview(mapped)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self.address = int(self.array.ctypes.data)
        self.length = len(self.bytes)
        self.is_populated = held_bytes >= self.length
        """Whether all its memory was there when it was mapped, so that to touch it takes none."""


_mappings: WeakValueDictionary[tuple[int, int, int], PoolMapping] = WeakValueDictionary()
"""By device, inode and length. A mapped file keeps its inode, so a number stands for one file."""


def _mapping_of(descriptor: int, length: int) -> PoolMapping:
    """Two threads at once may map a file twice, which costs no more than that.

    Raises OSError when the file cannot be mapped.
    """
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino, length)
    known = _mappings.get(key)
    if known is None:
        known = _mappings.setdefault(
            key, PoolMapping(mmap.mmap(descriptor, length), status.st_blocks * STAT_BLOCK_BYTES)
        )
    return known


class AttachedPool(PoolShape):
    """The daemon's pool file as this process maps it.

    The mapping lives until the last view of it is gone, so a view never dangles, not even after
    the daemon went away: what ends is the right to use it (see `Lease.is_valid`).
    """

    def __init__(self, descriptor: int, pool_bytes: int, part_bytes: int) -> None:
        """Map the file; the descriptor stays the caller's to close.

        Raises:
            UnavailableError: the file is shorter than announced, or cannot be mapped.
        """
        size = os.fstat(descriptor).st_size
        if not 0 < part_bytes <= pool_bytes <= size:
            raise UnavailableError(
                f"pool file has {size} bytes, the daemon announced {pool_bytes} with blocks of"
                f" {part_bytes}; was the file truncated? Restart the daemon"
            )
        try:
            self.mapping = _mapping_of(descriptor, pool_bytes)
        except OSError as error:
            raise UnavailableError(
                f"pool of {pool_bytes} bytes cannot be mapped: {error}"
            ) from None
        super().__init__(pool_bytes, part_bytes)
        self._bytes, self._array = self.mapping.bytes, self.mapping.array

    def writable(self, offset: int) -> memoryview:
        """The part's bytes at `offset`. Raises InvalidRequestError outside the pool."""
        if not self.holds(offset):
            raise InvalidRequestError(f"offset {offset} is outside the pool of {self.pool_bytes}")
        return self._bytes[offset : offset + self.part_bytes]

    def readable(self, offset: int) -> memoryview:
        """As `writable`, but read-only."""
        return self.writable(offset).toreadonly()

    def read_parts(self, parts: Sequence[PartPlace], target: npt.NDArray[np.uint8]) -> None:
        """Copy parts into a buffer of as many as `target` has room for.

        What is next to each other on both sides is copied in one go, which is faster above all
        for blocks below 1 MiB, and without the interpreter lock. Offsets are the caller's to check.
        """
        self.read_places(PartPlaces.of(parts), target)

    def write_parts(self, parts: Sequence[PartPlace], source: npt.NDArray[np.uint8]) -> None:
        """As `read_parts`, the other way."""
        self.write_places(PartPlaces.of(parts), source)

    def read_places(self, places: PartPlaces, target: npt.NDArray[np.uint8]) -> None:
        """`read_parts`, without an object for each part."""
        for run in self._runs(places):
            np.copyto(
                target[run.start : run.start + run.length],
                self._array[run.offset : run.offset + run.length],
            )

    def write_places(self, places: PartPlaces, source: npt.NDArray[np.uint8]) -> None:
        """`write_parts`, without an object for each part."""
        for run in self._runs(places):
            np.copyto(
                self._array[run.offset : run.offset + run.length],
                source[run.start : run.start + run.length],
            )

    def _runs(self, parts: PartPlaces) -> Iterator[_Run]:
        length, numbers, offsets = self.part_bytes, parts.numbers, parts.offsets
        if isinstance(numbers, range) and offsets:
            first, size = offsets[0], len(offsets) * length
            in_a_row = range(numbers.start, numbers.start + len(offsets))
            # One run, as nearly always.
            if numbers == in_a_row and offsets == [*range(first, first + size, length)]:
                yield _Run(numbers.start * length, first, size)
                return
        begun: _Run | None = None
        for number, offset in zip(numbers, offsets, strict=True):
            start = number * length
            if begun is not None and (start, offset) == (
                begun.start + begun.length,
                begun.offset + begun.length,
            ):
                begun.length += length
                continue
            if begun is not None:
                yield begun
            begun = _Run(start, offset, length)
        if begun is not None:
            yield begun

    def prefault(self, deadline: float) -> int:
        """Enter the pool's pages into this process's page tables; return how many bytes.

        Call it from a thread that has the time; others may use the pool meanwhile. Ends at
        `deadline` (monotonic seconds), with 0 on a kernel before 5.14. A file that the daemon has
        not populated takes its memory by this.
        """
        done = 0
        for step in steps(Extent(0, self.pool_bytes)):
            if time.monotonic() >= deadline:
                break
            if not enter_pages(self.mapping.address + step.start, step.length):
                break
            done += step.length
        return done
