"""One timer for the deadlines of many: a request then costs no timer of its own."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Waiting(Protocol):
    """Something with a deadline (loop time), which it may move later at any time."""

    deadline: float

    def overdue(self) -> None:
        """The deadline is over. It may set another one; else it is watched no longer."""
        ...


class Deadlines:
    """Who waits for something that may not come. All on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: set[Waiting] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def watch(self, waiting: Waiting) -> None:
        """Until `forget`; twice is once. Its deadline may have become an earlier one."""
        self._waiting.add(waiting)
        if self._timer is None or waiting.deadline < self._timer_at:
            self._arm(waiting.deadline)

    def forget(self, waiting: Waiting) -> None:
        self._waiting.discard(waiting)

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for waiting in tuple(self._waiting):
            if waiting.deadline <= now and waiting in self._waiting:
                waiting.overdue()
                if waiting.deadline <= now:
                    self._waiting.discard(waiting)
        if self._waiting:
            self._arm(min(waiting.deadline for waiting in self._waiting))
