"""A pool in anonymous memory."""

from __future__ import annotations

import mmap
from types import TracebackType


class AnonymousPool:
    """`size` bytes of zeros; the whole of it is `view`. A context manager."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self.view = memoryview(self._memory)

    def close(self) -> None:
        self.view.release()
        self._memory.close()

    def __enter__(self) -> AnonymousPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
