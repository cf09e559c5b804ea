"""Who watches the nodes, and what each watcher has not been told yet.

A watcher's debt is a set of node names, not a queue of messages: many changes of one node are one,
and a watcher that owes too much is told everything anew. So memory is bounded by construction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from client_sdk import aio
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import EngineInfo, Incarnation, NodeId
from global_index.ingest import Exactness
from global_index.membership import Liveness

MAX_WATCHERS = 64
MAX_OWED_NODES = 256
"""A watcher that has not been told of so many is given the whole picture instead."""

HEARTBEAT_SECONDS = 5.0
"""An empty change is sent after as long without one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What of a node watchers are told when it changes."""

    incarnation: Incarnation
    liveness: Liveness
    exactness: Exactness
    grpc_address: str
    engines: tuple[EngineInfo, ...]


@dataclass(frozen=True, slots=True)
class NodesChange:
    """Nodes to look at again, and nodes that are known no longer. Whole: all there are."""

    is_whole: bool
    changed: tuple[NodeId, ...]
    removed: tuple[NodeId, ...]


@dataclass(slots=True, eq=False)
class _Watcher:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    owes_all: bool = True
    owed: set[NodeId] = field(default_factory=set)


class NodeWatch:
    """Belongs to one event loop. `look` returns how all nodes stand; it is called only while
    somebody watches."""

    def __init__(
        self,
        look: Callable[[], Mapping[NodeId, Standing]],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._look = look
        self._heartbeat_seconds = heartbeat_seconds
        self._watchers: set[_Watcher] = set()
        self._last: dict[NodeId, Standing] = {}

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def notice(self) -> None:
        """Compare with the last time and note for each watcher what is new. O(nodes)."""
        if not self._watchers:
            return
        now = dict(self._look())
        changed = {node_id for node_id, new in now.items() if self._last.get(node_id) != new}
        changed |= self._last.keys() - now.keys()
        self._last = now
        if not changed:
            return
        for watcher in self._watchers:
            watcher.owed |= changed
            if len(watcher.owed) > MAX_OWED_NODES:
                watcher.owes_all = True
            watcher.wake.set()

    async def watch(self) -> AsyncGenerator[NodesChange, None]:
        """Yield the whole picture, then what changes, for ever. Close it (`aclosing`).

        Raises UnavailableError when MAX_WATCHERS watch already.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise UnavailableError(f"{MAX_WATCHERS} watch this index already")
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            self.notice()
            while True:
                yield self._settle(watcher)
                try:
                    async with aio.timeout(self._heartbeat_seconds):
                        await watcher.wake.wait()
                except (asyncio.TimeoutError, TimeoutError):
                    continue  # settles to an empty change
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._last = {}

    def check_integrity(self) -> None:
        assert len(self._watchers) <= MAX_WATCHERS
        for watcher in self._watchers:
            assert watcher.owes_all or len(watcher.owed) <= MAX_OWED_NODES
            assert watcher.wake.is_set() or watcher.owes_all or not watcher.owed, (
                "a watcher sleeps on what it is owed"
            )

    def _settle(self, watcher: _Watcher) -> NodesChange:
        owed, watcher.owed = watcher.owed, set()
        is_whole, watcher.owes_all = watcher.owes_all, False
        watcher.wake.clear()
        if is_whole:
            return NodesChange(True, tuple(self._last), ())
        known = self._last.keys()
        return NodesChange(False, tuple(sorted(owed & known)), tuple(sorted(owed - known)))
