"""The step loop: admit, load, compute, save, answer.

The event loop's thread owns the scheduler and decides. Steps are computed in another thread; what
one computes on is given to nobody else before it is over, even if its request ends meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from client_sdk.engine.store_link import StoreLink, Verified
from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.kv_events import EventPublisher
from client_sdk.engine.torch_engine.model import TinyTransformer
from client_sdk.engine.torch_engine.scheduler import Chunk, Request, Scheduler
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import UnavailableError
from emberkv_proto.hashing import salt_id
from emberkv_proto.types import EngineInfo, Source

log = logging.getLogger(__name__)
Copy = list[Future[bool | None]]


@dataclass(eq=False, slots=True)
class _Flight:
    """What goes with a request under way: its answer, and what its next step is to load."""

    said: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    submitted_at: float = field(default_factory=time.monotonic)
    load: Verified | None = None
    saves: list[asyncio.Task[None]] = field(default_factory=list)


class TorchEngine:
    """A reference engine. `start` once its URL is known; `close` frees everything."""

    def __init__(self, cfg: EngineSection) -> None:
        torch.set_num_threads(1)
        self.cfg = cfg
        self.model = TinyTransformer(cfg)
        self.namespace = cfg.namespace(self.model.weights_id)
        self.pages = torch.zeros(
            cfg.layers, 2, cfg.num_blocks, cfg.block_tokens, cfg.kv_heads, cfg.head_dim
        )
        self.scheduler = Scheduler(cfg, self.namespace.id, self._before_preempt)
        self._store: StoreLink | None = None
        self._publisher: EventPublisher | None = None
        self._save_room_blocks = cfg.save_queue_blocks
        self._tokens_per_second = 2000.0  # a first guess
        self._flights: dict[Request, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news, self._is_stopping = asyncio.Event(), False
        own = self.metrics = CollectorRegistry()
        self.events = Counter("emberkv_engine_events", "What happened", ["event"], registry=own)
        self._hits = Counter("emberkv_engine_hit_tokens", "By source", ["source"], registry=own)
        self._ttft = Summary("emberkv_engine_ttft_seconds", "To the first token", registry=own)
        free = Gauge("emberkv_engine_free_blocks", "Referenced by nobody", registry=own)
        free.set_function(lambda: self.scheduler.pool.free_blocks)

    def start(self, url: str) -> None:
        """Begin to serve; with a store, also announce `url` to its daemon, now or when it is up.

        Raises:
            InvalidRequestError: cfg.socket_path can never be a socket.
        """
        cfg, url = self.cfg, self.cfg.advertised_url or url
        if self.scheduler.events is not None:
            self._publisher = EventPublisher(cfg.host, cfg.events_port)
        if cfg.socket_path:
            info = self._info(url)
            clients = self.connect(info), self.connect(None)
            self._store = StoreLink(*clients, self.pages.numpy(), self.events)
        self._spawn(self._run())

    def _info(self, url: str) -> EngineInfo:
        cfg = self.cfg
        info = EngineInfo(
            cfg.engine_id, url, cfg.model, self.namespace.id, cfg.block_tokens, role=cfg.role
        )
        if self._publisher is None:
            return info
        host = urlsplit(url).hostname or cfg.host
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        return replace(
            info,
            events_endpoint=f"{where}:{self._publisher.port}",
            replay_endpoint=f"{where}:{self._publisher.replay_port}",
            engine_block_tokens=cfg.block_tokens,
        )

    def connect(self, info: EngineInfo | None) -> SyncClient:
        cfg, timeout = self.cfg, self.cfg.store_timeout_seconds
        return SyncClient(cfg.socket_path, self.namespace, engine=info, timeout_seconds=timeout)

    async def answer(self, request: Request) -> AsyncGenerator[int, None]:
        """Say up to `max_tokens` tokens. Closing the generator ends the request.

        In the role `prefill` it ends only when the blocks are in the store, or could not get there:
        whoever waits for the answer goes on to read them.

        Raises:
            UnavailableError: the engine does not run, ends, or could not compute.
        """
        assert 0 < len(request.prompt) <= self.cfg.max_tokens - request.max_tokens, "no room"
        if not self.is_alive:
            raise UnavailableError("the engine does not run")
        flight = self._flights[request] = _Flight()
        self.scheduler.submit(request)
        self._news.set()
        try:
            for _ in range(request.max_tokens):
                if (token := await flight.said.get()) is None:
                    raise UnavailableError("the engine ended the request")
                yield token
            if flight.saves:
                await asyncio.wait(flight.saves, timeout=self.cfg.store_timeout_seconds)
        finally:
            self._end(request)

    @property
    def is_alive(self) -> bool:
        return bool(self._tasks) and not self._is_stopping

    async def close(self) -> None:
        """End all requests, save what is queued for cfg.drain_seconds, end the threads."""
        self._is_stopping = True
        self._news.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.cfg.drain_seconds)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        if self._publisher is not None:
            await self._publisher.close()

    def check_integrity(self) -> None:
        """Assert that the scheduler is sound and every one of its requests has a listener."""
        self.scheduler.check_integrity()
        assert {*self.scheduler.active, *self.scheduler.waiting} == set(self._flights)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._news.clear()
                while (admitted := self.scheduler.admit()) is not None:
                    self._spawn(self._load(admitted))
                if chunks := self.scheduler.plan():
                    await self._step(chunks)
                    await self._publish()
                else:
                    await self._news.wait()
        except Exception:
            log.exception("the step loop broke; the engine ends")
        self._is_stopping = True
        for request in list(self._flights):
            self._end(request)

    async def _publish(self) -> None:
        if self._publisher is not None and self.scheduler.events is not None:
            events = self.scheduler.events.take()
            if events:
                await self._publisher.publish(events)

    async def _load(self, request: Request) -> None:
        """Ask the store for as long as computing would take; run with what is there by then."""
        hashes = self.scheduler.loadable(request)[request.computed // self.cfg.block_tokens :]
        verified: Verified | None = None
        late: set[asyncio.Future[Verified | None]] = set()
        if self._store is not None and hashes:
            seconds = len(hashes) * self.cfg.block_tokens / self._tokens_per_second
            seconds = max(seconds, self.cfg.load_patience_seconds)
            load = asyncio.wrap_future(self._store.load(hashes, time.monotonic() + seconds))
            _, late = await asyncio.wait([load], timeout=seconds)
            verified = None if late else load.result()
        flight = self._flights.get(request)
        if flight is not None:
            flight.load, verified = verified, None
            self.scheduler.resume(request, flight.load.sources if flight.load else ())
            self._news.set()
        for load in late:
            self.events.labels("load_given_up").inc()
            verified = await load
        self._release(verified)

    def _release(self, load: Verified | None) -> None:
        if load is not None and self._store is not None:
            self._store.release(load)

    async def _step(self, chunks: Sequence[Chunk]) -> None:
        """Compute the chunks while the layers of their loads arrive; take over what held."""
        copies = [self._begin_copy(chunk) for chunk in chunks]
        began = time.monotonic()
        try:
            said = await asyncio.to_thread(self._compute, chunks, copies)
        except Exception:
            log.exception("a step of %d requests failed", len(chunks))
            for chunk in chunks:
                self._end(chunk.request)
            return
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        if tokens > 2 * len(chunks) and tokens >= self.cfg.block_tokens:  # it was a prefill
            speed = tokens / (time.monotonic() - began)
            self._tokens_per_second += 0.3 * (speed - self._tokens_per_second)
        for chunk, copy, token in zip(chunks, copies, said, strict=True):
            if not all(part.result() for part in copy):
                self.events.labels("load_broken").inc()
                self.scheduler.resume(chunk.request)
            elif chunk.request in self._flights:
                self._advance(chunk, token)

    def _begin_copy(self, chunk: Chunk) -> Copy:
        flight, size = self._flights[chunk.request], self.cfg.block_tokens
        load, flight.load = flight.load, None
        if load is None or self._store is None:
            return []
        first = chunk.request.computed // size
        return self._store.copy(load, chunk.blocks[first : chunk.start // size])

    def _compute(self, chunks: Sequence[Chunk], copies: Sequence[Copy]) -> list[int]:
        """One token for each chunk. Nothing writes into its blocks any more when this returns."""
        try:
            return self.model.forward(
                self.pages, chunks, lambda layer: wait([copy[layer] for copy in copies if copy])
            )
        finally:
            wait([part for copy in copies for part in copy])

    def _advance(self, chunk: Chunk, token: int) -> None:
        request, flight = chunk.request, self._flights[chunk.request]
        is_at_end = self.scheduler.advance(chunk, token)
        self._save(request)
        if not is_at_end:
            return
        if request.generated == 1:
            self._ttft.observe(time.monotonic() - flight.submitted_at)
            for source in Source:
                self._hits.labels(source.name.lower()).inc(request.cached[source])
        flight.said.put_nowait(token)
        if request.generated == request.max_tokens:
            self.events.labels("answered").inc()
            self._end(request)

    def _save(self, request: Request) -> None:
        """Hand full blocks to the saver; what has no room is tried again after the next step."""
        full, first = request.computed // self.cfg.block_tokens, request.saved
        blocks = request.blocks[first:full]
        if self._store is None or not blocks:
            return
        if len(blocks) > self._save_room_blocks:
            self.events.labels("save_queue_full").inc()
            return
        parent = request.hashes[first - 1] if first else None
        hashes, tenant = request.hashes[first:full], salt_id(request.salt)
        save = self._store.save(hashes, blocks, parent, tenant)
        self.scheduler.pool.touch(blocks)
        self._save_room_blocks -= len(blocks)
        saved = self._spawn(self._finish_save(save, blocks))
        if self.cfg.role == "prefill":
            self._flights[request].saves.append(saved)
        request.saved = full

    async def _finish_save(self, save: Future[None], blocks: Sequence[int]) -> None:
        await asyncio.wrap_future(save)
        self.scheduler.pool.release(blocks)
        self._save_room_blocks += len(blocks)
        self._news.set()

    def _before_preempt(self, victim: Request) -> None:
        """A victim keeps what it computed in the store."""
        flight = self._flights[victim]
        self._release(flight.load)
        flight.load = None
        self._save(victim)
        self.events.labels("preempted").inc()
        self._news.set()

    def _end(self, request: Request) -> None:
        """Free what a request holds, in whatever state it is, or over already."""
        flight = self._flights.pop(request, None)
        if flight is not None:
            self._release(flight.load)
            self.scheduler.finish(request)
            flight.said.put_nowait(None)
            self._news.set()
