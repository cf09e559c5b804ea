"""The daemon's pool as a client maps it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import InvalidRequestError, UnavailableError

PREFAULT_CHUNK_BYTES = 64 << 20
"""How much is mapped by one system call, so that a deadline is kept."""
_MADV_POPULATE_WRITE = 23
PIN_CHUNK_BYTES = 64 << 30
"""The most that is registered with CUDA by one call."""


class PartPlace(NamedTuple):
    """Part number `number` of a caller's buffer, and where it is in the pool."""

    number: int
    offset: int


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
            mapped = mmap.mmap(descriptor, pool_bytes)
        except OSError as error:
            raise UnavailableError(
                f"pool of {pool_bytes} bytes cannot be mapped: {error}"
            ) from None
        super().__init__(pool_bytes, part_bytes)
        self._bytes = memoryview(mapped)
        self._array: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self._pinned: list[_PinnedChunk] = []

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
        for run in self._runs(parts):
            np.copyto(
                target[run.start : run.start + run.length],
                self._array[run.offset : run.offset + run.length],
            )

    def write_parts(self, parts: Sequence[PartPlace], source: npt.NDArray[np.uint8]) -> None:
        """As `read_parts`, the other way."""
        for run in self._runs(parts):
            np.copyto(
                self._array[run.offset : run.offset + run.length],
                source[run.start : run.start + run.length],
            )

    def _runs(self, parts: Sequence[PartPlace]) -> Iterator[_Run]:
        length = self.part_bytes
        begun: _Run | None = None
        for number, offset in parts:
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

        A first copy into a fresh mapping takes a page fault for each 4 KiB, about half a second a
        GiB. Call it from a thread that has the time; others may use the pool meanwhile. Ends at
        `deadline` (monotonic seconds), with 0 on a kernel before 5.14. A file that the daemon has
        not populated takes its memory by this.
        """
        base = int(np.frombuffer(self._bytes, np.uint8).ctypes.data)
        # mmap.madvise would keep the interpreter lock all the while; ctypes does not.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        done = 0
        while done < self.pool_bytes and time.monotonic() < deadline:
            length = min(PREFAULT_CHUNK_BYTES, self.pool_bytes - done)
            if madvise(base + done, length, _MADV_POPULATE_WRITE):
                break
            done += length
        return done

    def pin(self) -> None:
        """Register the pool with CUDA, so that copies to and from a GPU need no bounce buffer.

        Needs torch with CUDA, imported by the caller. Not yet verified on a GPU.

        Raises:
            UnavailableError: no CUDA here, or the driver refuses.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise UnavailableError("pinning needs torch with CUDA; none is loaded in this process")
        cudart = torch.cuda.cudart()
        base = int(np.frombuffer(self._bytes, np.uint8).ctypes.data)
        for start in range(0, self.pool_bytes, PIN_CHUNK_BYTES):
            chunk = _PinnedChunk(base + start, min(PIN_CHUNK_BYTES, self.pool_bytes - start))
            status = int(cudart.cudaHostRegister(chunk.address, chunk.length, 0))
            if status:
                self.unpin()
                raise UnavailableError(
                    f"cudaHostRegister of {chunk.length} bytes failed with status {status};"
                    " raise the memory lock limit (ulimit -l)"
                )
            self._pinned.append(chunk)

    def unpin(self) -> None:
        """Undo `pin`; to be called before the last view goes."""
        while self._pinned:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(self._pinned.pop().address)


@dataclass(frozen=True, slots=True)
class _PinnedChunk:
    address: int
    length: int
