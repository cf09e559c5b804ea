"""A reference engine small enough for unit tests, and its answers without any cache."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.engine import Failed, Said, TorchEngine
from emberkv_proto.types import Source
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
}
WAIT_SECONDS = 20.0


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


@contextmanager
def running_engine(cfg: EngineSection, store: FakeStore | None = None) -> Iterator[TorchEngine]:
    """Started, then closed and checked."""
    engine = TorchEngine(cfg, store.connect if store else None)
    engine.start("http://127.0.0.1:1")
    try:
        yield engine
    finally:
        engine.close()
    engine.check_integrity()
    if store is not None:
        store.check_integrity()


def ask(
    engine: TorchEngine, prompts: Sequence[Sequence[int]], max_tokens: int, salt: bytes = b""
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
