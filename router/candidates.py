"""Which engine gets a request: a short list first, then one of it. Pure; chance is passed in.

Every comparison is made within the engines given, which are the healthy ones with room: an engine
that is dead or full changes nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from router.scoring import Estimate, Holding, Load, Speeds, estimate, queue_seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a policy sees it. Equal `affinity` means an equal beginning (or session)."""

    prompt_tokens: int
    affinity: int | None = None


@dataclass(slots=True)  # frozen ones take three times as long to make
class Candidate:
    """One engine as a policy sees it. Not changed once it is made."""

    url: str
    load: Load
    holding: Holding
    speeds: Speeds


class Policy(Protocol):
    """How one of several engines is picked."""

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        """Return one of `candidates`, which is never empty. Changes nothing but `rng`."""
        ...

    def routed(self, url: str) -> None:
        """The request goes to this engine now."""
        ...


@dataclass(frozen=True, slots=True)
class Preferences:
    """How wide the short list is, and how far from the best estimate still counts as equal.

    `copy_factor`: of the time that computing it takes, what each token costs that one other node
    holds and this one does not, whether it is brought or computed here; a share of that where
    several hold it.
    """

    near_best_fraction: float
    least_loaded_candidates: int
    tie_seconds: float
    tie_fraction: float
    copy_factor: float = 0.0


def short_list(candidates: Sequence[Candidate], preferences: Preferences) -> list[Candidate]:
    """Return those whose own hit is near the best, and the least loaded ones."""
    best = max(candidate.holding.node_tokens for candidate in candidates)
    wanted = max(1.0, best * preferences.near_best_fraction)
    queues = [_queue(candidate) for candidate in candidates]
    # All engines as idle as the last one taken come too, or ties would always go to the first.
    limit = sorted(queues)[min(preferences.least_loaded_candidates, len(queues)) - 1]
    return [
        candidate
        for candidate, queue in zip(candidates, queues, strict=True)
        if queue <= limit or candidate.holding.node_tokens >= wanted
    ]


def _queue(candidate: Candidate) -> float:
    return queue_seconds(candidate.load, candidate.speeds)


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """Least estimated time to the first token. Without any hit that is the shortest queue.

    A second copy of what another node holds takes room from blocks that somebody will have to
    compute again, so it counts as some of that work (`copy_factor`); one more of what many hold,
    like a system prompt, counts for little. Among equals the one that
    computes least is taken, then the one that brings least from other nodes, then the one with
    fewest requests: waiting for a sibling's prefill takes as long as repeating it elsewhere, but
    costs nobody anything.
    """

    preferences: Preferences

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        listed = short_list(candidates, self.preferences)
        terms = [estimate_of(item, asked.prompt_tokens) for item in listed]
        held = sorted((item.holding.node_tokens for item in candidates), reverse=True)
        costs = [
            term.total_seconds + self._copy_seconds(item, held)
            for item, term in zip(listed, terms, strict=True)
        ]
        best = min(costs)
        limit = best + max(self.preferences.tie_seconds, best * self.preferences.tie_fraction)
        equal = [
            ((term.uncached_tokens, term.used.peer_tokens), item)
            for item, term, cost in zip(listed, terms, costs, strict=True)
            if cost <= limit
        ]
        least = min(toll for toll, _ in equal)
        return _fewest_active([item for toll, item in equal if toll == least], rng)

    def _copy_seconds(self, item: Candidate, held: Sequence[int]) -> float:
        if not item.holding.peer_tokens:
            return 0.0
        copied = self.preferences.copy_factor * _new_copies(item.holding, held)
        return copied / item.speeds.prefill_tokens_per_second

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


def _new_copies(holding: Holding, held: Sequence[int]) -> float:
    """Tokens beyond its own that others hold, each divided by how many do.

    `held`: what each engine has on its own node, most first.
    """
    own, tokens = holding.node_tokens, 0.0
    upper = own + holding.peer_tokens
    for holders, level in enumerate(held):
        lower = max(level, own)
        if lower < upper:  # what no candidate holds, somebody does who has no room
            tokens += (upper - lower) / max(1, holders)
            upper = lower
        if upper <= own:
            break
    return tokens


class LeastLoadPolicy:
    """Shortest queue, whatever is cached where."""

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
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

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        ordered = sorted(candidates, key=lambda candidate: candidate.url)
        following = [item for item in ordered if item.url > self._last_url]
        return (following or ordered)[0]

    def routed(self, url: str) -> None:
        self._last_url = url


class MaxHitPolicy:
    """The longest hit on the engine's own node, whatever waits there. For comparison."""

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        longest = max(item.holding.node_tokens for item in candidates)
        return _fewest_active(
            [item for item in candidates if item.holding.node_tokens == longest], rng
        )

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


class ConsistentHashPolicy:
    """Equal beginnings go to equal engines, whatever is cached or waits there.

    By rendezvous: an engine that leaves moves only its own share, and one that is full or dead is
    passed over for each beginning's next. Without a beginning: the shortest queue.
    """

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        seed = asked.affinity
        if seed is None:
            return LeastLoadPolicy().pick(asked, candidates, rng)
        return max(candidates, key=lambda item: (_weight(item.url, seed), item.url))

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


class LMetricPolicy:
    """Least product of tokens to prefill and requests to serve, as LMetric (arXiv 2603.15202)."""

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        products = [_product(item, asked.prompt_tokens) for item in candidates]
        least = min(products)
        return _fewest_active(
            [item for item, product in zip(candidates, products, strict=True) if product == least],
            rng,
        )

    def routed(self, url: str) -> None:
        """The ledger knows; nothing is kept here."""


def _product(candidate: Candidate, prompt_tokens: int) -> int:
    load = candidate.load
    new = estimate_of(candidate, prompt_tokens).uncached_tokens
    return (load.queued_prefill_tokens + new) * (load.active_requests + 1)


def _weight(url: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(url.encode(), seed=seed & (1 << 64) - 1)


def make_policy(name: str, preferences: Preferences) -> Policy:
    """Return the policy called `name` in the settings."""
    policies: Mapping[str, Policy] = {
        "cost": CostPolicy(preferences),
        "least_load": LeastLoadPolicy(),
        "round_robin": RoundRobinPolicy(),
        "max_hit": MaxHitPolicy(),
        "consistent_hash": ConsistentHashPolicy(),
        "lmetric": LMetricPolicy(),
    }
    return policies[name]


def estimate_of(candidate: Candidate, prompt_tokens: int) -> Estimate:
    """Return the terms of one candidate, for the ledger, the metrics and /route/explain."""
    return estimate(prompt_tokens, candidate.holding, candidate.load, candidate.speeds)


def _fewest_active(tied: Sequence[Candidate], rng: random.Random) -> Candidate:
    fewest = min(item.load.active_requests for item in tied)
    return rng.choice([item for item in tied if item.load.active_requests == fewest])
