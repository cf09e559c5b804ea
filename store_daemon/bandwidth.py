"""How fast a source of blocks is, learnt from what it brought lately. Pure: the clock is passed in.

Medians, so that a few stalls or cache hits do not count. Old samples are forgotten: a source that
was slow once, and is therefore not asked any more, becomes unknown, and is tried again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

MAX_SAMPLES = 64
MEMORY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    read_bytes: int
    seconds: float


class ReadSpeed:
    """The last reads of one source. `now` is monotonic seconds and never falls."""

    def __init__(self, samples: int = MAX_SAMPLES, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._samples: deque[_Sample] = deque(maxlen=samples)
        self._memory_seconds = memory_seconds

    def measured(self, read_bytes: int, seconds: float, now: float) -> None:
        """A read of so many bytes (more than 0) took so long, while others went on beside it."""
        assert read_bytes > 0
        assert not self._samples or now >= self._samples[-1].at
        self._samples.append(_Sample(now, read_bytes, max(seconds, 1e-9)))

    def bytes_per_second(self, now: float) -> float | None:
        """Median over the reads; None when nothing was read lately."""
        self._forget(now)
        if not self._samples:
            return None
        return median(sample.read_bytes / sample.seconds for sample in self._samples)

    def read_seconds(self, now: float) -> float | None:
        """Median time of a read, whatever its size; None when nothing was read lately."""
        self._forget(now)
        if not self._samples:
            return None
        return median(sample.seconds for sample in self._samples)

    def seconds_for(self, wanted_bytes: int, now: float) -> float | None:
        """How long one read of so many bytes takes; None when nothing was read lately."""
        speed = self.bytes_per_second(now)
        return None if speed is None else wanted_bytes / speed

    def check_integrity(self) -> None:
        """Assert that samples are in order, bounded and possible."""
        times = [sample.at for sample in self._samples]
        assert times == sorted(times)
        assert self._samples.maxlen is not None
        assert len(times) <= self._samples.maxlen
        assert all(s.read_bytes > 0 and s.seconds > 0 for s in self._samples)

    def _forget(self, now: float) -> None:
        while self._samples and now - self._samples[0].at > self._memory_seconds:
            self._samples.popleft()
