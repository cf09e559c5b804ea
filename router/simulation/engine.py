"""One simulated engine and its node's store: prefills what it is given one after the other. Pure.

It finds out what is cached when it begins with a request, not when the router chose it: what the
requests before it brought counts, and what has gone meanwhile does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from router.health import Health
from router.load import Charge
from router.scoring import Load, OwnHit, Speeds, estimate, holding_from
from router.simulation.agenda import Agenda
from router.simulation.store import Changes, NodeStore
from router.simulation.workload import BLOCK_TOKENS, Arrival

IDLE = Load()


class Job:
    """A request on its way. `tried`: engines at which it failed."""

    __slots__ = ("arrival", "began", "charge", "pulled_tokens", "tried", "uncached_tokens", "url")

    def __init__(self, arrival: Arrival, began: float) -> None:
        self.arrival = arrival
        self.began = began
        self.url = ""
        self.tried: set[str] = set()
        self.charge: Charge | None = None
        self.uncached_tokens = 0
        self.pulled_tokens = 0


class SimulatedEngine:
    """Reports to `on_first_token` and `on_finished`, and what its store gained to `on_changes`."""

    def __init__(
        self,
        url: str,
        store: NodeStore,
        speeds: Speeds,
        decode_token_seconds: float,
        health: Health,
        agenda: Agenda,
        others: Callable[[SimulatedEngine, Arrival], SimulatedEngine | None],
    ) -> None:
        self.url = url
        self.store = store
        self.health = health
        self.is_up = True
        self.work_seconds = 0.0
        self._speeds = speeds
        self._decode_token_seconds = decode_token_seconds
        self._agenda = agenda
        self._others = others
        self._queue: deque[Job] = deque()
        self._busy: Job | None = None
        self._decoding: set[Job] = set()
        self._life = 0
        self.on_first_token: Callable[[Job], None] = lambda _: None
        self.on_finished: Callable[[Job], None] = lambda _: None
        self.on_changes: Callable[[Changes], None] = lambda _: None

    def take(self, job: Job) -> None:
        """The request has arrived here; the engine is up."""
        self._queue.append(job)
        if self._busy is None:
            self._begin()

    def die(self) -> tuple[Sequence[Job], Sequence[Job]]:
        """Lose everything. Returns requests before their first token, and those after it."""
        self.is_up = False
        self._life += 1
        waiting = [*([self._busy] if self._busy else []), *self._queue]
        decoding = sorted(self._decoding, key=lambda job: job.began)
        self._busy = None
        self._queue.clear()
        self._decoding.clear()
        self.store.clear()
        return waiting, decoding

    def come_back(self) -> None:
        """Up again, with an empty store."""
        self.is_up = True

    @property
    def in_flight(self) -> int:
        return len(self._queue) + len(self._decoding) + (self._busy is not None)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        self.health.check_integrity()
        assert self.is_up or not self.in_flight, "a dead engine has requests"
        assert self._busy is not None or not self._queue, "it idles while requests wait"

    def _begin(self) -> None:
        job = self._busy = self._queue.popleft()
        keys, prompt = job.arrival.keys, job.arrival.prompt_tokens
        own = self.store.hit_blocks(keys)
        other = self._others(self, job.arrival) if own < len(keys) else None
        elsewhere = other.store.hit_blocks(keys) if other is not None else 0
        holding = holding_from(OwnHit(own, 0, own), elsewhere, 0, BLOCK_TOKENS)
        terms = estimate(prompt, holding, IDLE, self._speeds)
        pulled = terms.used.peer_tokens // BLOCK_TOKENS
        if other is not None and pulled:
            other.store.lend(keys[: own + pulled])
        used = terms.used.node_tokens // BLOCK_TOKENS
        job.uncached_tokens = terms.uncached_tokens
        job.pulled_tokens = min(terms.used.peer_tokens, prompt)
        seconds = terms.fetch_seconds + terms.prefill_seconds
        self.work_seconds += seconds
        over = partial(self._prefilled, job, used, pulled, self._life)
        self._agenda.at(self._agenda.now + seconds, over)

    def _prefilled(self, job: Job, own: int, pulled: int, life: int) -> None:
        if life != self._life:
            return
        self._busy = None
        self._decoding.add(job)
        self.on_changes(self.store.serve(job.arrival.keys, own, pulled, self._agenda.now))
        self.on_first_token(job)
        seconds = job.arrival.output_tokens * self._decode_token_seconds
        self._agenda.at(self._agenda.now + seconds, partial(self._finished, job, life))
        if self._queue:
            self._begin()

    def _finished(self, job: Job, life: int) -> None:
        if life == self._life:
            self._decoding.remove(job)
            self.on_finished(job)
