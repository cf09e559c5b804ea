"""One task for each followed engine, and the sockets' common context."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import zmq.asyncio

from global_index.hbm.engines import Changes, EngineDirectory, EngineKey
from global_index.hbm.source import EngineSource

Supervise = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs some work by name, and starts it again after a fault of ours."""


class EngineFollowers:
    """Begins and ends sources as the directory says. Belongs to one event loop; `stop` frees all.

    The context is opened with the first engine, so that an index without any has no threads of it.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        supervise: Supervise,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._supervise = supervise
        self._clock = clock
        self._context: zmq.asyncio.Context | None = None
        self._tasks: dict[EngineKey, asyncio.Future[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def follow(self, changes: Changes) -> None:
        for key in changes.ended:
            task = self._tasks.pop(key)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key in changes.begun:
            if self._context is None:
                self._context = zmq.asyncio.Context()
            source = EngineSource(key, self._directory, self._context, clock=self._clock)
            work = self._supervise(f"engine {key}", source.run)
            self._tasks[key] = asyncio.ensure_future(work)

    async def stop(self) -> None:
        """End all tasks and close all sockets."""
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)
