"""Who runs, on which blocks, and who has to give way. Pure: no tensors, threads, clocks or I/O.

A request gets the blocks of all its tokens at admission, in one step, so two half-served requests
never wait for each other. The last to come is the first to be preempted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.kv_events import CacheEvents
from client_sdk.engine.torch_engine.paged_kv import BlockPool
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import BlockHash, NamespaceId, Source


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what has become of it. Changed by one thread only."""

    prompt: Sequence[int]
    max_tokens: int
    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)  # prompt and answer so far
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks of `tokens`
    blocks: list[int] = field(default_factory=list)  # block table
    computed: int = 0  # leading tokens whose KV is in the pages; a load never writes below
    is_loading: bool = False
    loaded: Sequence[Source] = ()  # of verified blocks that the next step finds after `computed`
    saved: int = 0  # leading blocks that need no saving any more
    cached: Counter[Source] = field(default_factory=Counter)  # prompt tokens not computed
    preemptions: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `tokens`, which stand at start.. in `request`, with their KV in `blocks`."""

    request: Request
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]


class Scheduler:
    """The queues and the block pool. Used by one thread."""

    def __init__(
        self, cfg: EngineSection, namespace: NamespaceId, before_preempt: Callable[[Request], None]
    ) -> None:
        """`before_preempt` gets each victim while it still holds its blocks."""
        self.events = CacheEvents(cfg.block_tokens) if cfg.publishes_events else None
        forgotten = self.events.removed if self.events else lambda _: None
        self.pool = BlockPool(
            cfg.num_blocks, keeps_prefixes=cfg.prefix_cache, on_forgotten=forgotten
        )
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # in the order of their admission
        self._cfg, self._block_tokens = cfg, cfg.block_tokens
        self._namespace, self._before_preempt = namespace, before_preempt

    def submit(self, request: Request) -> None:
        request.tokens = list(request.prompt)
        self._extend_hashes(request)
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """Give the first waiting request its blocks, if they are there; `resume` lets it run."""
        if not self.waiting or len(self.active) >= self._cfg.max_running:
            return None
        request = self.waiting[0]
        hit = self.pool.match(self.loadable(request))
        missing = self._blocks_for(request) - len(hit)
        if not self.pool.can_allocate(missing, hit):
            return None
        self.pool.touch(hit)
        request.blocks = hit + self.pool.allocate(missing)
        request.computed = len(hit) * self._block_tokens
        request.saved = max(request.saved, len(hit))
        if not request.preemptions:
            request.cached[Source.HBM] = request.computed
        request.is_loading = True
        self.active.append(self.waiting.popleft())
        return request

    def loadable(self, request: Request) -> list[BlockHash]:
        """The hashes of a prefix that leaves at least one token to compute."""
        return request.hashes[: (len(request.tokens) - 1) // self._block_tokens]

    def resume(self, request: Request, loaded: Sequence[Source] = ()) -> None:
        """The load is over, or so many verified blocks arrive during the next step."""
        request.is_loading, request.loaded = False, loaded

    def plan(self) -> list[Chunk]:
        """Tokens of the next step: one for each answer first, then prompts within the budget."""
        chunks: list[Chunk] = []
        budget = self._cfg.max_batch_tokens
        for request in sorted(self._running(), key=lambda r: len(r.tokens) - r.computed > 1):
            if budget and request in self.active and self._grow(request):
                start = request.computed + len(request.loaded) * self._block_tokens
                tokens = request.tokens[start : start + budget]
                chunks.append(Chunk(request, start, tokens, request.blocks))
                budget -= len(tokens)
        return [chunk for chunk in chunks if chunk.request in self.active]

    def advance(self, chunk: Chunk, next_token: int) -> bool:
        """Take over a computed chunk; True if it reached the end and `next_token` was said."""
        request, known = chunk.request, chunk.request.computed // self._block_tokens
        if request.loaded:
            request.saved = max(request.saved, chunk.start // self._block_tokens)
            for source in request.loaded if not request.preemptions else ():
                request.cached[source] += self._block_tokens
            request.loaded = ()
        request.computed = chunk.start + len(chunk.tokens)
        is_at_end = request.computed == len(request.tokens)
        if is_at_end:
            request.tokens.append(next_token)
            self._extend_hashes(request)
        for number in range(known, request.computed // self._block_tokens):
            is_new = self.pool.remember(request.blocks[number], request.hashes[number])
            if is_new and self.events is not None:
                self._tell_stored(self.events, request, number)
        return is_at_end

    def _tell_stored(self, events: CacheEvents, request: Request, number: int) -> None:
        start, end = number * self._block_tokens, (number + 1) * self._block_tokens
        parent = request.hashes[number - 1] if number else None
        events.stored(request.hashes[number], parent, request.tokens[start:end], request.salt)

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is; its blocks are free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self._leave(request)

    def _running(self) -> list[Request]:
        return [request for request in self.active if not request.is_loading]

    def _grow(self, request: Request) -> bool:
        """Blocks for all tokens of a running request, from the last comer's if need be."""
        missing = self._blocks_for(request) - len(request.blocks)
        while not self.pool.can_allocate(missing):
            victim = self._running()[-1]
            self._before_preempt(victim)
            self._leave(victim)
            victim.preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True

    def _leave(self, request: Request) -> None:
        self.active.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.computed, request.is_loading, request.loaded = [], 0, False, ()

    def _blocks_for(self, request: Request) -> int:
        return -(-len(request.tokens) // self._block_tokens)

    def _extend_hashes(self, request: Request) -> None:
        rest = request.tokens[len(request.hashes) * self._block_tokens :]
        parent = request.hashes[-1] if request.hashes else None
        request.hashes += block_hashes(
            self._namespace, rest, self._block_tokens, salt=request.salt, parent=parent
        )

    def check_integrity(self) -> None:
        """Assert: tables cover what is computed, states match queues, block references add up."""
        self.pool.check_integrity()
        assert not any(request.blocks or request.is_loading for request in self.waiting)
        for request in self.active:
            assert request.computed < len(request.tokens), "nothing left to compute"
            assert request.computed <= len(request.blocks) * self._block_tokens
            assert len(request.hashes) == len(request.tokens) // self._block_tokens
            assert len(set(request.blocks)) == len(request.blocks)
