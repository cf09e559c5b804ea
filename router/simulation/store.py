"""One simulated node's blocks: what its store daemon would keep of what comes. Pure.

As the daemon does by default: the least recently used goes first, children before parents; what a
pull brought is a replica, and replicas beyond their share go before others, the oldest run from its
end, until they are used again here or were pulled often enough. One tier, and nothing is pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from emberkv_proto.errors import IntegrityError

RUNS_LOOKED_AT = 16
MAX_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """In blocks. `replica_share`, `pulls_to_keep` and `memory_seconds` as in the daemon's settings:
    peers.replica_share, .replicate_after_pulls and .replicate_seconds."""

    blocks: int
    replica_share: float = 0.5
    pulls_to_keep: int = 2
    memory_seconds: float = 600.0


@dataclass(slots=True)
class Changes:
    """Keys that came and went, as the daemon's events would tell. None of one is in the other."""

    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


class NodeStore:
    """Chains are given whole, root first. O(blocks) a call."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._blocks: OrderedDict[int, int | None] = OrderedDict()
        """Key -> its parent; least recently used first. A parent stands behind its children."""
        self._children: dict[int, int] = {}
        self._replicas: OrderedDict[int, None] = OrderedDict()
        """Those that shall go first, in that order."""
        self._pulls: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def replicas(self) -> int:
        return len(self._replicas)

    def hit_blocks(self, keys: Sequence[int]) -> int:
        """How many leading blocks of the chain are here."""
        blocks = self._blocks
        for at, key in enumerate(keys):
            if key not in blocks:
                return at
        return len(keys)

    def lend(self, keys: Sequence[int]) -> None:
        """Another node reads these leading blocks of a chain; all are here."""
        self._touch(keys)

    def serve(self, keys: Sequence[int], own: int, pulled: int, now: float) -> Changes:
        """A request used the first `own` blocks, brought `pulled` more, and computed the rest.

        Whatever of them is not here any more is brought or computed as well.
        """
        changes = Changes()
        for key in keys[:own]:
            self._replicas.pop(key, None)
        run = []
        for at, key in enumerate(keys):
            if key in self._blocks:
                continue
            parent = keys[at - 1] if at else None
            self._blocks[key] = parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            changes.stored.append(key)
            if own <= at < own + pulled and not self._is_wanted(key, now):
                run.append(key)
        self._replicas.update(dict.fromkeys(reversed(run)))
        self._touch(keys)
        self._make_room(changes)
        return changes

    def clear(self) -> None:
        """The node has lost everything."""
        for part in (self._blocks, self._children, self._replicas, self._pulls):
            part.clear()

    def keys(self) -> Iterable[int]:
        return self._blocks.keys()

    def check_integrity(self) -> None:
        assert len(self._blocks) <= self._limits.blocks, "more blocks than fit"
        assert self._replicas.keys() <= self._blocks.keys(), "a replica that is not here"
        children: dict[int, int] = {}
        for parent in self._blocks.values():
            if parent is not None:
                assert parent in self._blocks, "a block without its parent"
                children[parent] = children.get(parent, 0) + 1
        assert children == self._children, "children are miscounted"
        assert len(self._pulls) <= MAX_REMEMBERED

    def _touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the root last, so that it goes last
            self._blocks.move_to_end(key)

    def _is_wanted(self, key: int, now: float) -> bool:
        count, last = self._pulls.pop(key, (0, now))
        count = count + 1 if now - last <= self._limits.memory_seconds else 1
        self._pulls[key] = (count, now)
        if len(self._pulls) > MAX_REMEMBERED:
            self._pulls.popitem(last=False)
        return count >= self._limits.pulls_to_keep

    def _make_room(self, changes: Changes) -> None:
        removed: dict[int, None] = {}
        share = int(self._limits.replica_share * self._limits.blocks)
        while len(self._replicas) > share:
            victim = self._oldest_replica()
            if victim is None:
                break  # others build on all of them
            self._remove(victim, removed)
        while len(self._blocks) > self._limits.blocks:
            self._remove(next(iter(self._blocks)), removed)
        if removed:
            came = set(changes.stored)
            changes.stored = [key for key in changes.stored if key not in removed]
            changes.removed = [key for key in removed if key not in came]

    def _oldest_replica(self) -> int | None:
        for _, key in zip(range(RUNS_LOOKED_AT), self._replicas, strict=False):
            if key not in self._children:
                return key
        return None

    def _remove(self, key: int, removed: dict[int, None]) -> None:
        if key in self._children:
            raise IntegrityError("a block would leave before its children")
        parent = self._blocks.pop(key)
        self._replicas.pop(key, None)
        if parent is not None:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
        removed[key] = None
