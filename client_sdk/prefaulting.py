"""Pools whose page faults are taken in the background, before a copy meets them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from client_sdk.attached_pool import AttachedPool, PoolMapping
from client_sdk.page_entries import Extent, enter_beside, steps

CLOSE_SECONDS = 10.0
"""What is under way at the end takes milliseconds."""


class PoolPrefault:
    """Maps the pool that was used last, by a thread that rests for longer than it works.

    A pool that its daemon has not populated is left alone: it would take its memory by this. One
    that nobody else holds is let go, so that its memory is free once its daemon is. Any thread may
    call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: weakref.ref[PoolMapping] | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._is_closed = False

    def begin(self, pool: AttachedPool) -> None:
        """Map this pool, unless it was begun before; of another one nothing more is mapped."""
        with self._lock:
            if self._is_closed or (self._begun is not None and self._begun() is pool.mapping):
                return
            self._end()
            self._begun = weakref.ref(pool.mapping)
            if pool.mapping.is_populated:
                self._is_over = threading.Event()
                steps_left = _steps(self._begun, pool.pool_bytes)
                self._thread = threading.Thread(
                    target=enter_beside,
                    args=(pool.mapping.address, steps_left, self._is_over),
                    name="emberkv-prefault",
                    daemon=True,
                )
                self._thread.start()

    def close(self) -> None:
        """Nothing is mapped any more, and nothing begun. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        self._is_over.set()
        thread, self._thread = self._thread, None
        self._begun = None
        if thread is not None:
            thread.join(CLOSE_SECONDS)


def _steps(pool: weakref.ref[PoolMapping], pool_bytes: int) -> Iterator[Extent]:
    """Keeps the pool while a step is entered; ends when nobody else has kept it."""
    for step in steps(Extent(0, pool_bytes)):
        mapping = pool()
        if mapping is None:
            return
        yield step
        del mapping
