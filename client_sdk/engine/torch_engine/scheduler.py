"""Who runs, on which blocks, and who has to give way. Pure: no tensors, threads, clocks or I/O.

    submit          admit           load_settled          plan / advance
 ──► WAITING ──────► LOADING ───────► RUNNING ──────────────► FINISHED
        ▲                                │ preempt             (abort: from any state)
        └────────────────────────────────┘

A request gets the blocks of all its tokens at admission, in one step, so two half-served requests
never wait for each other. The last to come is the first to be preempted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from client_sdk.engine.torch_engine.paged_kv import BlockPool
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import BlockHash, NamespaceId, Source


class RequestState(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what has become of it. Changed by the scheduler's thread only."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of `tokens`."""
    blocks: list[int] = field(default_factory=list)
    """Block table."""
    computed: int = 0
    """Leading tokens whose KV is in the pages. A load never writes below it."""
    saved: int = 0
    """Leading blocks that need no saving any more."""
    cached: Counter[Source] = field(default_factory=Counter)
    """Prompt tokens not computed at the first admission, by where they came from."""
    state: RequestState = RequestState.WAITING
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `count` tokens of `request` from its computed boundary."""

    request: Request
    count: int


class Scheduler:
    """The queues and the block pool. Used by one thread."""

    def __init__(
        self,
        pool: BlockPool,
        namespace_id: NamespaceId,
        block_tokens: int,
        max_batch_tokens: int,
        max_running: int,
        before_preempt: Callable[[Request], None],
    ) -> None:
        """`before_preempt` gets each victim while it still holds its blocks."""
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        """LOADING and RUNNING requests, in the order of their admission."""
        self._namespace_id = namespace_id
        self._block_tokens = block_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._before_preempt = before_preempt

    def submit(self, request: Request) -> None:
        self._extend_hashes(request)
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Give the first waiting request its blocks, if they are there: it is LOADING then.

        At least its last token is left to compute. Those who ask must settle the load.
        """
        if not self.waiting or len(self.active) >= self._max_running:
            return None
        request = self.waiting[0]
        hit = self.pool.match(self.loadable(request))
        missing = self._blocks_for(len(request.tokens)) - len(hit)
        if not self.pool.can_allocate(missing, hit):
            return None
        self.waiting.popleft()
        self.pool.touch(hit)
        request.blocks = hit + self.pool.allocate(missing)
        request.computed = len(hit) * self._block_tokens
        request.saved = max(request.saved, len(hit))
        if not request.preemptions:
            request.cached[Source.HBM] = request.computed
        request.state = RequestState.LOADING
        self.active.append(request)
        return request

    def loadable(self, request: Request) -> list[BlockHash]:
        """The hashes of a prefix that leaves at least one token to compute."""
        return request.hashes[: (len(request.tokens) - 1) // self._block_tokens]

    def load_settled(self, request: Request, sources: Iterable[Source]) -> None:
        """A load has ended or runs ahead by layer: one verified block per source, in order."""
        assert request.state is RequestState.LOADING, f"{request.id} is {request.state}"
        for source in sources:
            request.computed += self._block_tokens
            if not request.preemptions:
                request.cached[source] += self._block_tokens
        request.state = RequestState.RUNNING

    def load_failed(self, request: Request, computed: int) -> None:
        """Layers did not follow: everything from `computed` on is computed after all."""
        request.computed = computed
        if not request.preemptions:
            request.cached = Counter({Source.HBM: request.cached[Source.HBM]})

    def plan(self) -> list[Chunk]:
        """Tokens of the next step: one for each answer first, then prompts within the budget."""
        chunks: list[Chunk] = []
        budget = self._max_batch_tokens
        running = [r for r in self.active if r.state is RequestState.RUNNING]
        for request in sorted(running, key=lambda r: len(r.tokens) - r.computed > 1):
            if request.state is RequestState.RUNNING and budget and self._grow(request):
                count = min(len(request.tokens) - request.computed, budget)
                chunks.append(Chunk(request, count))
                budget -= count
        return [chunk for chunk in chunks if chunk.request.state is RequestState.RUNNING]

    def advance(self, chunk: Chunk, next_token: int) -> bool:
        """Take over a computed chunk; True if it reached the end and `next_token` was said."""
        request = chunk.request
        first = request.computed // self._block_tokens
        request.computed += chunk.count
        said = request.computed == len(request.tokens)
        if said:
            request.tokens.append(next_token)
            self._extend_hashes(request)
        for number in range(first, request.computed // self._block_tokens):
            self.pool.remember(request.blocks[number], request.hashes[number])
        return said

    def remember_loaded(self, request: Request, first: int, end: int) -> None:
        """Blocks first..end-1 came from the store complete: findable, and not to be saved."""
        for number in range(first, end):
            self.pool.remember(request.blocks[number], request.hashes[number])
        request.saved = max(request.saved, end)

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is; its blocks are free at once."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is not RequestState.FINISHED:
            self._leave(request)
        request.state = RequestState.FINISHED

    def _grow(self, request: Request) -> bool:
        """Blocks for all tokens of a running request, from the last comer's if need be."""
        missing = self._blocks_for(len(request.tokens)) - len(request.blocks)
        while not self.pool.can_allocate(missing):
            victims = [r for r in self.active if r.state is RequestState.RUNNING]
            self._preempt(victims[-1])
            if victims[-1] is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True

    def _preempt(self, victim: Request) -> None:
        self._before_preempt(victim)
        self._leave(victim)
        victim.preemptions += 1
        victim.state = RequestState.WAITING
        self.waiting.appendleft(victim)

    def _leave(self, request: Request) -> None:
        self.active.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _extend_hashes(self, request: Request) -> None:
        start = len(request.hashes) * self._block_tokens
        if len(request.tokens) - start >= self._block_tokens:
            parent = request.hashes[-1] if request.hashes else None
            request.hashes += block_hashes(
                self._namespace_id,
                request.tokens[start:],
                self._block_tokens,
                salt=request.salt,
                parent=parent,
            )

    def check_integrity(self) -> None:
        """Assert: tables cover what is computed, states match queues, block references add up."""
        self.pool.check_integrity()
        assert all(r.state is RequestState.WAITING and not r.blocks for r in self.waiting)
        for request in self.active:
            assert request.state in (RequestState.LOADING, RequestState.RUNNING)
            assert request.computed < len(request.tokens), f"{request.id} has nothing to compute"
            assert request.computed <= len(request.blocks) * self._block_tokens
            assert len(request.hashes) == len(request.tokens) // self._block_tokens
            assert len(set(request.blocks)) == len(request.blocks)
