"""Runs of blocks on their way from other nodes, and the tasks that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from emberkv_proto.types import BlockHash
from store_daemon.bandwidth import ReadSpeed
from store_daemon.block import StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.ports import Followed, Puller, PullTarget

log = logging.getLogger(__name__)


class Pulls:
    """Who pulls from peers. Without a puller there are none. Belongs to one event loop."""

    def __init__(self, holdings: Holdings, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds; says how old a measured speed is."""
        self.puller: Puller | None = None
        self.speed = ReadSpeed()
        """Of runs from peers: asking the index and leasing included."""
        self._clock = clock
        self._holdings = holdings
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self,
        namespace: StoredNamespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        seconds: float,
    ) -> None:
        """Land what comes of the run within `seconds`. Cancelling it is safe at any point."""
        assert self.puller is not None
        if seconds <= 0:
            return
        began = time.perf_counter()
        landed = await self.puller.pull(namespace.namespace, parent, hashes, target, seconds)
        if landed:
            took_seconds = time.perf_counter() - began
            self.speed.measured(landed * namespace.block_bytes, took_seconds, self._clock())

    async def follow(
        self,
        followed: Followed,
        namespace: StoredNamespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        seconds: float,
    ) -> None:
        """Land what comes of the run while the followed node makes it. As `run`."""
        assert self.puller is not None
        await self.puller.follow(followed, namespace.namespace, parent, hashes, target, seconds)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Let `work`, which ends by its own deadline, run beside the calls."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._holdings.counters["failed_pulls"] += 1
            log.error("pull failed", exc_info=task.exception())
