"""Reads of one run, chunk by chunk: threads go on by themselves, the event loop takes what came.

A loop that is busy, or waits for a CPU, would leave the wire idle if it had to ask for each chunk.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from client_sdk.transport.base import BusyHereError


class ChunkReads:
    """Begins chunks in order, so many at a time. Belongs to one event loop; always `join` it."""

    def __init__(
        self,
        read: Callable[[range], int],
        chunks: Sequence[range],
        at_once: int,
        threads: Executor,
        first_threads: Executor | None = None,
    ) -> None:
        """`read` runs in `threads`: the chunk's good blocks, or an error, which ends the reads.

        Of the first chunk it runs in `first_threads`, if there are any. A thread that cannot be had
        is a BusyHereError of the chunk that it was for.
        """
        self._loop = asyncio.get_running_loop()
        self._read = read
        self._chunks = chunks
        self._threads = threads
        self._first_threads = first_threads or threads
        self._lock = threading.Lock()
        self._next = 0
        self._end = len(chunks)
        """No chunk from this one on is read."""
        self._works: list[Future[None]] = []
        self._results: list[asyncio.Future[int]] = [self._loop.create_future() for _ in chunks]
        for _ in range(at_once):
            self._begin_next()

    async def good_blocks(self, chunk: int, timeout_seconds: float) -> int | None:
        """How many leading blocks of the chunk are right; None when it has not come in time.

        Raises what reading it raised. After an error in one chunk, those behind it may never come.
        """
        result = self._results[chunk]
        await asyncio.wait({result}, timeout=timeout_seconds)
        return result.result() if result.done() else None

    async def join(self) -> None:
        """Begin no more, and wait until no thread reads, even while being cancelled; then pass the
        cancellation on."""
        with self._lock:
            self._end = 0
            works = list(self._works)
        pending = {asyncio.wrap_future(work) for work in works if not work.cancel()}
        interrupted: asyncio.CancelledError | None = None
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError as error:  # noqa: PERF203 - the wait must be begun again
                interrupted = error
        for result in self._results:
            if result.done():
                result.exception()  # the first failure is raised already
        if interrupted is not None:
            raise interrupted

    def check_integrity(self) -> None:
        """Assert that each chunk was begun at most once, and in order."""
        with self._lock:
            assert len(self._works) <= self._next <= len(self._chunks)
            assert not any(result.done() for result in self._results[self._next :])

    def _begin_next(self) -> None:
        with self._lock:
            if self._next >= self._end:
                return
            number = self._next
            self._next += 1
            threads = self._threads if number else self._first_threads
            try:
                self._works.append(threads.submit(self._work, number))
            except RuntimeError as error:
                # The executor may have queued it all the same: see `_work`.
                self._end = number
                refused = BusyHereError(f"no thread to read with: {error}")
                self._loop.call_soon_threadsafe(self._came, number, 0, refused)

    def _work(self, number: int) -> None:
        with self._lock:
            if number >= self._end:
                return
        chunk = self._chunks[number]
        good, error = 0, None
        try:
            good = self._read(chunk)
        except BaseException as caught:  # the loop raises it
            error = caught
        try:
            if good == len(chunk):
                self._begin_next()
        finally:
            self._loop.call_soon_threadsafe(self._came, number, good, error)

    def _came(self, number: int, good: int, error: BaseException | None) -> None:
        result = self._results[number]
        if error is None:
            result.set_result(good)
        else:
            result.set_exception(error)
