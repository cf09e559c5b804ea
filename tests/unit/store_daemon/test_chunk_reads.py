"""Chunks of one run: threads read them without the loop's help, and are joined in every case."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from client_sdk.transport.base import BusyHereError
from store_daemon.chunk_reads import ChunkReads

CHUNKS = [range(4), range(4, 8), range(8, 12), range(12, 14)]
SECONDS = 30.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


class Reading:
    """Counts what is read; `at` may do something in the middle."""

    def __init__(self, at: Callable[[range], int | None] = lambda chunk: None) -> None:
        self._at = at
        self._lock = threading.Lock()
        self.begun: set[int] = set()
        self.running = 0
        self.most = 0
        self.all_ended = threading.Event()
        self._ended = 0

    def __call__(self, chunk: range) -> int:
        with self._lock:
            assert chunk.start not in self.begun, "read twice"
            self.begun.add(chunk.start)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            good = self._at(chunk)
        finally:
            with self._lock:
                self.running -= 1
                self._ended += 1
                if self._ended == len(CHUNKS):
                    self.all_ended.set()
        return len(chunk) if good is None else good


async def test_all_chunks_are_read_while_the_loop_is_busy(threads: ThreadPoolExecutor) -> None:
    reading = Reading()
    reads = ChunkReads(reading, CHUNKS, 2, threads)
    assert reading.all_ended.wait(SECONDS), "a chunk waited for the loop"
    assert [await reads.good_blocks(n, SECONDS) for n in range(4)] == [4, 4, 4, 2]
    reads.check_integrity()
    await reads.join()
    assert reading.most <= 2


async def test_what_has_not_come_in_time_is_none_and_join_waits_for_it(
    threads: ThreadPoolExecutor,
) -> None:
    go_on = threading.Event()
    reading = Reading(lambda chunk: None if go_on.wait(SECONDS) else 0)
    reads = ChunkReads(reading, CHUNKS, 1, threads)
    assert await reads.good_blocks(0, 0.01) is None
    joining = asyncio.create_task(reads.join())
    await asyncio.sleep(0.05)
    assert not joining.done(), "joined while a thread reads"
    go_on.set()
    await joining
    assert reading.running == 0
    assert reading.begun == {0}, "a read was begun behind the end"
    reads.check_integrity()


async def test_cancelling_the_join_waits_all_the_same_and_passes_it_on(
    threads: ThreadPoolExecutor,
) -> None:
    go_on = threading.Event()
    reading = Reading(lambda chunk: None if go_on.wait(SECONDS) else 0)
    reads = ChunkReads(reading, CHUNKS, 2, threads)
    joining = asyncio.create_task(reads.join())
    await asyncio.sleep(0)
    joining.cancel()
    await asyncio.sleep(0.05)
    assert not joining.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert reading.running == 0


async def test_error_of_a_chunk_is_raised_for_it_and_ends_the_reads(
    threads: ThreadPoolExecutor,
) -> None:
    def fail(chunk: range) -> None:
        if chunk.start == 4:
            raise ConnectionError("gone")

    reading = Reading(fail)
    reads = ChunkReads(reading, CHUNKS, 1, threads)
    assert await reads.good_blocks(0, SECONDS) == 4
    with pytest.raises(ConnectionError, match="gone"):
        await reads.good_blocks(1, SECONDS)
    await reads.join()
    assert reading.begun == {0, 4}


async def test_nothing_is_read_behind_a_wrong_block(threads: ThreadPoolExecutor) -> None:
    reading = Reading(lambda chunk: 1 if chunk.start == 4 else None)
    reads = ChunkReads(reading, CHUNKS, 1, threads)
    assert [await reads.good_blocks(n, SECONDS) for n in range(2)] == [4, 1]
    await reads.join()
    assert reading.begun == {0, 4}


async def test_chunks_that_no_thread_has_begun_are_taken_back() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as busy:
        busy.submit(go_on.wait, SECONDS)
        reading = Reading()
        reads = ChunkReads(reading, CHUNKS, 2, busy)
        await reads.join()
        assert not reading.begun, "the only thread is busy"
        go_on.set()


class OutOfThreads(ThreadPoolExecutor):
    """Cannot start a thread for one of its works, and keeps that one queued, as executors do."""

    def __init__(self, refused: int) -> None:
        super().__init__(4)
        self._left = refused

    def submit(self, *work: Any) -> Future[Any]:  # type: ignore[override]
        future = super().submit(*work)
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("can't start new thread")
        return future


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_a_thread_that_cannot_be_had_is_the_error_of_its_chunk_which_nobody_reads(
    refused: int,
) -> None:
    reading = Reading()
    with OutOfThreads(refused) as threads:
        reads = ChunkReads(reading, CHUNKS, 2, threads)
        assert [await reads.good_blocks(n, SECONDS) for n in range(refused)] == [4] * refused
        with pytest.raises(BusyHereError, match="can't start new thread"):
            await reads.good_blocks(refused, SECONDS)
        await reads.join()
        reads.check_integrity()
    assert reading.begun == {4 * n for n in range(refused)}
