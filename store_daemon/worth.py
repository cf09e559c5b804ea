"""Which blocks are worth waiting for, when computing them anew costs so many seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberkv_proto.types import Source


@dataclass(frozen=True, slots=True)
class Pace:
    """How a source brings blocks of one size."""

    block_seconds: float
    """For one block, with the others that are brought beside it."""
    lanes: int
    """How many are brought at a time."""
    ahead: int = 0
    """Blocks for others that come first."""
    setup_seconds: float = 0.0
    """Before the first one moves."""

    def arrival_seconds(self, number: int) -> float:
        """From now until block `number` (from 0) of this source is here."""
        rounds = math.ceil((self.ahead + number + 1) / self.lanes)
        return self.setup_seconds + rounds * self.block_seconds


def expected_arrivals(pending: Sequence[Source], paces: Mapping[Source, Pace]) -> list[float]:
    """Seconds from now until each of the pending blocks, and all before it, are here.

    A source without a pace was not measured: it is taken to be fast, so that it is tried.
    """
    counts = dict.fromkeys(paces, 0)
    arrivals: list[float] = []
    latest = 0.0
    for source in pending:
        pace = paces.get(source)
        if pace is not None:
            latest = max(latest, pace.arrival_seconds(counts[source]))
            counts[source] += 1
        arrivals.append(latest)
    return arrivals


def blocks_worth_loading(arrivals: Sequence[float], recompute_seconds: float) -> int:
    """For how many of the pending blocks to wait, so that all of them are had soonest.

    Those behind are computed, `recompute_seconds` each, once the others have come. Of equal
    choices the one that computes least.
    """
    best, least = 0, recompute_seconds * len(arrivals)
    for number, arrival in enumerate(arrivals, 1):
        seconds = arrival + recompute_seconds * (len(arrivals) - number)
        if seconds <= least:
            best, least = number, seconds
    return best
