"""What each engine's prefill and fetches cost, learned from measured stretches. Pure.

Prefill is `a * tokens + b * tokens * context`: a line of seconds per token over the mean context,
fitted by medians (of pairwise slopes, then of what is left), so that up to a quarter of the samples
may be anything. Fetches are a median of tokens a second for each tier. Windows are bounded and
samples grow old: an engine that gets no requests because it was slow is judged like a new one after
`max_age_seconds`. A new one is taken for the median of the others, and for the settings' first
guesses where no other has been measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from router.scoring import Speeds, attention_pairs
from router.stretches import Stopwatch, Watched, Worked

LEAST_TOKENS = 64
"""A stretch with fewer computed or fetched tokens is mostly overhead."""
SLOWEST_TOKENS_PER_SECOND = 1.0
FASTEST_TOKENS_PER_SECOND = 1e8
MOST_QUADRATIC_SECONDS = 1e-5
LEAST_CONTEXT_SPREAD = 512.0
"""Contexts closer together say nothing about the slope."""
NEGLIGIBLE_SHARE = 0.1
"""Fetched tokens per computed one that leave a stretch one of prefill."""
ALIKE_PROMPTS = (500, 4000, 16_000)
ALIKE_RATIO = 1.2
"""Engines whose estimates for all these prompts are this close are one as quick as the other."""
LEAST_FETCH_SHARE = 0.05
"""Of a stretch's time; what a fetch took cannot be told more exactly."""


@dataclass(frozen=True, slots=True)
class LearningLimits:
    """How many samples are kept per engine and kind, how many it takes, how long they count."""

    window: int = 32
    least_samples: int = 6
    max_age_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    context: float
    value: float
    """Seconds per computed token, or fetched tokens per second."""


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """How many samples stand behind an engine's speeds."""

    prefill: int = 0
    dram: int = 0
    ssd: int = 0
    peer: int = 0


class _Engine:
    __slots__ = ("fetches", "is_stale", "own", "prefill", "stopwatch")

    def __init__(self, stopwatch: Stopwatch, window: int) -> None:
        self.stopwatch = stopwatch
        self.prefill: deque[_Sample] = deque(maxlen=window)
        self.fetches: dict[str, deque[_Sample]] = {
            tier: deque(maxlen=window) for tier in ("dram", "ssd", "peer")
        }
        self.own: dict[str, float] = {}
        """Fields of Speeds that its samples decide."""
        self.is_stale = False


class SpeedBook:
    """The speeds of all engines. Samples are only kept when they come; `refresh` does the sums."""

    def __init__(
        self,
        guesses: Speeds,
        limits: LearningLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guesses = guesses
        self._limits = limits
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._newcomer = guesses
        self._speeds: dict[str, Speeds] = {}
        self.version = 0
        """Another one whenever what `of` says has changed."""
        self.taken = 0
        self.absurd = 0
        """Samples outside of all reason."""
        self.unclear = 0
        """Stretches of both kinds of work, or of too little."""

    def of(self, url: str) -> Speeds:
        """The speeds of an engine as of the last `refresh`. O(1)."""
        return self._speeds.get(url, self._newcomer)

    def watch(self, url: str) -> Watched:
        """A request goes to this engine now; use as a context manager."""
        engine = self._engines.get(url)
        if engine is None:
            stopwatch = Stopwatch(
                self._clock, lambda worked, seconds: self.learn(url, worked, seconds)
            )
            engine = self._engines[url] = _Engine(stopwatch, self._limits.window)
        return engine.stopwatch.send()

    def learn(self, url: str, worked: Worked, seconds: float) -> None:
        """Keep one measured stretch, as a sample of what it was mostly about."""
        engine = self._engines.get(url)
        if engine is None:
            return  # forgotten in the meantime
        computed, speeds = worked.computed_tokens, self.of(url)
        in_all = worked.dram_tokens + worked.ssd_tokens + worked.peer_tokens
        if in_all <= computed * NEGLIGIBLE_SHARE:
            if computed < LEAST_TOKENS:
                self.unclear += 1
                return
            spent = seconds
            if in_all:
                spent -= worked.dram_tokens / speeds.dram_tokens_per_second
                spent -= worked.ssd_tokens / speeds.ssd_tokens_per_second
                spent -= worked.peer_tokens / speeds.peer_tokens_per_second
            each = spent / computed
            self._take(
                engine.prefill,
                engine,
                worked.attention_pairs / computed,
                each,
                1 / max(1e-12, each),
            )
            return
        fetched = {
            "dram": worked.dram_tokens,
            "ssd": worked.ssd_tokens,
            "peer": worked.peer_tokens,
        }
        tier, most = max(fetched.items(), key=lambda item: item[1])
        if most >= max(LEAST_TOKENS, computed, 0.9 * in_all):
            spent = seconds - speeds.work_seconds(computed, worked.attention_pairs)
            if tier == "peer":
                spent -= speeds.peer_setup_seconds
            speed = most / max(spent, seconds * LEAST_FETCH_SHARE, 1e-9)
            self._take(engine.fetches[tier], engine, 0.0, speed, speed)
        else:
            self.unclear += 1

    def refresh(self) -> None:
        """Drop what is too old and fit anew what changed. Called a few times a second."""
        oldest = self._clock() - self._limits.max_age_seconds
        changed = False
        for engine in self._engines.values():
            for samples in (engine.prefill, *engine.fetches.values()):
                while samples and samples[0].at < oldest:
                    samples.popleft()
                    engine.is_stale = True
            if engine.is_stale:
                self._fit(engine)
                engine.is_stale = False
                changed = True
        if changed:
            self._publish()

    def forget(self, url: str) -> None:
        """The engine is gone for good."""
        if self._engines.pop(url, None) is not None:
            self._publish()

    def counts(self, url: str) -> SampleCounts:
        engine = self._engines.get(url)
        if engine is None:
            return SampleCounts()
        fetches = {tier: len(samples) for tier, samples in engine.fetches.items()}
        return SampleCounts(len(engine.prefill), **fetches)

    def check_integrity(self) -> None:
        assert self._speeds.keys() <= self._engines.keys()
        for engine in self._engines.values():
            engine.stopwatch.check_integrity()
            for samples in (engine.prefill, *engine.fetches.values()):
                assert all(a.at <= b.at for a, b in zip(samples, list(samples)[1:], strict=False))
        for speeds in self._speeds.values():
            for speed in (
                speeds.prefill_tokens_per_second,
                speeds.dram_tokens_per_second,
                speeds.ssd_tokens_per_second,
                speeds.peer_tokens_per_second,
            ):
                assert 0 < speed <= FASTEST_TOKENS_PER_SECOND
            assert 0 <= speeds.prefill_quadratic_seconds <= MOST_QUADRATIC_SECONDS

    def _take(
        self, samples: deque[_Sample], engine: _Engine, context: float, value: float, speed: float
    ) -> None:
        if value <= 0 or not SLOWEST_TOKENS_PER_SECOND <= speed <= FASTEST_TOKENS_PER_SECOND:
            self.absurd += 1
            return
        samples.append(_Sample(self._clock(), context, value))
        engine.is_stale = True
        self.taken += 1

    def _fit(self, engine: _Engine) -> None:
        engine.own = {}
        least = self._limits.least_samples
        if len(engine.prefill) >= least:
            slope = _slope(engine.prefill, self._newcomer.prefill_quadratic_seconds)
            base = median(sample.value - slope * sample.context for sample in engine.prefill)
            engine.own["prefill_quadratic_seconds"] = slope
            engine.own["prefill_tokens_per_second"] = 1 / max(base, 1 / FASTEST_TOKENS_PER_SECOND)
        for tier, samples in engine.fetches.items():
            if len(samples) >= least:
                engine.own[f"{tier}_tokens_per_second"] = median(item.value for item in samples)

    def _publish(self) -> None:
        fleet: dict[str, float] = {}
        for field in sorted({name for engine in self._engines.values() for name in engine.own}):
            known = [engine.own[field] for engine in self._engines.values() if field in engine.own]
            fleet[field] = median(known)
        self._newcomer = replace(self._guesses, **fleet)
        self.version += 1
        self._speeds = {
            url: self._own_or_alike(replace(self._newcomer, **engine.own))
            for url, engine in self._engines.items()
            if engine.own
        }

    def _own_or_alike(self, own: Speeds) -> Speeds:
        """An engine's speeds; its prefill is the median's where it is hardly another.

        Else of equal engines the one that chance measured quicker would get all requests that come
        one at a time.
        """
        usual = self._newcomer
        for prompt in ALIKE_PROMPTS:
            pairs = attention_pairs(prompt, prompt)
            ratio = own.work_seconds(prompt, pairs) / usual.work_seconds(prompt, pairs)
            if not 1 / ALIKE_RATIO <= ratio <= ALIKE_RATIO:
                return own
        return replace(
            own,
            prefill_tokens_per_second=usual.prefill_tokens_per_second,
            prefill_quadratic_seconds=usual.prefill_quadratic_seconds,
        )


def _slope(samples: deque[_Sample], known: float) -> float:
    """The median slope over all pairs far enough apart; `known` where too few are."""
    points = list(samples)
    slopes = [
        (one.value - two.value) / (one.context - two.context)
        for at, one in enumerate(points)
        for two in points[:at]
        if abs(one.context - two.context) >= LEAST_CONTEXT_SPREAD
    ]
    if len(slopes) < len(points):
        return known
    return min(max(median(slopes), 0.0), MOST_QUADRATIC_SECONDS)
