"""A cluster of engines without engines: discrete events around the router's own decisions.

Policies, scoring and ledger are the router's; the index is right by construction, and nothing has
an overhead. Each node has one engine that prefills its requests one after the other, and a store of
so many blocks that forgets the least recently used; with `is_pooled` an engine may fetch from
another node's store, and its own keeps a copy.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from benchmarks._traces import Request
from router.candidates import Asked, Candidate, Policy, estimate_of
from router.load import Charge, LoadLedger
from router.scoring import OwnHit, Speeds, attention_pairs, holding_from


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated. `decode_seconds`: from first byte to last."""

    nodes: int
    blocks_per_node: int
    is_pooled: bool
    speeds: Speeds
    block_tokens: int = 512
    decode_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trace: `hit_rate` of all tokens; `imbalance`: busiest engine over the mean."""

    hit_rate: float
    imbalance: float
    mean_seconds: float
    p50_seconds: float
    p90_seconds: float


class _Store:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, chain: Sequence[int]) -> int:
        for at, block in enumerate(chain):
            if block not in self._blocks:
                return at
        return len(chain)

    def keep(self, chain: Sequence[int]) -> None:
        for block in reversed(chain):  # the head is touched last, so tails leave first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Simulation:
    """One run of one trace. Chance comes from the seed alone."""

    def __init__(self, cluster: Cluster, policy: Policy, seed: int = 1) -> None:
        self._cluster = cluster
        self._policy = policy
        self._rng = random.Random(seed)
        self._now = 0.0
        self._ledger = LoadLedger(lambda: self._now)
        self._urls = [f"http://node-{number}:8000" for number in range(cluster.nodes)]
        self._stores = [_Store(cluster.blocks_per_node) for _ in self._urls]
        self._free_at = [0.0] * cluster.nodes
        self._work = [0.0] * cluster.nodes
        self._events: list[tuple[float, int, Charge, bool]] = []
        self._count = 0
        self._waits: list[float] = []
        self._hit_tokens = 0
        self._tokens = 0

    def run(self, requests: Sequence[Request]) -> Outcome:
        for request in requests:
            self._pass_time(request.seconds)
            self._serve(request.chain)
        self._pass_time(float("inf"))
        self._ledger.check_integrity()
        cuts = quantiles(self._waits, n=10)
        return Outcome(
            self._hit_tokens / self._tokens,
            max(self._work) / fmean(self._work),
            fmean(self._waits),
            cuts[4],
            cuts[8],
        )

    def _pass_time(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, charge, is_last = heapq.heappop(self._events)
            if is_last:
                charge.finished()
                charge.release()
            else:
                charge.prefilled()
        self._now = until

    def _serve(self, chain: Sequence[int]) -> None:
        cluster = self._cluster
        prompt = len(chain) * cluster.block_tokens
        hits = [store.hit(chain) for store in self._stores]
        best = max(hits) if cluster.is_pooled else 0
        candidates = [
            Candidate(
                url,
                self._ledger.load(url),
                holding_from(OwnHit(hit, 0, hit), best, 0, cluster.block_tokens),
                cluster.speeds,
            )
            for url, hit in zip(self._urls, hits, strict=True)
        ]
        asked = Asked(prompt, chain[min(1, len(chain) - 1)])
        picked = self._policy.pick(asked, candidates, self._rng)
        self._policy.routed(picked.url)
        at = self._urls.index(picked.url)
        terms = estimate_of(picked, prompt)
        seconds = terms.fetch_seconds + terms.prefill_seconds
        begins = max(self._now, self._free_at[at])
        self._free_at[at] = begins + seconds
        self._work[at] += seconds
        self._waits.append(begins + seconds - self._now)
        self._tokens += prompt
        self._hit_tokens += prompt - terms.uncached_tokens
        pairs = attention_pairs(terms.uncached_tokens, prompt)
        charge = self._ledger.charge(picked.url, terms.uncached_tokens, pairs)
        self._count += 1
        heapq.heappush(self._events, (begins + seconds, self._count, charge, False))
        last = begins + seconds + cluster.decode_seconds
        self._count += 1
        heapq.heappush(self._events, (last, self._count, charge, True))
        self._stores[at].keep(chain)


def best_hit_rate(requests: Sequence[Request]) -> float:
    """With one cache for all that forgets nothing."""
    seen: set[int] = set()
    hits = blocks = 0
    for request in requests:
        blocks += len(request.chain)
        for block in request.chain:
            if block not in seen:
                break
            hits += 1
        seen.update(request.chain)
    return hits / blocks


def offered_tokens_per_second(requests: Sequence[Request], block_tokens: int = 512) -> float:
    """Prompt tokens that come in a second, over the whole trace."""
    tokens = sum(len(request.chain) for request in requests) * block_tokens
    return tokens / max(requests[-1].seconds - requests[0].seconds, 1.0)
