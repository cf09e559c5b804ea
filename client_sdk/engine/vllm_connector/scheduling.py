"""The scheduler's half: what can be loaded, what is to be saved, whose pages must stay.

Called on the engine's critical path, so each request costs one call to the daemon; everything
else is answered from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from client_sdk.engine.vllm_connector.chains import RequestChain, UncacheableRequestError
from client_sdk.engine.vllm_connector.identity import PageShape
from client_sdk.engine.vllm_connector.plan import LoadPlan, SavePlan, StepPlan, StepReport
from client_sdk.engine.vllm_connector.stats import EmberStats
from client_sdk.sync_client import ProbeResult, SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import Tier

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

PREFETCH_SECONDS = 10.0
NOTHING = ProbeResult(0, ())


@dataclass(eq=False, slots=True)
class _Known:
    """A request of the engine, from its first lookup until its pages are free."""

    request: Request
    chain: RequestChain
    hit: ProbeResult | None = None
    """What the store had, until the request is admitted or preempted."""
    gave_up: bool = False
    """A load failed: the rest of this request is computed."""
    computed_tokens: int = 0
    """Of the last lookup: where a load would begin."""
    pages: list[int] = field(default_factory=list)
    saved_blocks: int = 0
    """Leading blocks that the store has, or was told to take."""
    saves_begun: int = 0
    saves_ended: int = 0


class SchedulerHalf:
    """Plans of loads and saves. One thread uses it.

    Args:
        client: a session for part 0; a block is found once the parts of all ranks are there.
        ranks: workers that each report the end of a save.
    """

    def __init__(self, client: SyncClient, shape: PageShape, ranks: int, stats: EmberStats) -> None:
        self._client = client
        self._shape = shape
        self._ranks = ranks
        self._stats = stats
        self._known: dict[str, _Known] = {}
        self._loads: list[LoadPlan] = []
        self._finished: set[str] = set()
        self._leaving: dict[str, _Known] = {}
        """Finished requests whose saves have not all ended."""
        self._namespace_id = shape.namespace.id

    # ---- loads ----

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Tokens that the store can add to `computed_tokens`; at least one is left to compute.

        Asked again and again while a request waits; the daemon is asked once.
        """
        known = self._know(request)
        if known is None:
            return 0
        if known.hit is None:
            known.hit = self._look_up(known)
        page = self._shape.page_tokens
        limit = (int(request.num_tokens) - 1) // page * page
        found = min(known.hit.hit_blocks * self._shape.block_tokens, limit) - computed_tokens
        known.computed_tokens = computed_tokens
        return max(found, 0)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Plan the load of `tokens` into the request's fresh pages."""
        if tokens <= 0:
            return
        known = self._known[request.request_id]
        shape = self._shape
        first, last = known.computed_tokens, known.computed_tokens + tokens
        start = first // shape.block_tokens
        stop = -(-last // shape.block_tokens)
        pages = blocks.get_block_ids()[0][first // shape.page_tokens : last // shape.page_tokens]
        self._stats.count("hit_blocks", stop - start)
        self._loads.append(
            LoadPlan(
                request.request_id,
                tuple(known.chain.hashes[start:stop]),
                first // shape.page_tokens - start * shape.pages_per_block,
                tuple(pages),
            )
        )

    def tokens_by_tier(self, request: Request, tokens: int) -> dict[Tier, int]:
        """Where the `tokens` of the load just planned were when they were looked up."""
        known = self._known.get(request.request_id)
        if known is None or known.hit is None:
            return {}
        size, found = self._shape.block_tokens, {Tier.DRAM: 0, Tier.SSD: 0}
        first, last = known.computed_tokens, known.computed_tokens + tokens
        for block in range(first // size, -(-last // size)):
            begin, end = max(first, block * size), min(last, (block + 1) * size)
            tier = Tier.DRAM if Tier.DRAM in known.hit.tiers[block] else Tier.SSD
            found[tier] += end - begin
        return {tier: count for tier, count in found.items() if count}

    # ---- steps ----

    def step(self, output: SchedulerOutput) -> StepPlan:
        """The plan of one engine step."""
        plan = StepPlan(loads=self._loads, finished=self._finished)
        self._loads, self._finished = [], set()
        for request_id in output.preempted_req_ids or ():
            plan.preempted.add(request_id)
            known = self._known.get(request_id)
            if known is not None:
                known.pages = []
                if not known.gave_up:
                    known.hit = None  # to be looked up again, with what it has generated
        for new in output.scheduled_new_reqs:
            known = self._known.get(new.req_id)
            if known is not None:
                known.pages = list(new.block_ids[0])
                self._save(plan, known, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            known = self._known.get(request_id)
            if known is None:
                continue
            fresh = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:
                known.pages = list(fresh[0]) if fresh is not None else []
            elif fresh is not None:
                known.pages += fresh[0]
            self._save(plan, known, cached.num_computed_tokens[number], output)
        return plan

    def reported(self, report: StepReport) -> None:
        """Workers have ended loads and saves."""
        for request_id in report.failed_loads:
            known = self._known.get(request_id)
            if known is not None:
                # Computed from here on: to look it up again could promise the same for ever.
                known.hit = NOTHING
                known.gave_up = True
        for request_id, ended in report.saves_ended.items():
            known = self._known.get(request_id) or self._leaving.get(request_id)
            if known is None:
                continue
            known.saves_ended += ended

    def left(self, requests: Iterable[str]) -> None:
        """The pages of these finished requests are free."""
        for request_id in requests:
            self._leaving.pop(request_id, None)

    def finished(self, request: Request) -> bool:
        """Whether the pages of a finished request must stay until its saves have ended."""
        known = self._known.pop(request.request_id, None)
        if known is None or known.saves_ended >= known.saves_begun * self._ranks:
            return False
        self._leaving[request.request_id] = known
        self._finished.add(request.request_id)
        return True

    def check_integrity(self) -> None:
        """Assert that no request is known twice and no plan names one that is not."""
        assert not self._known.keys() & self._leaving.keys()
        assert all(load.request_id in self._known for load in self._loads)
        for known in (*self._known.values(), *self._leaving.values()):
            assert known.saves_ended <= known.saves_begun * self._ranks

    # ---- inside ----

    def _know(self, request: Request) -> _Known | None:
        known = self._known.get(request.request_id)
        if known is None:
            try:
                chain = RequestChain(request, self._namespace_id, self._shape.block_tokens)
            except UncacheableRequestError:
                self._stats.count("uncacheable_requests")
                return None
            known = self._known[request.request_id] = _Known(request, chain)
        return known

    def _look_up(self, known: _Known) -> ProbeResult:
        """What the store has of a request, and a start on bringing what is slow to load."""
        hashes = known.chain.grow(_tokens(known.request))
        self._stats.count("lookups")
        if not hashes:
            return NOTHING
        try:
            found = self._client.probe(hashes)
            known.saved_blocks = found.hit_blocks
            if any(Tier.DRAM not in tiers for tiers in found.tiers[: found.hit_blocks]):
                self._client.prefetch(hashes[: found.hit_blocks], PREFETCH_SECONDS)
        except EmberError:
            self._stats.count("errors")
            return NOTHING
        return found

    def _save(self, plan: StepPlan, known: _Known, computed: int, output: SchedulerOutput) -> None:
        """Plan to keep the blocks that are full once this step has run."""
        shape, request = self._shape, known.request
        tokens = _tokens(request)
        after = min(computed + output.num_scheduled_tokens[request.request_id], len(tokens))
        full = min(after // shape.block_tokens, len(known.pages) // shape.pages_per_block)
        # After a failed load the engine computes again what we took for saved.
        first = min(known.saved_blocks, computed // shape.block_tokens)
        if full <= first:
            return
        hashes = known.chain.grow(tokens)
        pages = known.pages[first * shape.pages_per_block : full * shape.pages_per_block]
        parent = hashes[first - 1] if first else None
        plan.saves.append(
            SavePlan(
                request.request_id,
                tuple(hashes[first:full]),
                parent,
                tuple(pages),
                known.chain.salt_id,
            )
        )
        known.saves_begun += 1
        known.saved_blocks = full


def _tokens(request: Any) -> Sequence[int]:
    tokens: Sequence[int] = request.all_token_ids
    return tokens
