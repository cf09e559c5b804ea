"""Counts of observations by size, as Prometheus wants them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many observations were at most each bound. `observe` is O(log bounds).

    Args:
        bounds: rising; what is above the last counts only in the total.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and how many were at most that; the last bound is +Inf."""
        total, found = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return found


class Measures:
    """What is timed while the store works; each is cheap enough for the path it is on."""

    def __init__(self) -> None:
        self.reuse_gap_seconds = Histogram((1, 10, 60, 300, 900, 3600, 4 * 3600, 86400))
        """Since the last use of the last block of each hit, when it was asked for again."""
        self.evicted_idle_seconds = Histogram((1, 10, 60, 300, 900, 3600, 4 * 3600, 86400))
        """Since the last use of each block that left DRAM for room."""
        self.call_seconds: dict[str, Histogram] = {}
        """By method of local sessions; every CALL_SAMPLE-th call."""

    def observe_call(self, method: str, seconds: float) -> None:
        histogram = self.call_seconds.get(method)
        if histogram is None:
            bounds = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)
            histogram = self.call_seconds[method] = Histogram(bounds)
        histogram.observe(seconds)


CALL_SAMPLE = 16
"""One of so many calls of a session is timed."""
