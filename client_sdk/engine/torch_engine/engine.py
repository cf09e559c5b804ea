"""The step loop: admit, load, compute, save, answer; one thread owns the scheduler and the pages.

Other threads speak to it through `submit` and `abort` only, and hear from it through the sink
they gave with a request, called in the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.metrics import EngineMetrics
from client_sdk.engine.torch_engine.model import Span, TinyTransformer
from client_sdk.engine.torch_engine.paged_kv import BlockPool
from client_sdk.engine.torch_engine.scheduler import Chunk, Request, RequestState, Scheduler
from client_sdk.engine.torch_engine.store_link import LoadJob, SaveJob, StoreLink
from client_sdk.sync_client import SyncClient
from emberkv_proto.types import EngineInfo, Source

log = logging.getLogger(__name__)
FIRST_GUESS_TOKENS_PER_SECOND = 2000.0


@dataclass(frozen=True, slots=True)
class Said:
    """One token of an answer; `is_last` at the end. `cached` counts prompt tokens by source."""

    token: int
    is_last: bool
    cached: dict[Source, int]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without its answer."""

    reason: str


Sink = Callable[["Said | Failed"], None]
Connect = Callable[["EngineInfo | None"], SyncClient]


@dataclass(eq=False, slots=True)
class _Flight:
    """A request, who listens, and the load it waits for."""

    request: Request
    sink: Sink
    submitted_at: float
    load: LoadJob | None = None
    load_from: int = 0
    """Computed tokens when the load began."""
    has_said: bool = False


class TorchEngine:
    """A reference engine. `start` once its URL is known; `close` frees everything."""

    def __init__(self, cfg: EngineSection, connect: Connect | None = None) -> None:
        """`connect` replaces the client of the daemon at cfg.socket_path, in tests."""
        torch.set_num_threads(cfg.threads)
        self.cfg = cfg
        self._connect = connect or (self._client if cfg.socket_path else None)
        self.model = TinyTransformer(cfg)
        self.namespace = cfg.namespace(self.model.weights_id)
        self.pages = torch.zeros(
            cfg.layers, 2, cfg.num_blocks, cfg.block_tokens, cfg.kv_heads, cfg.head_dim
        )
        self.scheduler = Scheduler(
            BlockPool(cfg.num_blocks, keeps_prefixes=cfg.prefix_cache),
            self.namespace.id,
            cfg.block_tokens,
            cfg.max_batch_tokens,
            cfg.max_running,
            before_preempt=self._let_go,
        )
        self.metrics = EngineMetrics(self)
        self.store: StoreLink | None = None
        self._flights: dict[str, _Flight] = {}
        self._commands: deque[Callable[[], object]] = deque()
        self._news = threading.Event()
        self._is_stopping = False
        self._tokens_per_second = FIRST_GUESS_TOKENS_PER_SECOND
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def start(self, url: str) -> None:
        """Begin to serve; with a store, also announce `url` to its daemon, now or when it is up.

        Raises:
            InvalidRequestError: cfg.socket_path can never be a socket.
        """
        cfg = self.cfg
        if (connect := self._connect) is not None:
            info = EngineInfo(
                cfg.engine_id,
                cfg.advertised_url or url,
                cfg.model,
                self.namespace.id,
                cfg.block_tokens,
                cfg.role,
            )
            self.store = StoreLink(
                connect(info),
                connect(None),
                self.pages.numpy(),
                cfg.save_queue_blocks,
                self._news.set,
            )
        self._thread.start()

    def submit(self, prompt: Sequence[int], max_tokens: int, salt: bytes, sink: Sink) -> str:
        """Queue a request (any thread). `prompt` is shorter than cfg.max_tokens."""
        assert 0 < len(prompt) < self.cfg.max_tokens, f"{len(prompt)} tokens"
        request = Request(uuid.uuid4().hex, tuple(prompt), max_tokens, salt)
        flight = _Flight(request, sink, time.monotonic())
        if self._is_stopping:
            sink(Failed("the engine is shutting down"))
        else:
            self._command(lambda: self._begin(flight))
        return request.id

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is (any thread). Nothing happens when it is over already."""
        self._command(lambda: self._end(request_id))

    @property
    def is_idle(self) -> bool:
        return not self._flights and not self._commands

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all requests, finish saving, end the threads; at most about `timeout_seconds`."""
        self._is_stopping = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        if self.store is not None and not self.store.close(timeout_seconds):
            log.warning("the store threads did not end within %g s", timeout_seconds)

    def check_integrity(self) -> None:
        """Only while the step loop does not run."""
        self.scheduler.check_integrity()
        live = {r.id for r in (*self.scheduler.active, *self.scheduler.waiting)}
        assert live == set(self._flights), "requests and listeners differ"

    def _client(self, info: EngineInfo | None) -> SyncClient:
        return SyncClient(
            self.cfg.socket_path,
            self.namespace,
            engine=info,
            client_name=f"torch_engine {self.cfg.engine_id}",
            timeout_seconds=self.cfg.store_timeout_seconds,
        )

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._news.set()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if not self._turn():
                    self._news.wait(self._patience())
                    self._news.clear()
        except Exception:
            log.exception("the step loop broke; the engine ends")
        self._is_stopping = True
        while self._commands:
            self._commands.popleft()()
        for request_id in list(self._flights):
            self._fail(request_id, "the engine is shutting down")

    def _turn(self) -> bool:
        """One round of the loop; False when there is nothing to do before news come."""
        while self._commands:
            self._commands.popleft()()
        for job in self.store.take_copied() if self.store else ():
            self.scheduler.pool.release(job.blocks)
        while (admitted := self.scheduler.admit()) is not None:
            self._begin_load(self._flights[admitted.id])
        for request in list(self.scheduler.active):
            self._settle_load(self._flights[request.id])
        chunks = self.scheduler.plan()
        if not chunks:
            return False
        try:
            self._step(chunks)
        except Exception:
            log.exception("a step of %d requests failed", len(chunks))
            for chunk in chunks:
                self._fail(chunk.request.id, "the engine failed to compute")
        return True

    def _patience(self) -> float:
        """Seconds until the next load is given up, or a while."""
        now = time.monotonic()
        waits = [f.load.deadline - now for f in self._flights.values() if f.load is not None]
        return max(0.001, min(waits, default=0.5))

    def _begin(self, flight: _Flight) -> None:
        self._flights[flight.request.id] = flight
        self.scheduler.submit(flight.request)

    def _begin_load(self, flight: _Flight) -> None:
        """Ask the store for what the prefix cache lacks, for as long as recomputing would take."""
        request = flight.request
        first = request.computed // self.cfg.block_tokens
        hashes = self.scheduler.loadable(request)[first:]
        if self.store is None or not hashes:
            self.scheduler.load_settled(request, ())
            return
        seconds = len(hashes) * self.cfg.block_tokens / self._tokens_per_second
        deadline = time.monotonic() + max(seconds, self.cfg.load_patience_seconds)
        flight.load_from = request.computed
        flight.load = self.store.load(hashes, request.blocks[first : first + len(hashes)], deadline)

    def _settle_load(self, flight: _Flight) -> None:
        """A load that is verified, over, or too late lets its request run."""
        load = flight.load
        if flight.request.state is not RequestState.LOADING or load is None:
            return
        if load.sources is None and time.monotonic() >= load.deadline:
            load.cancel()
            self.metrics.loads_given_up.inc()
        if load.sources is not None:
            self.scheduler.load_settled(flight.request, load.sources)
            if not load.sources:
                flight.load = None

    def _step(self, chunks: Sequence[Chunk]) -> None:
        flights = [self._flights[chunk.request.id] for chunk in chunks]
        spans = []
        for chunk in chunks:
            request, start = chunk.request, chunk.request.computed
            spans.append(Span(request.tokens[start : start + chunk.count], start, request.blocks))
        loading = [flight.load for flight in flights if flight.load is not None]

        def before_layer(number: int) -> None:
            for load in loading:
                if not load.wait_layer(number, self.cfg.store_timeout_seconds):
                    load.cancel()

        began = time.monotonic()
        said = self.model.forward(self.pages, spans, before_layer)
        seconds = time.monotonic() - began
        tokens = sum(chunk.count for chunk in chunks)
        if tokens > 2 * len(chunks) and tokens >= self.cfg.block_tokens:
            self._tokens_per_second += 0.3 * (tokens / seconds - self._tokens_per_second)
            self.metrics.prefill_seconds.inc(seconds)
        for flight, chunk, token in zip(flights, chunks, said, strict=True):
            if self._load_held(flight):
                self._advance(flight, chunk, token)

    def _load_held(self, flight: _Flight) -> bool:
        """After the first step on loaded blocks: False if the step must not count."""
        load, flight.load = flight.load, None
        if load is None:
            return True
        if load.layers < self.cfg.layers:
            self.metrics.loads_broken.inc()
            self.scheduler.load_failed(flight.request, flight.load_from)
            return False
        first = flight.load_from // self.cfg.block_tokens
        self.scheduler.remember_loaded(flight.request, first, first + len(load.sources or ()))
        return True

    def _advance(self, flight: _Flight, chunk: Chunk, token: int) -> None:
        request = flight.request
        reached_end = self.scheduler.advance(chunk, token)
        self._save(request)
        if not reached_end:
            return
        if not flight.has_said:
            flight.has_said = True
            self.metrics.first_token(time.monotonic() - flight.submitted_at, request)
        is_last = (
            request.generated >= request.max_tokens or len(request.tokens) >= self.cfg.max_tokens
        )
        if is_last:
            del self._flights[request.id]
            self.scheduler.finish(request)
            self.metrics.finished.inc()
        flight.sink(Said(token, is_last, dict(request.cached)))

    def _save(self, request: Request) -> None:
        """Hand full blocks to the saver; what its queue cannot take is tried again next step."""
        full, first = request.computed // self.cfg.block_tokens, request.saved
        if self.store is None or full <= first:
            return
        blocks = request.blocks[first:full]
        parent = request.hashes[first - 1] if first else None
        if self.store.save(SaveJob(request.hashes[first:full], blocks, parent)):
            self.scheduler.pool.touch(blocks)
            request.saved = full

    def _let_go(self, request: Request) -> None:
        """A victim keeps what it computed in the store, and no load writes into its blocks."""
        flight = self._flights[request.id]
        if flight.load is not None:
            flight.load.cancel()
            flight.load = None
            self.scheduler.load_failed(request, flight.load_from)
        self._save(request)
        self.metrics.preemptions.inc()

    def _end(self, request_id: str) -> _Flight | None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            if flight.load is not None:
                flight.load.cancel()
            self.scheduler.finish(flight.request)
        return flight

    def _fail(self, request_id: str, reason: str) -> None:
        flight = self._end(request_id)
        if flight is not None:
            flight.sink(Failed(reason))
