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
    setup_seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """What a read takes: something for itself, and something for each byte."""

    setup_seconds: float
    byte_seconds: float

    def seconds_for(self, wanted_bytes: int) -> float:
        return self.setup_seconds + wanted_bytes * self.byte_seconds


class ReadSpeed:
    """The last reads of one source. `now` is monotonic seconds and never falls."""

    def __init__(self, samples: int = MAX_SAMPLES, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._samples: deque[_Sample] = deque(maxlen=samples)
        self._memory_seconds = memory_seconds
        self._line: Line | None = None
        """As fitted since the last read."""

    def measured(
        self, read_bytes: int, seconds: float, now: float, setup_seconds: float = 0.0
    ) -> None:
        """A read of so many bytes (more than 0) took so long, while others went on beside it.

        `setup_seconds` of these are known to have passed before the first byte was asked for.
        """
        assert read_bytes > 0
        assert 0 <= setup_seconds <= max(seconds, 1e-9)
        assert not self._samples or now >= self._samples[-1].at
        self._samples.append(_Sample(now, read_bytes, max(seconds, 1e-9), setup_seconds))
        self._line = None

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

    def line(self, now: float) -> Line | None:
        """For reads of very different sizes; None when nothing was read lately.

        The setup that was measured is worth so many bytes; the time for a byte is the median over
        bytes and these. So a third of nonsense does no harm. Where setups grow with the read (an
        owner brings it from its drive first), it is right for reads of the usual size. O(n log n)
        after a read.
        """
        self._forget(now)
        if not self._samples:
            return None
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> Line:
        samples = self._samples
        setup_seconds = median(s.setup_seconds for s in samples)
        moving = median((s.seconds - s.setup_seconds) / s.read_bytes for s in samples)
        setup_bytes = setup_seconds / max(moving, 1e-15)
        byte_seconds = median(s.seconds / (s.read_bytes + setup_bytes) for s in samples)
        return Line(byte_seconds * setup_bytes, byte_seconds)

    def check_integrity(self) -> None:
        """Assert that samples are in order, bounded and possible."""
        times = [sample.at for sample in self._samples]
        assert times == sorted(times)
        assert self._samples.maxlen is not None
        assert len(times) <= self._samples.maxlen
        assert all(s.read_bytes > 0 and s.seconds > 0 for s in self._samples)
        assert all(0 <= s.setup_seconds <= s.seconds for s in self._samples)

    def _forget(self, now: float) -> None:
        while self._samples and now - self._samples[0].at > self._memory_seconds:
            self._samples.popleft()
            self._line = None
