"""The simulated cluster: the router's own policy, ledger, predictions and index over virtual time.

Nothing here decides: who gets a request, what it costs and whom the router takes for healthy is
what router.candidates, scoring, load, predicted, health and retry_budget say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from router.candidates import Asked, Candidate, Policy, estimate_of
from router.decision import AFFINITY_TOKENS
from router.health import BreakerLimits, Health
from router.load import LoadLedger
from router.predicted import PredictedChains
from router.retry_budget import RetryBudget
from router.scoring import OwnHit, Speeds, attention_pairs, holding_from
from router.simulation.agenda import Agenda
from router.simulation.engine import Job, SimulatedEngine
from router.simulation.index_feed import IndexFeed
from router.simulation.outcome import Outcome, Tally
from router.simulation.store import Changes, NodeStore, StoreLimits
from router.simulation.workload import BLOCK_TOKENS, Arrival, Workload, best_hit_rate

RETRY_BURST = 100
BREAKER = BreakerLimits(3, 2.0)
PolicyMaker = Callable[[Mapping[str, int]], Policy]
"""Given the blocks that each engine's requests hold, by URL; the mapping changes as they do."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that is away, and comes back with nothing; from 0: one that joins later."""

    node: int
    begins: float
    ends: float = float("inf")


@dataclass(frozen=True, slots=True)
class Troubles:
    """What makes the router's picture wrong.

    `speed_error`: engines are up to about so many times as quick or slow as the router believes, by
    chance, each its own; all together are as quick as it believes.
    """

    index_delay_seconds: float = 0.0
    speed_error: float = 1.0
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`speeds`: what the router believes of each engine. The rest as in the router's settings."""

    nodes: int
    store: StoreLimits
    is_pooled: bool
    speeds: Speeds
    decode_token_seconds: float = 0.02
    predicted_seconds: float = 3.0
    breaker: BreakerLimits = BREAKER
    probe_seconds: float = 1.0
    retries: int = 2
    retry_share: float = 0.2


class Simulation:
    """One run of one workload. Chance comes from the seed alone."""

    def __init__(
        self,
        shape: ClusterShape,
        make_policy: PolicyMaker,
        seed: int = 1,
        troubles: Troubles | None = None,
    ) -> None:
        self._shape = shape
        self._troubles = troubles or Troubles()
        self._rng = random.Random(seed)  # noqa: S311
        self._agenda = Agenda()
        self._ledger = LoadLedger(self._agenda.clock)
        self._predicted = PredictedChains(shape.predicted_seconds)
        self._budget = RetryBudget(shape.retry_share, RETRY_BURST)
        self._decode_blocks: dict[str, int] = {}
        self._policy = make_policy(self._decode_blocks)
        blocks = shape.nodes * shape.store.blocks
        delay = self._troubles.index_delay_seconds
        self._index = IndexFeed(shape.nodes, blocks, self._agenda, delay)
        self.tally = Tally([0.0] * shape.nodes)
        error = self._troubles.speed_error
        factors = [error ** self._rng.uniform(-1, 1) for _ in range(shape.nodes)]
        self.engines = [
            self._engine(node, factor / fmean(factors)) for node, factor in enumerate(factors)
        ]
        self._by_url = {engine.url: engine for engine in self.engines}
        for outage in self._troubles.outages:
            self._plan(outage)

    def run(
        self,
        workload: Workload,
        bound_seconds: float = 10.0,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> Outcome:
        """`bound_seconds`: a later first token is no good. `on_progress`: requests sent."""
        for done, arrival in enumerate(workload.arrivals):
            self._agenda.run_until(arrival.seconds)
            self._budget.requested()
            self._route(Job(arrival, self._agenda.now))
            on_progress(done + 1)
        self._agenda.run_until(float("inf"))
        self.check_integrity()
        assert self._ledger.total_requests() == 0, "a request was never released"
        self.tally.work = [engine.work_seconds for engine in self.engines]
        best = best_hit_rate(workload.arrivals)
        return self.tally.outcome(best, bound_seconds, workload.seconds)

    def index_blocks(self, node: int) -> int:
        """What the index believes the node to hold."""
        return self._index.blocks(node)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        self._predicted.check_integrity()
        self._budget.check_integrity()
        self._index.check_integrity()
        for engine in self.engines:
            engine.check_integrity()
        assert not any(self._decode_blocks.values()), "blocks of requests that are over"

    def _engine(self, node: int, speed_factor: float) -> SimulatedEngine:
        shape = self._shape
        speed = shape.speeds.prefill_tokens_per_second * speed_factor
        engine = SimulatedEngine(
            f"http://node-{node:03}:8000",
            NodeStore(shape.store),
            replace(shape.speeds, prefill_tokens_per_second=speed),
            shape.decode_token_seconds,
            Health(shape.breaker, 0.0),
            self._agenda,
            self._best_other,
        )
        if not any(away.node == node and away.begins <= 0 for away in self._troubles.outages):
            engine.health.probe_succeeded(0.0)
        engine.on_first_token = self._first_token
        engine.on_finished = self._finished
        engine.on_changes = partial(self._tell, node)
        return engine

    def _tell(self, node: int, changes: Changes) -> None:
        self._index.tell(node, changes)

    def _best_other(self, engine: SimulatedEngine, arrival: Arrival) -> SimulatedEngine | None:
        """Whom the daemon pulls from: the node that holds most, as the index says."""
        if not self._shape.is_pooled:
            return None
        hits = self._index.hits(arrival.array)
        nodes = [n for n in hits if self.engines[n] is not engine and self.engines[n].is_up]
        return self.engines[max(nodes, key=lambda node: (hits[node], node))] if nodes else None

    def _route(self, job: Job) -> None:
        """Choose as router.decision does; an engine that is away fails at once and is retried."""
        arrival = job.arrival
        while True:
            candidates = self._candidates(job)
            if not candidates:
                self.tally.failed += 1
                return
            affinity = arrival.keys[min(AFFINITY_TOKENS // BLOCK_TOKENS, len(arrival.keys)) - 1]
            asked = Asked(arrival.prompt_tokens, affinity)
            picked = self._policy.pick(asked, candidates, self._rng)
            self._policy.routed(picked.url)
            engine = self._by_url[picked.url]
            if engine.is_up:
                break
            engine.health.refused(self._agenda.now)
            if not self._may_retry(job, engine):
                return
        terms = estimate_of(picked, arrival.prompt_tokens)
        self._predicted.note(picked.url, arrival.keys, self._agenda.now)
        pairs = attention_pairs(terms.uncached_tokens, arrival.prompt_tokens)
        job.charge = self._ledger.charge(picked.url, terms.uncached_tokens, pairs)
        held = self._decode_blocks.get(picked.url, 0)
        self._decode_blocks[picked.url] = held + len(arrival.keys)
        job.url = picked.url
        engine.take(job)

    def _candidates(self, job: Job) -> list[Candidate]:
        now, keys = self._agenda.now, job.arrival.keys
        hits = self._index.hits(job.arrival.array)
        best = second = 0
        best_node = -1
        if self._shape.is_pooled:
            for node, blocks in hits.items():
                if blocks > best:
                    best, second, best_node = blocks, best, node
                elif blocks > second:
                    second = blocks
        predicted = self._predicted.hits(keys, now)
        found = []
        for node, engine in enumerate(self.engines):
            if not engine.health.is_healthy or engine.url in job.tried:
                continue
            own = hits.get(node, 0)
            other = second if node == best_node else best
            holding = holding_from(
                OwnHit(own, 0, own), other, predicted.get(engine.url, 0), BLOCK_TOKENS
            )
            load = self._ledger.load(engine.url)
            found.append(Candidate(engine.url, load, holding, self._shape.speeds))
        return found

    def _first_token(self, job: Job) -> None:
        assert job.charge is not None
        job.charge.prefilled()
        tally, prompt = self.tally, job.arrival.prompt_tokens
        tally.waits.append(self._agenda.now - job.began)
        tally.tokens += prompt
        tally.hit_tokens += prompt - job.uncached_tokens
        tally.pulled_tokens += job.pulled_tokens

    def _finished(self, job: Job) -> None:
        assert job.charge is not None
        job.charge.finished()
        self._release(job)

    def _release(self, job: Job) -> None:
        assert job.charge is not None
        self._decode_blocks[job.url] -= len(job.arrival.keys)
        job.charge.release()
        job.charge = None

    def _may_retry(self, job: Job, engine: SimulatedEngine) -> bool:
        job.tried.add(engine.url)
        if len(job.tried) > self._shape.retries or not self._budget.take():
            self.tally.failed += 1
            return False
        self.tally.retried += 1
        return True

    def _plan(self, outage: Outage) -> None:
        agenda, engine = self._agenda, self.engines[outage.node]
        agenda.at(outage.begins, partial(self._die, outage.node))
        for probe in range(1, self._shape.breaker.failures + 1):
            seconds = outage.begins + probe * self._shape.probe_seconds
            if seconds < outage.ends:
                agenda.at(seconds, partial(self._probe, engine))
        # Its daemon's heartbeats are missed for as long as the probes take to be sure.
        sure = outage.begins + self._shape.breaker.failures * self._shape.probe_seconds
        agenda.at(min(sure, outage.ends), partial(self._index.drop, outage.node))
        if outage.ends < float("inf"):
            agenda.at(outage.ends, engine.come_back)
            agenda.at(outage.ends + self._shape.probe_seconds, partial(self._probe, engine))

    def _probe(self, engine: SimulatedEngine) -> None:
        if engine.is_up:
            engine.health.probe_succeeded(self._agenda.now)
        else:
            engine.health.probe_failed(self._agenda.now)

    def _die(self, node: int) -> None:
        """Connections break at once: who has no byte yet is sent elsewhere."""
        engine = self.engines[node]
        waiting, decoding = engine.die()
        self._predicted.forget(engine.url)
        for job in decoding:
            self._release(job)
            self.tally.cut_short += 1
        for job in waiting:
            self._release(job)
            engine.health.request_failed(self._agenda.now)
        for job in waiting:
            if self._may_retry(job, engine):
                self._route(job)
