"""Virtual time: what happens when, in order; nothing waits. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Things that happen at one time happen in the order in which they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """`happen` at that time, or at once where it is over."""
        self._count += 1
        heapq.heappush(self._heap, (max(seconds, self.now), self._count, happen))

    def run_until(self, seconds: float) -> None:
        """Let all that is due by then happen. Infinity: all there is."""
        while self._heap and self._heap[0][0] <= seconds:
            self.now, _, happen = heapq.heappop(self._heap)
            happen()
        if seconds < float("inf"):
            self.now = seconds
