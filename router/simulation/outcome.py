"""What came of a simulated run, in the numbers that policies are compared by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all requests; times in seconds of the simulated cluster, from arrival to first token.

    `hit_rate`: hit tokens of all tokens; `oracle_share`: that over what one cache without bounds
    would find. `imbalance`: work of the busiest engine over the mean. `goodput`: requests a second
    with their first token within the bound, and `good_share` their part of all; failed requests
    have none. `pulled_share`: tokens that came from other nodes, of all tokens.
    `cut_short`: lost after their first token; `retried`: attempts beyond the first.
    """

    requests: int
    hit_rate: float
    oracle_share: float
    pulled_share: float
    imbalance: float
    mean_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    goodput: float
    good_share: float
    retried: int
    failed: int
    cut_short: int


@dataclass(slots=True)
class Tally:
    """Counts while a run goes on. `work`: seconds that each engine was busy."""

    work: list[float]
    waits: list[float] = field(default_factory=list)
    tokens: int = 0
    hit_tokens: int = 0
    pulled_tokens: int = 0
    retried: int = 0
    failed: int = 0
    cut_short: int = 0

    def outcome(self, best_hit_rate: float, bound_seconds: float, seconds: float) -> Outcome:
        """`seconds`: how long requests came. At least one request got its first token."""
        hit_rate = self.hit_tokens / self.tokens
        p50, p90, p99 = np.quantile(np.array(self.waits), (0.5, 0.9, 0.99)).tolist()
        good = sum(wait <= bound_seconds for wait in self.waits)
        requests = len(self.waits) + self.failed
        return Outcome(
            requests=requests,
            hit_rate=hit_rate,
            oracle_share=hit_rate / best_hit_rate if best_hit_rate else 1.0,
            pulled_share=self.pulled_tokens / self.tokens,
            imbalance=imbalance(self.work),
            mean_seconds=fmean(self.waits),
            p50_seconds=p50,
            p90_seconds=p90,
            p99_seconds=p99,
            goodput=good / seconds,
            good_share=good / requests,
            retried=self.retried,
            failed=self.failed,
            cut_short=self.cut_short,
        )


def imbalance(work: Sequence[float]) -> float:
    """The busiest over the mean; 1 where nobody works."""
    mean = fmean(work)
    return max(work) / mean if mean else 1.0
