"""All contact with the store daemon: loads layer by layer, saves in the background.

Two threads, each with a session of its own, so a slow load never holds up a save. Whatever fails
is counted and becomes a miss; nothing here raises into the engine or waits without a deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from client_sdk.attached_pool import gather_from_pages, scatter_into_pages
from client_sdk.sync_client import Lease, SyncClient
from emberkv_proto.errors import CorruptionError, EmberError
from emberkv_proto.types import AcquirePolicy, BlockHash, Source, StageState

log = logging.getLogger(__name__)
Pages = npt.NDArray[np.float32]
J = TypeVar("J")


@dataclass(eq=False, slots=True)
class LoadJob:
    """Blocks on their way from the store into `blocks` of the pages. Its methods are thread-safe.

    First it settles: so many leading blocks are in DRAM and their checksums hold. Then the layers
    arrive one by one. The last one counts only when the daemon has answered after it was copied:
    had it died and come back in between, the slots could hold other blocks.
    """

    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    deadline: float
    """Monotonic; what has not settled by then is recomputed."""
    sources: tuple[Source, ...] | None = None
    """Of the settled blocks; None until it settled."""
    layers: int = 0
    is_over: bool = False
    """Complete, failed or cancelled: no copy is running, none will start."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def settle(self, sources: Sequence[Source]) -> bool:
        with self._changed:
            if not self.is_over:
                self.sources = tuple(sources)
            return not self.is_over

    def copy_layer(self, copy: Callable[[], None]) -> bool:
        """Run `copy` unless the job is over. Holds the lock, so `cancel` waits for it to end."""
        with self._changed:
            if not self.is_over:
                copy()
            return not self.is_over

    def arrived(self, layers: int) -> None:
        with self._changed:
            self.layers = layers
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_seconds: float) -> bool:
        """Whether layer number `layer` of all settled blocks is in the pages."""
        with self._changed:
            self._changed.wait_for(lambda: self.layers > layer or self.is_over, timeout_seconds)
            return self.layers > layer

    def cancel(self) -> None:
        """End the job; on return nothing writes into its blocks any more."""
        with self._changed:
            self.is_over = True
            self.sources = self.sources or ()
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Full blocks on which the engine holds references until `take_copied` returns them."""

    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    parent: BlockHash | None


class StoreLink:
    """Loader and saver thread, which own their clients. They call `wake` when there is news."""

    def __init__(
        self,
        loader_client: SyncClient,
        saver_client: SyncClient,
        pages: Pages,
        save_queue_blocks: int,
        wake: Callable[[], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Blocks or events by what became of them; written by both threads under a lock."""
        self._lock = threading.Lock()
        self._pages = pages
        self._wake = wake
        self._save_room = save_queue_blocks
        self._loads: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._copied: deque[SaveJob] = deque()
        self._loader_client, self._saver_client = loader_client, saver_client
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True)
            for name, loop in (("kv-loader", self._load_loop), ("kv-saver", self._save_loop))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, hashes: Sequence[BlockHash], blocks: Sequence[int], deadline: float) -> LoadJob:
        job = LoadJob(hashes, blocks, deadline)
        self._loads.put(job)
        return job

    def save(self, job: SaveJob) -> bool:
        """Queue a save; False when the queue is full. The caller holds references if True."""
        if len(job.blocks) > self._save_room:
            self.count("save_queue_full_blocks", len(job.blocks))
            return False
        self._save_room -= len(job.blocks)
        self._saves.put(job)
        return True

    def take_copied(self) -> list[SaveJob]:
        """Saves that are over, in either way: their references can be dropped."""
        jobs = [self._copied.popleft() for _ in range(len(self._copied))]
        self._save_room += sum(len(job.blocks) for job in jobs)
        return jobs

    def close(self, timeout_seconds: float) -> bool:
        """Finish what is queued and end the threads; False if they did not end in time."""
        self._loads.put(None)
        self._saves.put(None)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def count(self, what: str, blocks: int = 1) -> None:
        with self._lock:
            self.counts[what] += blocks

    def _load_loop(self) -> None:
        with self._loader_client as client:
            for job in self._jobs(self._loads, client):
                try:
                    self._guard("load", partial(self._load, client, job))
                finally:
                    if job.sources is None or job.layers < self._pages.shape[0]:
                        job.cancel()
                    self._wake()

    def _save_loop(self) -> None:
        with self._saver_client as client:
            for job in self._jobs(self._saves, client):
                try:
                    self._guard("save", partial(self._save, client, job))
                finally:
                    self._copied.append(job)
                    self._wake()

    def _jobs(self, jobs: queue.SimpleQueue[J | None], client: SyncClient) -> Iterator[J]:
        """Jobs until None. The client keeps its session from here on, so that the node knows us."""
        self._guard("connect", client.connect)
        while (job := jobs.get()) is not None:
            yield job

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """Run one action; what goes wrong is a count, and a bug of ours is in the log as well."""
        try:
            action()
        except EmberError as error:
            self.count(f"{what}_{type(error).__name__}")
        except Exception:
            log.exception("store %s failed in a way it should not", what)
            self.count(f"{what}_failed")

    def _load(self, client: SyncClient, job: LoadJob) -> None:
        seconds = job.deadline - time.monotonic()
        if seconds <= 0 or job.is_over:
            self.count("load_too_late")
            return
        with client.acquire(
            job.hashes, policy=AcquirePolicy.TIMEOUT, deadline_seconds=seconds
        ) as lease:
            verified = self._verified_blocks(lease, job)
            if not job.settle(lease.sources[:verified]):
                return
            self._wake()
            views = [lease.view(number) for number in range(verified)]
            pages, blocks, last = self._pages, job.blocks[:verified], self._pages.shape[0] - 1
            for layer in range(last + 1):
                if not job.copy_layer(partial(scatter_into_pages, views, pages, blocks, layer)):
                    return
                if layer == last and verified:
                    client.heartbeat()  # the daemon lives, and on this very session:
                    lease.require_valid()  # it guarded the slots up to here
                job.arrived(layer + 1)
            self.count("loaded_blocks", verified)

    def _verified_blocks(self, lease: Lease, job: LoadJob) -> int:
        """Leading blocks that are in DRAM before the deadline and match their checksums."""
        verified, ready = 0, lease.ready_blocks
        while not job.is_over:
            if verified < ready:
                try:
                    lease.verify(verified)
                except CorruptionError:
                    self.count("corrupt_blocks")
                    break
                verified += 1
                continue
            seconds = job.deadline - time.monotonic()
            if ready >= lease.usable_blocks or seconds <= 0:
                break
            ready = lease.wait(ready + 1, timeout_seconds=seconds)
        return verified

    def _save(self, client: SyncClient, job: SaveJob) -> None:
        with client.stage(job.hashes, parent=job.parent) as staged:
            granted = [n for n, state in enumerate(staged.states) if state is StageState.GRANTED]
            for state in staged.states:
                self.count(f"save_{state.name.lower()}_blocks")
            if granted:
                views = [staged.view(number) for number in granted]
                gather_from_pages(self._pages, [job.blocks[n] for n in granted], views)
                staged.commit(granted)
