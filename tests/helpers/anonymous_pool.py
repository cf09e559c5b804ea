"""A pool in memory that has no name."""

from __future__ import annotations

import mmap
import os
from types import TracebackType


class AnonymousPool:
    """`size` bytes of zeros; the whole of it is `view`. A context manager."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """`descriptor` is of one that another process made; it belongs to the pool then."""
        if descriptor is None:
            descriptor = os.memfd_create("emberkv-test-pool", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(self.descriptor, size)
        self.view = memoryview(self._memory)

    def close(self) -> None:
        self.view.release()
        self._memory.close()
        os.close(self.descriptor)

    def __enter__(self) -> AnonymousPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
