"""Runs of blocks on their way from other nodes, and the tasks that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, SaltId
from store_daemon.bandwidth import ReadSpeed
from store_daemon.block import StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.ports import Followed, Puller, PullRoom, PullTarget

log = logging.getLogger(__name__)


class Pulls:
    """Who pulls from peers. Without a puller there are none. Belongs to one event loop."""

    def __init__(self, holdings: Holdings, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds; says how old a measured speed is."""
        self.puller: Puller | None = None
        self.speed = ReadSpeed()
        """Of runs from peers: asking the index and leasing included, and told apart."""
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
        began, timed = time.perf_counter(), _TimedTarget(target)
        landed = await self.puller.pull(namespace.namespace, parent, hashes, timed, seconds)
        if landed and timed.first_asked is not None:  # else other pulls brought it all
            landed_bytes = landed * namespace.block_bytes
            took, setup = time.perf_counter() - began, timed.first_asked - began
            self.speed.measured(landed_bytes, took, self._clock(), setup)

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


class _TimedTarget:
    """Implements `ports.PullTarget` over another; room is asked for when the first lease is there.

    Few pulls, of different sizes, cannot tell what they cost by themselves from what bytes cost.
    """

    def __init__(self, target: PullTarget) -> None:
        self._target = target
        self.first_asked: float | None = None
        """By `time.perf_counter`."""

    def allot(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        salt_ids: Sequence[SaltId | None] = (),
    ) -> PullRoom:
        if self.first_asked is None:
            self.first_asked = time.perf_counter()
        return self._target.allot(namespace, parent, hashes, salt_ids)
