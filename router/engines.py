"""The engines a router may send to: those of the file and those that daemons announce.

Known by URL. What an announcement says (model, namespace, node) outlives its daemon: an engine
whose daemon died serves on by recompute, and whether it lives is a matter of its health.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from emberkv_proto.types import EngineInfo, HashScheme, NamespaceId, NodeId
from router.chains import ChainKind
from router.health import BreakerLimits, Health
from router.view import FoundEngine, NodeView

ANNOUNCING = frozenset({"ok", "suspect"})
MODELS_KEPT = 256
"""Names of models, which clients choose, for which the engines are remembered."""


@dataclass(slots=True, eq=False)
class Engine:
    """One inference process as the router knows it."""

    url: str
    host: str
    port: int
    health: Health
    authority: bytes = field(init=False)
    """As a Host header says it."""
    engine_id: str = ""
    node_id: str = ""
    model: str = ""
    """As announced or configured; empty when only /v1/models can tell."""
    role: str = "both"
    """both, prefill or decode."""
    daemon_address: str = ""
    """gRPC of its node's daemon; empty while none is known."""
    namespace_id: NamespaceId | None = None
    block_tokens: int = 0
    hash_scheme: HashScheme = HashScheme.EMBER
    is_static: bool = False
    is_announced: bool = False
    """By a daemon that is alive now, or by a pod that is there."""
    is_unready: bool = False
    """Its pod says so, or is being deleted: asked only when no other is healthy."""
    kind: ChainKind | None = None
    """How its prompts' blocks are hashed; None: not known."""
    model_cards: tuple[dict[str, Any], ...] = field(default=())
    """Its last /v1/models."""

    def __post_init__(self) -> None:
        self.authority = b"%s:%d" % (self.host.encode(), self.port)

    @property
    def name(self) -> str:
        return self.engine_id or self.url

    @property
    def models(self) -> frozenset[str]:
        ids = {str(card["id"]) for card in self.model_cards}
        return frozenset(ids | {self.model} if self.model else ids)

    def serves(self, model: str) -> bool:
        """Whether a request for `model` may go here; an engine of unknown models takes any."""
        if not model or model == self.model:
            return True
        if any(card["id"] == model for card in self.model_cards):
            return True
        return not self.model and not self.model_cards


class EngineTable:
    """All known engines by URL. Changes only on the event loop."""

    def __init__(self, limits: BreakerLimits, forget_seconds: float) -> None:
        self._limits = limits
        self._forget_seconds = forget_seconds
        self._engines: dict[str, Engine] = {}
        self._serving: dict[str, list[Engine]] = {}
        self._kinds: dict[str, list[ChainKind]] = {}
        self.on_removed: list[Callable[[Engine], None]] = []
        self.refused_announcements = 0

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, url: str) -> Engine | None:
        return self._engines.get(url)

    def add(self, url: str, now: float) -> Engine:
        """Return the engine at `url`, new ones with unknown health.

        Raises:
            ValueError: the URL is not http://host:port.
        """
        url = url.rstrip("/")
        engine = self._engines.get(url)
        if engine is None:
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname or parts.path:
                raise ValueError(f"engine URL {url!r} must look like http://host:port")
            health = Health(self._limits, now, self.changed)
            engine = Engine(url, parts.hostname, parts.port or 80, health)
            self._engines[url] = engine
            self.changed()
        return engine

    def sync(
        self,
        nodes: Sequence[NodeView],
        now: float,
        configured: Sequence[tuple[NodeId, EngineInfo]] = (),
        found: Sequence[FoundEngine] = (),
    ) -> None:
        """Take over what nodes and pods announce now; then forget what has been away too long.

        `configured` engines are of the index's settings: never forgotten.
        """
        unready = {pod.info.url for pod in found if not pod.is_ready}
        announced: set[str] = set()
        for node_id, info in configured:
            if info.url:
                engine = self.add(info.url, now)
                _describe(engine, info, node_id)
                engine.is_static = True
        for pod in found:
            if self._announce(pod.info, pod.node_id, now):
                announced.add(pod.info.url)
        addresses: dict[str, str] = {}
        for node in nodes:
            if node.liveness not in ANNOUNCING:
                continue
            addresses[node.node_id] = node.grpc_address
            for info in node.engines:
                if info.url and self._announce(info, node.node_id, now):
                    announced.add(info.url.rstrip("/"))
        for engine in self._engines.values():
            engine.is_announced = engine.url in announced
            engine.is_unready = engine.url in unready
            engine.daemon_address = addresses.get(engine.node_id, "")
        self._forget(now)
        self.changed()

    def remove(self, url: str) -> None:
        """Forget an engine now."""
        engine = self._engines.pop(url)
        self.changed()
        for callback in self.on_removed:
            callback(engine)

    def changed(self) -> None:
        """Something that `serving` goes by is another: an engine's health, models or role."""
        self._serving.clear()
        self._kinds.clear()

    def serving(self, model: str) -> list[Engine]:
        """Return the healthy engines that can answer for `model`: ready ones, if there are any.

        Engines that should only prefill answer where no others are left.
        The caller keeps the list unchanged.
        """
        known = self._serving.get(model)
        if known is None:
            known = self._usable(model, ("both", "decode")) or self.prefilling(model)
            if len(self._serving) < MODELS_KEPT:
                self._serving[model] = known
        return known

    def prefilling(self, model: str) -> list[Engine]:
        """Return the healthy engines that only prefill, likewise."""
        return self._usable(model, ("prefill",))

    def kinds(self, model: str) -> list[ChainKind]:
        """Return how prompts' blocks are hashed by these engines."""
        known = self._kinds.get(model)
        if known is None:
            found = {engine.kind for engine in self.serving(model) if engine.kind is not None}
            known = sorted(found, key=lambda kind: (kind.namespace_id, kind.block_tokens))
            if len(self._kinds) < MODELS_KEPT:
                self._kinds[model] = known
        return known

    @property
    def has_healthy(self) -> bool:
        return any(engine.health.is_healthy for engine in self._engines.values())

    def check_integrity(self) -> None:
        for url, engine in self._engines.items():
            assert url == engine.url, f"{engine.url} is listed under {url}"
            assert engine.namespace_id is None or engine.block_tokens > 0
            assert (engine.kind is None) == (engine.namespace_id is None)
            engine.health.check_integrity()
        for model, known in self._serving.items():
            fresh = [e for e in self if e.health.is_healthy and e.serves(model)]
            fresh = [e for e in fresh if e.role != "prefill"] or fresh
            assert known == ([e for e in fresh if not e.is_unready] or fresh), f"{model}: {known}"

    def _announce(self, info: EngineInfo, node_id: NodeId, now: float) -> bool:
        """Take over what an engine, or its pod, says of it; False if that is refused."""
        try:
            _check_printable(info)
            engine = self.add(info.url, now)
        except ValueError:
            self.refused_announcements += 1
            return False
        _describe(engine, info, node_id)
        return True

    def _usable(self, model: str, roles: Collection[str]) -> list[Engine]:
        healthy = [
            engine
            for engine in self._engines.values()
            if engine.health.is_healthy and engine.role in roles and engine.serves(model)
        ]
        return [engine for engine in healthy if not engine.is_unready] or healthy

    def _forget(self, now: float) -> None:
        for engine in tuple(self._engines.values()):
            is_kept = engine.is_static or engine.is_announced or engine.health.is_healthy
            if not is_kept and now - engine.health.since > self._forget_seconds:
                self.remove(engine.url)


def _check_printable(info: EngineInfo) -> None:
    # The id goes into a response header.
    if not (info.engine_id.isprintable() and info.url.isprintable()):
        raise ValueError(f"engine {info.engine_id!r} at {info.url!r} has unprintable characters")


def _describe(engine: Engine, info: EngineInfo, node_id: str) -> None:
    engine.engine_id = info.engine_id
    engine.node_id = node_id
    engine.model = info.model or engine.model
    engine.role = info.role
    if info.block_tokens > 0:
        engine.namespace_id = info.namespace_id
        engine.block_tokens = info.block_tokens
        engine.hash_scheme = info.hash_scheme
        if info.namespace_id is not None:
            kind = ChainKind(info.namespace_id, info.block_tokens, info.hash_scheme)
            if kind != engine.kind:
                engine.kind = kind
