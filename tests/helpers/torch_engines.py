"""A reference engine small enough for unit tests, and its answers without any cache."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.engine import TorchEngine
from client_sdk.engine.torch_engine.scheduler import Request
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import EngineInfo, Source
from tests.helpers.fake_store import FakeStore

TINY: dict[str, Any] = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 48,
    "block_tokens": 4,
    "num_blocks": 64,
    "max_model_len": 256,
    # A busy machine must not turn hits into recomputed blocks.
    "load_patience_seconds": 30.0,
    "store_timeout_seconds": 20.0,
}
WAIT_SECONDS = 60.0


def tiny_config(**changes: Any) -> EngineSection:
    return EngineSection(**{**TINY, **changes})


@dataclass(frozen=True)
class Heard:
    """An answer to its end."""

    tokens: tuple[int, ...]
    cached: dict[Source, int]

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


@dataclass(frozen=True)
class Said:
    token: int
    is_last: bool
    cached: dict[Source, int]


@dataclass(frozen=True)
class Failed:
    reason: str


Sink = Callable[["Said | Failed"], None]


class Listener:
    """Collects one request's events."""

    def __init__(self) -> None:
        self.events: queue.Queue[Said | Failed] = queue.Queue()

    def next(self) -> Said | Failed:
        return self.events.get(timeout=WAIT_SECONDS)

    def answer(self) -> Heard:
        tokens: list[int] = []
        while True:
            event = self.next()
            assert isinstance(event, Said), event
            tokens.append(event.token)
            if event.is_last:
                return Heard(tuple(tokens), {s: n for s, n in event.cached.items() if n})


class _FakelyStored(TorchEngine):
    def __init__(self, cfg: EngineSection, store: FakeStore | None) -> None:
        super().__init__(cfg.model_copy(update={"socket_path": "fake"}) if store else cfg)
        self._fake = store

    def connect(self, info: EngineInfo | None) -> SyncClient:
        return self._fake.connect(info) if self._fake else super().connect(info)


class EngineThread:
    """An engine whose event loop runs in a thread of its own, for tests without one."""

    def __init__(self, cfg: EngineSection, store: FakeStore | None = None) -> None:
        self.engine = _FakelyStored(cfg, store)
        self.cfg, self.scheduler = cfg, self.engine.scheduler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop")
        self._thread.start()

    def start(self) -> None:
        async def start() -> None:
            self.engine.start("http://127.0.0.1:1")

        self._run(start())

    def submit(
        self, prompt: Sequence[int], max_tokens: int, salt: bytes, sink: Sink
    ) -> Future[None]:
        """Have the events of an answer, cut at what the engine can hold, said to `sink`."""
        request = Request(prompt, min(max_tokens, self.cfg.max_tokens - len(prompt)), salt)

        async def listen() -> None:
            try:
                async with aclosing(self.engine.answer(request)) as spoken:
                    said = 0
                    async for token in spoken:
                        said += 1
                        sink(Said(token, said == request.max_tokens, dict(request.cached)))
            except UnavailableError as error:
                sink(Failed(str(error)))

        return asyncio.run_coroutine_threadsafe(listen(), self._loop)

    def abort(self, answer: Future[None]) -> None:
        answer.cancel()

    @property
    def is_idle(self) -> bool:
        return not self.engine._flights

    def count(self, event: str) -> float:
        value: float = self.engine.events.labels(event)._value.get()
        return value

    def close(self) -> None:
        self._run(self.engine.close())
        self._run(_settle())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()
        self.engine.check_integrity()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)


async def _settle() -> None:
    """Let the tasks that listen hear of the end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(others, timeout=WAIT_SECONDS)


@contextmanager
def running_engine(cfg: EngineSection, store: FakeStore | None = None) -> Iterator[EngineThread]:
    """Started, then closed and checked."""
    engine = EngineThread(cfg, store)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()
    if store is not None:
        store.check_integrity()


def ask(
    engine: EngineThread, prompts: Sequence[Sequence[int]], max_tokens: int, salt: bytes = b""
) -> list[Heard]:
    """All prompts at once; their answers in order."""
    listeners = [Listener() for _ in prompts]
    for prompt, listener in zip(prompts, listeners, strict=True):
        engine.submit(prompt, max_tokens, salt, listener.events.put)
    return [listener.answer() for listener in listeners]


def uncached_answers(
    prompts: Sequence[Sequence[int]], max_tokens: int, **changes: Any
) -> list[tuple[int, ...]]:
    """Each prompt alone, in one chunk, without prefix cache and store."""
    cfg = tiny_config(prefix_cache=False, max_batch_tokens=4096, **changes)
    with running_engine(cfg) as engine:
        return [ask(engine, [prompt], max_tokens)[0].tokens for prompt in prompts]
