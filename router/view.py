"""What the router asks of the index, so that any index (or none) can stand behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emberkv_proto.events import Keys
from emberkv_proto.types import EngineInfo, NodeHit, NodeId


class NodeView(Protocol):
    """A node as the index knows it."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def liveness(self) -> str:
        """ok, suspect, gone or removed."""
        ...

    @property
    def engines(self) -> tuple[EngineInfo, ...]: ...


class IndexView(Protocol):
    """Called on the router's event loop; neither call waits for anything."""

    def query(self, keys: Keys) -> Sequence[NodeHit]:
        """Per node with a hit, how many leading blocks of the chain it holds."""
        ...

    def nodes(self) -> Sequence[NodeView]: ...


class NoIndex:
    """Stands in when no index is configured: every request goes by load."""

    def query(self, keys: Keys) -> Sequence[NodeHit]:
        return ()

    def nodes(self) -> Sequence[NodeView]:
        return ()
