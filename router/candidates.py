"""Which engine gets a request: a short list first, then one of it. Pure; chance is passed in.

Every comparison is made within the engines given, which are the healthy ones with room: an engine
that is dead or full changes nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.scoring import Estimate, Holding, Load, Speeds, estimate, queue_seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine as a policy sees it."""

    url: str
    load: Load
    holding: Holding
    speeds: Speeds


class Policy(Protocol):
    """How one of several engines is picked."""

    def pick(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: random.Random
    ) -> Candidate:
        """Return one of `candidates`, which is never empty. Changes nothing but `rng`."""
        ...

    def routed(self, url: str) -> None:
        """The request goes to this engine now."""
        ...


@dataclass(frozen=True, slots=True)
class Preferences:
    """How wide the short list is, and how far from the best estimate still counts as equal."""

    near_best_fraction: float
    least_loaded_candidates: int
    tie_seconds: float
    tie_fraction: float


def short_list(candidates: Sequence[Candidate], preferences: Preferences) -> list[Candidate]:
    """Return those whose own hit is near the best, and the least loaded ones."""
    best = max(candidate.holding.node_tokens for candidate in candidates)
    wanted = max(1.0, best * preferences.near_best_fraction)
    by_load = sorted(candidates, key=_queue)  # stable, so equal loads keep the caller's order
    room = preferences.least_loaded_candidates
    # All engines as idle as the last one taken come too, or ties would always go to the first.
    limit = _queue(by_load[min(room, len(by_load)) - 1])
    return [
        candidate
        for candidate in candidates
        if candidate.holding.node_tokens >= wanted or _queue(candidate) <= limit
    ]


def _queue(candidate: Candidate) -> float:
    return queue_seconds(candidate.load, candidate.speeds)


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """Least estimated time to the first token. Without any hit that is the shortest queue.

    Among equals the one that computes least is taken, then the one with fewest requests: waiting
    for a sibling's prefill takes as long as repeating it elsewhere, but costs nobody anything.
    """

    preferences: Preferences

    def pick(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: random.Random
    ) -> Candidate:
        listed = short_list(candidates, self.preferences)
        terms = [estimate_of(item, prompt_tokens) for item in listed]
        best = min(term.total_seconds for term in terms)
        limit = best + max(self.preferences.tie_seconds, best * self.preferences.tie_fraction)
        equal = [
            (term.uncached_tokens, item)
            for item, term in zip(listed, terms, strict=True)
            if term.total_seconds <= limit
        ]
        least = min(uncached for uncached, _ in equal)
        return _fewest_active([item for uncached, item in equal if uncached == least], rng)

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


class LeastLoadPolicy:
    """Shortest queue, whatever is cached where."""

    def pick(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: random.Random
    ) -> Candidate:
        queues = [_queue(item) for item in candidates]
        shortest = min(queues)
        return _fewest_active(
            [item for item, queue in zip(candidates, queues, strict=True) if queue <= shortest], rng
        )

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


class RoundRobinPolicy:
    """One after the other, in the order of their URLs."""

    def __init__(self) -> None:
        self._last_url = ""

    def pick(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: random.Random
    ) -> Candidate:
        ordered = sorted(candidates, key=lambda candidate: candidate.url)
        following = [item for item in ordered if item.url > self._last_url]
        return (following or ordered)[0]

    def routed(self, url: str) -> None:
        self._last_url = url


def make_policy(name: str, preferences: Preferences) -> Policy:
    """Return the policy called `name` in the settings."""
    policies: Mapping[str, Policy] = {
        "cost": CostPolicy(preferences),
        "least_load": LeastLoadPolicy(),
        "round_robin": RoundRobinPolicy(),
    }
    return policies[name]


def estimate_of(candidate: Candidate, prompt_tokens: int) -> Estimate:
    """Return the terms of one candidate, for the ledger, the metrics and /route/explain."""
    return estimate(prompt_tokens, candidate.holding, candidate.load, candidate.speeds)


def _fewest_active(tied: Sequence[Candidate], rng: random.Random) -> Candidate:
    fewest = min(item.load.active_requests for item in tied)
    return rng.choice([item for item in tied if item.load.active_requests == fewest])
