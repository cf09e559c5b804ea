"""The index as the simulated router sees it: the real one, told of changes, perhaps late."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from emberkv_proto.types import Tier
from global_index.index import Holder
from global_index.memory_index import MemoryIndex
from router.simulation.agenda import Agenda
from router.simulation.store import Changes

SPARE = 1.1
"""Room in the index beyond what all nodes can hold."""


class IndexFeed:
    """`blocks`: what all nodes can hold together. Events arrive in order, `delay_seconds` late."""

    def __init__(self, nodes: int, blocks: int, agenda: Agenda, delay_seconds: float) -> None:
        self._index = MemoryIndex(int(SPARE * blocks) + 1024)
        self._agenda = agenda
        self._delay_seconds = delay_seconds
        self._incarnations = [0] * nodes

    def tell(self, node: int, changes: Changes) -> None:
        """The node's daemon publishes what came and went."""
        if changes.stored or changes.removed:
            if self._delay_seconds:
                due = self._agenda.now + self._delay_seconds
                event = partial(self._apply, node, self._incarnations[node], changes)
                self._agenda.at(due, event)
            else:
                self._apply(node, self._incarnations[node], changes)

    def drop(self, node: int) -> None:
        """The node is known to be gone: its rows, and what it said that has not arrived."""
        self._incarnations[node] += 1
        self._index.remove_holder(Holder(node))

    def hits(self, keys: npt.NDArray[np.uint64]) -> dict[int, int]:
        """Leading blocks by node, of those that have any."""
        found = self._index.query(keys)
        return dict(zip(found.holders, found.hit_blocks, strict=True))

    def blocks(self, node: int) -> int:
        return self._index.digest(Holder(node), Tier.DRAM).blocks

    def check_integrity(self) -> None:
        self._index.check_integrity()

    def _apply(self, node: int, incarnation: int, changes: Changes) -> None:
        if incarnation != self._incarnations[node]:
            return  # of a life that is over
        if changes.removed:
            keys = np.array(changes.removed, np.uint64)
            self._index.apply_removed(Holder(node), Tier.DRAM, keys)
        if changes.stored:
            keys = np.array(changes.stored, np.uint64)
            self._index.apply_stored(Holder(node), Tier.DRAM, keys)
