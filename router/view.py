"""What the router asks of the index, so that any index (or none) can stand behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emberkv_proto.events import Keys
from emberkv_proto.types import ChainHits, EngineInfo, NodeId, TierDigest


class NodeView(Protocol):
    """A node as the index knows it."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def liveness(self) -> str:
        """ok, suspect, gone or removed."""
        ...

    @property
    def grpc_address(self) -> str:
        """Where its daemon is asked; empty while it has not said."""
        ...

    @property
    def engines(self) -> tuple[EngineInfo, ...]: ...

    @property
    def exactness(self) -> str:
        """exact, or why its rows may differ from what it holds."""
        ...

    @property
    def reported_state(self) -> str: ...

    @property
    def tiers(self) -> tuple[TierDigest, ...]:
        """Rows as the index counts them; capacity and use as the node last reported them."""
        ...

    @property
    def lag_seconds(self) -> float:
        """Age of its newest event or report."""
        ...

    @property
    def dropped(self) -> int:
        """Rows refused because the index was full."""
        ...


class FoundEngine(Protocol):
    """An engine whose pod was found."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_ready(self) -> bool: ...


class IndexView(Protocol):
    """Called on the router's event loop."""

    def answer_now(self, keys: Keys) -> ChainHits | None:
        """As `answer`; None where it would have to wait."""
        ...

    async def answer(self, keys: Keys) -> ChainHits:
        """How many leading blocks of the chain each node and each engine has.

        Waits for nothing, but for an index in Redis some milliseconds at most.
        """
        ...

    def nodes(self) -> Sequence[NodeView]: ...

    def configured_engines(self) -> Sequence[tuple[NodeId, EngineInfo]]:
        """Engines that the index knows from its settings, and their nodes."""
        ...

    def discovered_engines(self) -> Sequence[FoundEngine]:
        """Engines that run in pods which the index found."""
        ...


class NoIndex:
    """Stands in when no index is configured: every request goes by load."""

    def answer_now(self, keys: Keys) -> ChainHits | None:
        return ChainHits()

    async def answer(self, keys: Keys) -> ChainHits:
        return ChainHits()

    def nodes(self) -> Sequence[NodeView]:
        return ()

    def configured_engines(self) -> Sequence[tuple[NodeId, EngineInfo]]:
        return ()

    def discovered_engines(self) -> Sequence[FoundEngine]:
        return ()
