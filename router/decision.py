"""From a parsed body to a chosen engine: tokens, hashes, hits, estimates, policy.

Nothing that is away here fails a request: no tokens, no namespace or no index means the choice goes
by load alone, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emberkv_proto.types import BlockHash, ChainHits, EngineHit, HashScheme, NodeHit
from router.candidates import Asked, Candidate, CostPolicy, Preferences, estimate_of, make_policy
from router.chains import Beginning, ChainKeys, ChainKind, ChainMemory
from router.config import PolicyName
from router.engines import Engine, EngineTable
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.predicted import PredictedChains
from router.request_body import RequestBody
from router.scoring import (
    NOTHING,
    Estimate,
    Holding,
    holding_from,
    own_hit,
    queue_seconds,
)
from router.sessions import Session, Sessions
from router.speeds import SpeedBook
from router.tokenize import LARGE_BYTES, NoTokens, Prompt, Tokenizer
from router.view import IndexView

if TYPE_CHECKING:
    from router.board import Board, BoardMaker

log = logging.getLogger(__name__)

AFFINITY_TOKENS = 1024
BOARDS_KEPT = 64
BYTES_PER_TOKEN = 4
"""Guess of a prompt's length where its tokens are unknown; only the queue estimate uses it."""


class NoEngineError(Exception):
    """No healthy engine can answer."""


class UnknownModelError(Exception):
    """Engines are healthy, but none serves the model."""


class SaturatedError(Exception):
    """Every engine that could answer is at its limit. `why` is the label of a counter."""

    def __init__(self, message: str, why: str = "saturated") -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine is given at most. An engine without queued tokens takes any prompt."""

    max_requests: int
    max_queued_tokens: int


@dataclass(slots=True, eq=False)
class Chain:
    """A prompt's blocks in one namespace, and who holds them, longest first."""

    hashes: Sequence[BlockHash]
    keys: Sequence[int]
    found: ChainHits

    def on_node(self, node_id: str) -> NodeHit | None:
        return next((hit for hit in self.found.nodes if hit.node_id == node_id), None)

    def on_engine(self, url: str) -> EngineHit | None:
        """Of an engine's ranks the one that has most."""
        for hit in self.found.engines:
            if hit.url == url or hit.url.rstrip("/") == url:
                return hit
        return None

    def best_beside(self, node_id: str) -> int:
        """Blocks of the best node other than this one."""
        others = (hit.hit_blocks for hit in self.found.nodes if hit.node_id != node_id)
        return max(others, default=0)


@dataclass(slots=True, eq=False)
class Plan:
    """What is known of a request before an engine is chosen; stays the same over retries."""

    model: str
    prompt_tokens: int
    no_tokens: NoTokens | None
    chains: dict[ChainKind, Chain] = field(default_factory=dict)
    affinity: int | None = None
    """The same for requests that begin with the same `AFFINITY_TOKENS`, or of the same session."""
    session: Session | None = None
    """Only where tokens are not known."""
    excluded: frozenset[str] = frozenset()
    """URLs of engines that may not get it, whatever happens."""

    def holds(self, kind: ChainKind, keys: ChainKeys, found: ChainHits) -> None:
        """Enter the prompt's blocks in one namespace, and who has them."""
        self.chains[kind] = Chain(keys.hashes, keys.numbers, found)
        blocks = max(1, AFFINITY_TOKENS // kind.block_tokens)
        self.affinity = keys.numbers[min(blocks, len(keys.numbers)) - 1]


@dataclass(slots=True, eq=False)
class Scored:
    """An engine with what it holds and how long it would take."""

    engine: Engine
    candidate: Candidate
    estimate: Estimate


@dataclass(slots=True, eq=False)
class Decision:
    """The chosen engine, and whether another one holds more."""

    chosen: Scored
    keys: Sequence[int]
    told: EngineHit | None
    """What the chosen engine's events say of the chain."""
    is_exploring: bool
    plan: Plan
    considered: Sequence[Candidate]
    """All engines that had room, the chosen one too."""
    kind: ChainKind | None = None
    """Of the chain's blocks on the chosen engine's node; None where they are not known."""
    hashes: Sequence[BlockHash] = ()

    @property
    def told_hbm_tokens(self) -> int:
        """Of the chosen engine's HBM, as its own events say."""
        return self.told.hbm_blocks * self.chosen.engine.block_tokens if self.told else 0

    @property
    def predicted_hit_tokens(self) -> int:
        used = self.chosen.estimate.used
        return used.node_tokens + used.peer_tokens


class Chooser:
    """Chooses engines. On the event loop; only `plan` waits, for the tokenizer and the index."""

    def __init__(
        self,
        engines: EngineTable,
        ledger: LoadLedger,
        index: IndexView,
        predicted: PredictedChains,
        tokenizer: Tokenizer,
        policy: PolicyName,
        preferences: Preferences,
        speeds: SpeedBook,
        metrics: RouterMetrics,
        limits: EngineLimits,
        chains: ChainMemory,
        make_board: BoardMaker | None,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._index = index
        self._predicted = predicted
        self._tokenizer = tokenizer
        self._preferences = preferences
        self._prefill_policy = CostPolicy(preferences)
        self.set_policy(policy)
        self._speeds = speeds
        self._metrics = metrics
        self.limits = limits
        self._chains = chains
        self._make_board = make_board
        self._sessions = Sessions()
        self._rng = rng
        self._clock = clock
        self.on_routed: Callable[[Decision], None] = lambda _: None
        """Told of each decision that is being carried out."""

    def set_policy(self, name: PolicyName) -> None:
        """From the next choice on; what a policy kept for itself begins anew."""
        self.policy_name = name
        self._policy = make_policy(name, self._preferences)
        self._boards: dict[str, Board] = {}

    def plan_now(self, body: RequestBody, body_bytes: int) -> Plan | None:
        """As `plan`, where nothing has to be waited for; else None."""
        model = body.text("model")
        self._serving(model)
        prompt = self._tokenizer.known(body)
        if prompt is None:
            return None
        if isinstance(prompt, NoTokens):
            return self._without_tokens(model, body_bytes, prompt)
        plan = Plan(model, len(prompt.ids), None)
        for kind in self._kinds(plan, body):
            keys = prompt.chains.get(kind) or self._keys_now(kind, prompt, body)
            if keys is None:
                return None
            if keys.numbers:
                found = self._found_now(keys)
                if found is None:
                    return None
                plan.holds(kind, keys, found)
        self._metrics.prompt_tokens.inc(plan.prompt_tokens)
        return plan

    async def plan(self, body: RequestBody, body_bytes: int) -> Plan:
        """Find out what the request's blocks are and who holds them.

        Raises:
            NoEngineError, UnknownModelError: nobody can answer.
        """
        model = body.text("model")
        engines = self._serving(model)
        prompt = await self._tokenizer.tokens(body, lambda: self._least_busy(engines))
        if isinstance(prompt, NoTokens):
            return self._without_tokens(model, body_bytes, prompt)
        plan = Plan(model, len(prompt.ids), None)
        for kind in self._kinds(plan, body):
            keys = prompt.chains.get(kind) or await self._keys(kind, prompt, body)
            if keys.numbers:  # else of an engine whose hashes we cannot make
                plan.holds(kind, keys, await self._found(keys))
        self._metrics.prompt_tokens.inc(plan.prompt_tokens)
        return plan

    def _without_tokens(self, model: str, body_bytes: int, why: NoTokens) -> Plan:
        self._metrics.no_tokens.labels(why.value).inc()
        return Plan(model, max(1, body_bytes // BYTES_PER_TOKEN), why)

    def _kinds(self, plan: Plan, body: RequestBody) -> list[ChainKind]:
        """How the prompt's blocks are hashed, where it has any."""
        kinds = self._engines.kinds(plan.model)
        if body.get("extra_key"):  # blocks of SGLang are then others than those of these tokens
            kinds = [kind for kind in kinds if kind.scheme is not HashScheme.SGLANG]
        return [kind for kind in kinds if plan.prompt_tokens >= kind.block_tokens]

    def plan_unread(self, body: RequestBody, body_bytes: int, session: Session | None) -> Plan:
        """A plan without tokens, of an endpoint whose rendering only the engine knows.

        Raises:
            NoEngineError, UnknownModelError: nobody can answer.
        """
        model = body.text("model")
        self._serving(model)
        self._metrics.no_tokens.labels(NoTokens.OTHER_BODY.value).inc()
        plan = Plan(model, max(1, body_bytes // BYTES_PER_TOKEN), NoTokens.OTHER_BODY)
        if session is not None:
            plan.session = session
            plan.affinity = int.from_bytes(session.key[:8], "little")
        return plan

    def choose(self, plan: Plan, excluded: Collection[str]) -> Decision:
        """Pick an engine that has room and is not excluded, by the policy.

        Raises:
            NoEngineError, UnknownModelError, SaturatedError
        """
        engines = self._serving(plan.model)
        if excluded or plan.excluded:
            left_out = {*plan.excluded, *excluded}
            engines = [engine for engine in engines if engine.url not in left_out]
        elif self._make_board is not None and self.policy_name == "cost":
            return self._choose_compiled(plan, engines, self._make_board)
        if not engines:
            raise NoEngineError("no other engine is healthy")
        open_engines = [engine for engine in engines if self._has_room(engine)]
        if not open_engines:
            raise self._saturated(engines)
        scored = [self._candidate(engine, plan) for engine in open_engines]
        picked = self._policy.pick(Asked(plan.prompt_tokens, plan.affinity), scored, self._rng)
        most = max(candidate.holding.node_tokens for candidate in scored)
        engine = next(engine for engine in open_engines if engine.url == picked.url)
        kind = engine.kind
        chain = plan.chains.get(kind) if kind else None
        return Decision(
            Scored(engine, picked, estimate_of(picked, plan.prompt_tokens)),
            chain.keys if chain else (),
            chain.on_engine(engine.url) if chain else None,
            picked.holding.node_tokens < most,
            plan,
            scored,
            kind if chain else None,
            chain.hashes if chain else (),
        )

    def _choose_compiled(
        self, plan: Plan, engines: list[Engine], make_board: BoardMaker
    ) -> Decision:
        """As `choose` with CostPolicy does, all engines in one pass."""
        board = self._boards.get(plan.model)
        if board is None or board.is_stale(engines, self._ledger, self._speeds):
            board = make_board(engines, self._ledger, self._speeds, self._preferences)
            if len(self._boards) >= BOARDS_KEPT:
                self._boards.clear()
            self._boards[plan.model] = board
        now = self._clock()
        board.clear()
        for kind, chain in plan.chains.items():
            board.hold(kind, chain.keys, chain.found, self._predicted, now)
        if plan.session is not None:
            url = self._sessions.engine_of(plan.session, now)
            held = self._sessions.held_tokens(plan.session, url, now)
            board.hold_tokens(url, min(held, plan.prompt_tokens))
        limits = self.limits
        picked = board.pick(
            plan.prompt_tokens,
            now,
            self._rng.random(),
            limits.max_requests,
            limits.max_queued_tokens,
        )
        if picked is None:
            raise self._saturated(engines)
        engine = picked.engine
        found = Candidate(
            engine.url,
            self._ledger.load(engine.url),
            picked.holding,
            self._speeds.of(engine.url),
        )
        chain_of = plan.chains.get(engine.kind) if engine.kind else None
        return Decision(
            Scored(engine, found, estimate_of(found, plan.prompt_tokens)),
            chain_of.keys if chain_of else (),
            chain_of.on_engine(engine.url) if chain_of else None,
            picked.is_exploring,
            plan,
            picked.considered,
            engine.kind if chain_of else None,
            chain_of.hashes if chain_of else (),
        )

    def _saturated(self, engines: Sequence[Engine]) -> SaturatedError:
        return SaturatedError(
            f"all {len(engines)} engines have {self.limits.max_requests} requests in flight"
            f" or {self.limits.max_queued_tokens} tokens to prefill"
        )

    def choose_prefill(self, plan: Plan, decision: Decision) -> Scored | None:
        """The prefill engine with the least t(i), whose blocks the decision's engine can read.

        None: there is no such engine, or none has room.
        """
        candidates = [
            self._candidate(engine, plan)
            for engine in self._engines.prefilling(plan.model)
            if engine.node_id and engine.kind == decision.kind and self._has_room(engine)
        ]
        if not candidates:
            return None
        asked = Asked(plan.prompt_tokens, plan.affinity)
        picked = self._prefill_policy.pick(asked, candidates, self._rng)
        engine = self._engines.get(picked.url)
        assert engine is not None
        return Scored(engine, picked, estimate_of(picked, plan.prompt_tokens))

    def has_other(self, plan: Plan, excluded: Collection[str]) -> bool:
        """Whether `choose` would find an engine now."""
        return any(
            engine.url not in excluded
            and engine.url not in plan.excluded
            and self._has_room(engine)
            for engine in self._engines.serving(plan.model)
        )

    def seconds_to_room(self, model: str, place: int) -> float:
        """Return when the `place`-th request from now may find room on an engine of the model.

        By the pace at which engines finish, as the ledger saw it; before it saw any, by the
        shortest queue.
        """
        engines = self._engines.serving(model)
        pace = sum(self._ledger.releases_per_second(engine.url) for engine in engines)
        if pace > 0:
            return place / pace
        queues = (
            queue_seconds(self._ledger.load(engine.url), self._speeds.of(engine.url))
            for engine in engines
        )
        return min(queues, default=0.0)

    def note_routed(self, decision: Decision) -> None:
        """The decision is being carried out: its chain will be in that engine's HBM."""
        self.on_routed(decision)
        self._policy.routed(decision.chosen.engine.url)
        now = self._clock()
        self._predicted.note(decision.chosen.engine.url, decision.keys, now)
        plan, url = decision.plan, decision.chosen.engine.url
        if plan.session is not None:
            self._sessions.note(plan.session, url, plan.prompt_tokens, now)

    def forget_routed(self, engine: Engine) -> None:
        """The engine is gone, and its HBM with it."""
        self._predicted.forget(engine.url)
        self._sessions.forget(engine.url)

    def check_integrity(self) -> None:
        self._sessions.check_integrity()
        for board in self._boards.values():
            board.check_integrity()

    def explain(self, plan: Plan) -> list[Scored]:
        """Every healthy engine for the plan's model with its terms, full ones included."""
        found = []
        for engine in self._serving(plan.model):
            candidate = self._candidate(engine, plan)
            terms = estimate_of(candidate, plan.prompt_tokens)
            found.append(Scored(engine, candidate, terms))
        return found

    def _serving(self, model: str) -> list[Engine]:
        engines = self._engines.serving(model)
        if engines:
            return engines
        if self._engines.serving(""):
            raise UnknownModelError(f"model {model!r} is served by no engine")
        raise NoEngineError("no engine is healthy")

    def _has_room(self, engine: Engine) -> bool:
        limits = self.limits
        return self._ledger.has_room(engine.url, limits.max_requests, limits.max_queued_tokens)

    def _least_busy(self, engines: Sequence[Engine]) -> Engine:
        return min(engines, key=lambda engine: self._ledger.active_requests(engine.url))

    def _begin(self, kind: ChainKind, prompt: Prompt, body: RequestBody) -> Beginning:
        salt_bytes = body.text("cache_salt").encode("utf-8", "surrogatepass")
        return self._chains.begin(kind, prompt.ids, salt_bytes)

    def _keys_now(self, kind: ChainKind, prompt: Prompt, body: RequestBody) -> ChainKeys | None:
        beginning = self._begin(kind, prompt, body)
        if 4 * kind.block_tokens * beginning.missing_blocks >= LARGE_BYTES:
            return None
        keys = self._chains.finish(beginning, beginning.rest())
        prompt.keep(kind, keys)
        return keys

    async def _keys(self, kind: ChainKind, prompt: Prompt, body: RequestBody) -> ChainKeys:
        keys = self._keys_now(kind, prompt, body)
        if keys is None:
            beginning = self._begin(kind, prompt, body)
            keys = self._chains.finish(beginning, await asyncio.to_thread(beginning.rest))
            prompt.keep(kind, keys)
        return keys

    def _found_now(self, keys: ChainKeys) -> ChainHits | None:
        try:
            return self._index.answer_now(keys.array)
        except Exception:
            return self._unanswered(keys)

    async def _found(self, keys: ChainKeys) -> ChainHits:
        try:
            return await self._index.answer(keys.array)
        except Exception:
            return self._unanswered(keys)

    def _unanswered(self, keys: ChainKeys) -> ChainHits:
        """Whatever is wrong with the index, the request can be answered without it."""
        log.exception("index query of %d keys failed", len(keys.array))
        self._metrics.index_errors.inc()
        return ChainHits()

    def _candidate(self, engine: Engine, plan: Plan) -> Candidate:
        return Candidate(
            engine.url,
            self._ledger.load(engine.url),
            self._holding(engine, plan),
            self._speeds.of(engine.url),
        )

    def _holding(self, engine: Engine, plan: Plan) -> Holding:
        kind = engine.kind
        chain = plan.chains.get(kind) if kind is not None else None
        if plan.session is not None:
            held = self._sessions.held_tokens(plan.session, engine.url, self._clock())
            return Holding(min(held, plan.prompt_tokens))
        if kind is None or chain is None:
            return NOTHING
        return holding_from(
            own_hit(chain.on_node(engine.node_id), chain.on_engine(engine.url)),
            chain.best_beside(engine.node_id) if engine.node_id else 0,
            self._predicted.hit_blocks(engine.url, chain.keys, self._clock()),
            kind.block_tokens,
        )
