"""All contact with the store daemon: verified loads, copied layer by layer, and saves.

Loads, copies and saves have a thread each, and saves a session of their own, so none holds up
another. What fails is counted and becomes None; every job ends by the client's deadlines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter

from client_sdk.paged import gather_from_pages, scatter_into_pages
from client_sdk.sync_borrowed import Lease
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import ChecksumUnknownError, CorruptionError, EmberError
from emberkv_proto.types import AcquirePolicy, BlockHash, SaltId, Source, StageState

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verified:
    """Leading blocks of a chain that are in DRAM, match their checksums, and are leased."""

    lease: Lease
    sources: Sequence[Source]
    views: Sequence[memoryview]
    held: ExitStack  # ends the lease


class StoreLink:
    """Threads and clients. Every job is a future; its result is None if it failed."""

    def __init__(
        self, loader: SyncClient, saver: SyncClient, pages: npt.NDArray[np.float32], events: Counter
    ) -> None:
        self._loader, self._saver, self._pages, self._events = loader, saver, pages, events
        self._threads = [ThreadPoolExecutor(1, f"kv-{job}") for job in ("load", "copy", "save")]
        self._loads, self._copies, self._saves = self._threads
        # The clients keep their sessions from here on, so that the node knows us.
        self._submit(self._loads, "connect", loader.connect)
        self._submit(self._saves, "connect", saver.connect)

    def load(self, hashes: Sequence[BlockHash], deadline: float) -> Future[Verified | None]:
        """Bring and verify what is there by the (monotonic) deadline; then `copy` or `release`."""
        return self._submit(self._loads, "load", lambda: self._load(hashes, deadline))

    def copy(self, load: Verified, blocks: Sequence[int]) -> list[Future[bool | None]]:
        """Copy into `blocks` of the pages: a future for each layer, and one more.

        That one says that the daemon has answered after the last copy: had it died and come back
        in between, the slots could hold other blocks.
        """
        layers = range(len(self._pages))
        jobs = [partial(self._copy, load, blocks, layer) for layer in layers]
        jobs.append(partial(self._confirm, load))
        return [self._submit(self._copies, "copy", job) for job in jobs]

    def release(self, load: Verified) -> None:
        self._submit(self._copies, "release", load.held.close)

    def save(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[int],
        parent: BlockHash | None,
        salt_id: SaltId | None = None,
    ) -> Future[None]:
        """Save full blocks, on which the caller holds references until the future is done."""
        job = partial(self._save, hashes, blocks, parent, salt_id)
        return self._submit(self._saves, "save", job)

    def close(self) -> None:
        """End the running jobs, forget those that wait."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        self._loader.close()
        self._saver.close()

    def _submit(
        self, thread: ThreadPoolExecutor, what: str, job: Callable[[], T]
    ) -> Future[T | None]:
        def counted() -> T | None:
            try:
                return job()
            except Exception as error:
                if not isinstance(error, EmberError):
                    log.exception("store %s failed in a way it should not", what)
                self._events.labels(f"{what}_{type(error).__name__}").inc()
                return None

        return thread.submit(counted)

    def _load(self, hashes: Sequence[BlockHash], deadline: float) -> Verified | None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None
        with ExitStack() as held:
            lease = held.enter_context(
                self._loader.acquire(hashes, policy=AcquirePolicy.TIMEOUT, deadline_seconds=seconds)
            )
            verified = range(self._verified_blocks(lease, deadline))
            views = [lease.view(number) for number in verified]
            return Verified(lease, lease.sources[: len(views)], views, held.pop_all())

    def _verified_blocks(self, lease: Lease, deadline: float) -> int:
        for number in range(lease.usable_blocks):
            if number >= lease.ready_blocks:
                seconds = deadline - time.monotonic()
                if seconds <= 0 or lease.wait(number + 1, timeout_seconds=seconds) <= number:
                    return number
            try:
                lease.verify(number)
            except CorruptionError:
                self._events.labels("corrupt_blocks").inc()
                return number
            except ChecksumUnknownError:
                self._events.labels("unsummed_blocks").inc()
                return number
        return lease.usable_blocks

    def _copy(self, load: Verified, blocks: Sequence[int], layer: int) -> bool:
        scatter_into_pages(load.views, self._pages, blocks, layer)
        return True

    def _confirm(self, load: Verified) -> bool:
        with load.held:
            self._loader.heartbeat()  # the daemon lives, and on this very session:
            load.lease.require_valid()  # it guarded the slots up to here
        self._events.labels("loaded_blocks").inc(len(load.views))
        return True

    def _save(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[int],
        parent: BlockHash | None,
        salt_id: SaltId | None,
    ) -> None:
        with self._saver.stage(hashes, parent=parent, salt_id=salt_id) as staged:
            granted = [n for n, state in enumerate(staged.states) if state is StageState.GRANTED]
            if granted:
                views = [staged.view(number) for number in granted]
                gather_from_pages(self._pages, [blocks[n] for n in granted], views)
                staged.commit(granted)
                self._events.labels("saved_blocks").inc(len(granted))
