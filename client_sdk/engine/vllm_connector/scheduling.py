"""The scheduler's half: what can be loaded, what is to be saved, whose pages must stay.

Called on the engine's critical path, so each request costs one call to the daemon; everything
else is answered from memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from client_sdk.engine.vllm_connector.chains import RequestChain, UncacheableRequestError
from client_sdk.engine.vllm_connector.handover import (
    Arrival,
    Handover,
    handover_in,
    handover_params,
    is_handed_over,
)
from client_sdk.engine.vllm_connector.holds import PageHolds
from client_sdk.engine.vllm_connector.identity import NULL_PAGE, PageGroup, PageShape
from client_sdk.engine.vllm_connector.plan import (
    GroupLoad,
    LoadPlan,
    SavePlan,
    StepPlan,
    StepReport,
)
from client_sdk.engine.vllm_connector.settings import ConnectorSettings
from client_sdk.engine.vllm_connector.stats import EmberStats
from client_sdk.prefetch import Prefetch
from client_sdk.sync_borrowed import Lease
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import AcquirePolicy, BlockHash, Source

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

POLL_SECONDS = 0.002
"""How often the daemon is asked after blocks of other nodes."""
PAUSE_SECONDS = 0.0005
ANSWERED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How a request ends that has an answer."""


@dataclass(eq=False, slots=True)
class _Known:
    """A request of the engine, from its first lookup until it has finished."""

    request: Request
    chain: RequestChain
    pages: list[list[int]]
    """Of each group. A window's first ones may be the engine's no more: see `live_from`."""
    ahead: Prefetch | None = None
    """What was sent for when the request came."""
    arrival: Arrival | None = None
    """Of a prompt that another engine has computed, until the request is looked up."""
    lease: Lease | None = None
    """On what the store has; held until the load has ended."""
    is_looked_up: bool = False
    """Until the request is preempted: it is then looked up again, with what it has generated."""
    peers_until: float = 0.0
    """How long blocks of other nodes are waited for."""
    asked_at: float = 0.0
    gave_up: bool = False
    """A load failed: the rest of this request is computed."""
    computed_tokens: int = 0
    """Of the last lookup: where a load would begin."""
    saved_blocks: int = 0
    """Leading blocks that the store has, or was told to take."""
    saving: set[int] = field(default_factory=set)
    """Numbers of saves that have not ended on all ranks."""

    def stop_waiting(self) -> None:
        """Bring nothing ahead any more."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.cancel()
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.end()

    def release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            with contextlib.suppress(EmberError):  # a daemon that is away has released it
                lease.release()


@dataclass(eq=False, slots=True)
class _Saving:
    known: _Known
    ranks: int = 0
    """That have ended it."""


class SchedulerHalf:
    """Plans of loads and saves. One thread uses it.

    Args:
        client: a session for part 0; a hit is what the parts of all ranks and groups make one.
        ranks: workers that each report the end of a save.
        stats: counts of both halves go into it.
    """

    def __init__(
        self,
        client: SyncClient,
        shape: PageShape,
        ranks: int,
        settings: ConnectorSettings,
        stats: EmberStats,
    ) -> None:
        self._client = client
        self._shape = shape
        self._ranks = ranks
        self._settings = settings
        self._stats = stats
        self.holds = PageHolds()
        """Pages of windows that move on while their blocks are saved."""
        self._known: dict[str, _Known] = {}
        self._uncacheable: set[str] = set()
        self._saves: dict[int, _Saving] = {}
        self._last_save = 0
        self._loads: list[LoadPlan] = []
        self._loading: list[_Known] = []
        """Loads of the step that was planned last, where steps wait for their loads."""
        self._finished: set[str] = set()
        self._leaving: dict[str, _Known] = {}
        """Finished requests whose saves have not all ended."""
        self._namespace_id = shape.namespace.id

    # ---- loads ----

    def enqueued(self, request: Request) -> None:
        """A request has come: what it needs is sent for before its turn comes.

        One that comes to an idle engine is looked up at once anyway.
        """
        is_next = not self._known
        known = self._know(request)
        handover = handover_in(request.kv_transfer_params)
        if known is None or (is_next and handover is None):
            return
        hashes = known.chain.grow(_tokens(request))
        if not hashes:
            return
        settings = self._settings
        try:
            if handover is None:
                known.ahead = self._client.start_prefetch(hashes, settings.load_seconds)
                self._stats.count("prefetched_requests")
            else:
                self._stats.count("handovers_in")
                known.arrival = Arrival(
                    self._client, handover, hashes, settings.handover_seconds, time.monotonic()
                )
        except EmberError:
            self._stats.count("failed_lookups")

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens that the store can add to `computed_tokens`; at least one is left to compute.

        None: other nodes have not answered yet, ask again. Asked again and again while a request
        waits; the daemon is asked once, and then only after what comes from other nodes.
        """
        known = self._know(request)
        if known is None or known.gave_up:
            return 0
        known.computed_tokens = computed_tokens
        if known.arrival is not None and not known.arrival.is_over(time.monotonic()):
            time.sleep(PAUSE_SECONDS)
            return None
        if not known.is_looked_up or (known.lease is not None and not known.lease.is_valid):
            self._look_up(known)
        lease = known.lease
        if lease is None:
            return 0
        now = time.monotonic()
        if self._awaits_peers(lease) and now < known.peers_until:
            if now - known.asked_at >= POLL_SECONDS:
                known.asked_at = now
                self._poll(known, lease)
                if known.lease is None:
                    return 0
            if self._awaits_peers(lease):
                time.sleep(PAUSE_SECONDS)  # an idle engine asks thousands of times a second
                return None
        blocks = lease.usable_blocks
        if self._awaits_peers(lease):
            blocks = min(lease.ready_blocks, lease.sources.index(Source.PEER))
        known.saved_blocks = blocks
        found = min(blocks * self._shape.block_tokens, self._limit(request)) - computed_tokens
        if found <= 0:
            known.release()
        return max(found, 0)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Plan the load of `tokens` into the request's fresh pages."""
        if tokens <= 0:
            # What was found is not wanted: the engine itself has as much.
            unused = self._known.get(request.request_id)
            if unused is not None:
                unused.release()
            return
        known = self._known[request.request_id]
        size = self._shape.block_tokens
        first, last = known.computed_tokens, known.computed_tokens + tokens
        self._stats.count("hit_blocks", -(-last // size) - first // size)
        parts = (
            self._group_load(known.chain, number, pages, first, last)
            for number, pages in enumerate(blocks.get_block_ids())
        )
        self._loads.append(LoadPlan(request.request_id, tuple(p for p in parts if p.pages)))

    def tokens_by_source(self, request: Request, tokens: int) -> dict[Source, int]:
        """Where the `tokens` of the load just planned were when they were looked up."""
        known = self._known.get(request.request_id)
        if known is None or known.lease is None:
            return {}
        size = self._shape.block_tokens
        first, last = known.computed_tokens, known.computed_tokens + tokens
        found: dict[Source, int] = {}
        for block in range(first // size, -(-last // size)):
            begin, end = max(first, block * size), min(last, (block + 1) * size)
            source = known.lease.sources[block]
            found[source] = found.get(source, 0) + end - begin
        return found

    # ---- steps ----

    def step(self, output: SchedulerOutput) -> StepPlan:
        """The plan of one engine step."""
        plan = StepPlan(
            loads=self._loads,
            finished=self._finished,
            computes=output.total_num_scheduled_tokens > 0,
        )
        for known in self._loading:
            known.release()
        self._loading = []
        if not self._settings.load_async:
            self._loading = [self._known[load.request_id] for load in self._loads]
        self._loads, self._finished = [], set()
        for request_id in output.preempted_req_ids or ():
            plan.preempted.add(request_id)
            preempted = self._known.get(request_id)
            if preempted is not None:
                preempted.release()
                preempted.pages = self._no_pages()
                preempted.is_looked_up = False
        for new in output.scheduled_new_reqs:
            fresh = self._known.get(new.req_id)
            if fresh is not None:
                fresh.pages = [list(pages) for pages in new.block_ids]
                self._save(plan, fresh, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            running = self._known.get(request_id)
            if running is None:
                continue
            added = cached.new_block_ids[number] or self._no_pages()
            if request_id in cached.resumed_req_ids:
                running.pages = [list(pages) for pages in added]
            else:
                for pages, more in zip(running.pages, added, strict=True):
                    pages += more
            self._save(plan, running, cached.num_computed_tokens[number], output)
        self._save_states(plan, output)
        return plan

    def reported(self, report: StepReport) -> None:
        """Workers have ended loads and saves."""
        for request_id in report.failed_loads:
            known = self._known.get(request_id)
            if known is not None:
                # Computed from here on: to look it up again could promise the same for ever.
                known.gave_up = True
        for number, ranks in report.saves_ended.items():
            save = self._saves[number]
            save.ranks += ranks
            if save.ranks >= self._ranks:
                del self._saves[number]
                save.known.saving.remove(number)
                self.holds.release(number)

    def loaded(self, requests: Iterable[str]) -> None:
        """Loads between steps have ended, well or not."""
        for request_id in requests:
            known = self._known.get(request_id)
            if known is not None:
                known.release()

    def left(self, requests: Iterable[str]) -> None:
        """The pages of these finished requests are free."""
        for request_id in requests:
            self._leaving.pop(request_id, None)

    def handed_over(self, request: Request) -> dict[str, Any] | None:
        """For a finished request's answer, if another engine is to go on: where its blocks are."""
        known = self._known.get(request.request_id)
        if known is None or not is_handed_over(request.kv_transfer_params):
            return None
        blocks = min(known.saved_blocks, int(request.num_prompt_tokens) // self._shape.block_tokens)
        if not blocks or request.status.name not in ANSWERED:
            return None
        try:
            handover = Handover(self._client.node_id, blocks)
        except EmberError:  # the daemon is away, and the blocks with it
            return None
        self._stats.count("handovers_out")
        return handover_params(handover)

    def finished(self, request: Request) -> bool:
        """Whether the pages of a finished request must stay until its saves have ended."""
        self._uncacheable.discard(request.request_id)
        known = self._known.pop(request.request_id, None)
        if known is not None:
            known.release()
            known.stop_waiting()
        if known is None or not known.saving:
            return False
        self._leaving[request.request_id] = known
        self._finished.add(request.request_id)
        return True

    def check_integrity(self) -> None:
        """Assert that no request is known twice, and that leases are held by requests alone."""
        assert not self._known.keys() & self._leaving.keys()
        assert not self._known.keys() & self._uncacheable
        assert all(load.request_id in self._known for load in self._loads)
        assert all(known.lease is None for known in self._leaving.values())
        assert all(number in save.known.saving for number, save in self._saves.items())
        assert all(save.ranks < self._ranks for save in self._saves.values())
        self.holds.check_integrity(self._saves.keys())

    # ---- inside ----

    def _know(self, request: Request) -> _Known | None:
        known = self._known.get(request.request_id)
        if known is None:
            try:
                chain = RequestChain(request, self._namespace_id, self._shape.block_tokens)
            except UncacheableRequestError:
                if request.request_id not in self._uncacheable:  # asked again while it waits
                    self._uncacheable.add(request.request_id)
                    self._stats.count("uncacheable_requests")
                return None
            known = self._known[request.request_id] = _Known(request, chain, self._no_pages())
        return known

    def _no_pages(self) -> list[list[int]]:
        return [[] for _ in self._shape.groups]

    def _look_up(self, known: _Known) -> None:
        """Lease what the store has of a request, and have what is slow to load on its way."""
        known.release()
        known.is_looked_up = True
        hashes = known.chain.grow(_tokens(known.request))
        if self._shape.is_hybrid:
            # Such a hit is not to be cut where it ends within the last block: see `is_hybrid`.
            hashes = hashes[: self._limit(known.request) // self._shape.block_tokens]
        self._stats.count("lookups")
        if not hashes:
            return
        now = time.monotonic()
        known.peers_until, known.asked_at = now + self._settings.peer_seconds, now
        try:
            lease = self._client.acquire(
                hashes,
                policy=AcquirePolicy.TIMEOUT,
                deadline_seconds=self._settings.load_seconds,
            )
        except EmberError:
            self._stats.count("failed_lookups")
            return
        finally:
            if known.arrival is not None and not known.arrival.is_complete:
                self._stats.count("late_handovers")
            known.stop_waiting()
        if lease.usable_blocks:
            known.lease = lease

    def _awaits_peers(self, lease: Lease) -> bool:
        """Whether it is open what other nodes have."""
        return not lease.is_complete and Source.PEER in lease.sources[lease.ready_blocks :]

    def _poll(self, known: _Known, lease: Lease) -> None:
        try:
            lease.wait(lease.usable_blocks, timeout_seconds=0.0)
        except EmberError:
            self._stats.count("failed_lookups")
            known.release()

    def _limit(self, request: Request) -> int:
        """Tokens that a load may fill at most: whole pages before the last token."""
        page = self._shape.groups[0].page_tokens
        return (int(request.num_tokens) - 1) // page * page

    def _group_load(
        self, chain: RequestChain, number: int, table: Sequence[int], first: int, last: int
    ) -> GroupLoad:
        """A group's pages among the tokens `first` to `last`: a window has the last of them.

        A state is one page, at the end of the last block.
        """
        group = self._shape.groups[number]
        begin, end = first // group.page_tokens, last // group.page_tokens
        if group.is_state:
            block = last // self._shape.block_tokens
            return GroupLoad(number, tuple(chain.hashes[block - 1 : block]), 0, (table[end - 1],))
        while begin < end and table[begin] == NULL_PAGE:
            begin += 1
        step = self._shape.lookup_step
        start = begin // group.pages_per_block // step * step
        stop = -(-last // self._shape.block_tokens)
        return GroupLoad(
            number,
            tuple(chain.hashes[start:stop]),
            begin - start * group.pages_per_block,
            tuple(table[begin:end]),
        )

    def _save(self, plan: StepPlan, known: _Known, computed: int, output: SchedulerOutput) -> None:
        """Plan to keep the blocks that are full once this step has run."""
        size, request = self._shape.block_tokens, known.request
        tokens = _tokens(request)
        after = min(computed + output.num_scheduled_tokens[request.request_id], len(tokens))
        full = after // size
        # After a failed load the engine computes again what we took for saved.
        first = min(known.saved_blocks, computed // size)
        if full <= first:
            return
        hashes = known.chain.grow(tokens)
        for number, group in enumerate(self._shape.groups):
            if group.is_state:
                continue  # see `_save_states`
            pages, each = known.pages[number], group.pages_per_block
            begin = max(first, _first_whole(group, pages, computed))
            end = min(full, len(pages) // each)
            if begin < end:
                kept = tuple(pages[begin * each : end * each])
                self._plan_save(plan, known, number, begin, hashes[:end], kept)
        known.saved_blocks = full

    def _save_states(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Plan to keep the states that the engine tells of; they are final once this step has run.

        It tells of each one once, with its page: a request's table of such pages has gaps, and its
        last page is written on and on.
        """
        if not any(group.is_state for group in self._shape.groups):
            return
        told = output.kv_connector_block_state.boundary_state_offloads
        for request_id, states in told.items():
            known = self._known.get(request_id)
            if known is None:
                continue
            hashes = known.chain.grow(_tokens(known.request))
            for number, page, tokens in states:
                block, rest = divmod(tokens, self._shape.block_tokens)
                if 0 < block <= len(hashes) and not rest and page != NULL_PAGE:
                    self._plan_save(plan, known, number, block - 1, hashes[:block], (page,))

    def _plan_save(
        self,
        plan: StepPlan,
        known: _Known,
        number: int,
        begin: int,
        hashes: Sequence[BlockHash],
        pages: tuple[int, ...],
    ) -> None:
        """Keep the blocks from `begin` on to the end of `hashes`; `pages` are theirs."""
        group = self._shape.groups[number]
        self._last_save += 1
        plan.saves.append(
            SavePlan(
                self._last_save,
                known.request.request_id,
                number,
                tuple(hashes[begin:]),
                hashes[begin - 1] if begin else None,
                pages,
                known.chain.salt_id,
            )
        )
        self._saves[self._last_save] = _Saving(known)
        known.saving.add(self._last_save)
        if not group.needs_all:
            self.holds.hold(self._last_save, pages)


def _first_whole(group: PageGroup, pages: Sequence[int], computed: int) -> int:
    """First block from which on the engine has all pages, until the step that comes is over."""
    page = group.live_from(computed)
    while page < len(pages) and pages[page] == NULL_PAGE:
        page += 1
    return -(-page // group.pages_per_block)


def _tokens(request: Any) -> Sequence[int]:
    tokens: Sequence[int] = request.all_token_ids
    return tokens
