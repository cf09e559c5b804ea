"""Our indexes as children: `python -m benchmarks._index_child memory|python|naive`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks._index_load import Adapter, Keys, Load
from benchmarks._workers import serve
from emberkv_proto.events import BlocksRemoved, BlocksStored, merged
from emberkv_proto.types import Tier
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.memory_index import MemoryIndex, warm_kernels
from global_index.naive_index import NaiveIndex

MOST_BLOCKS = 1 << 24
INDEXES: dict[str, Callable[[int], BlockIndex]] = {
    "memory": MemoryIndex,
    "python": DictIndex,
    "naive": NaiveIndex,
}


class OurIndex(Adapter):
    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    def stored(self, keys: Keys, parent: int | None) -> BlocksStored:
        return BlocksStored(Tier.DRAM, keys)

    def removed(self, keys: Keys) -> BlocksRemoved:
        return BlocksRemoved(Tier.DRAM, keys)

    def tell(
        self, node: int, events: Sequence[BlocksStored | BlocksRemoved]
    ) -> Callable[[], object]:
        if len(events) > 1:
            return partial(self._apply, Holder(node), events)
        is_stored = isinstance(events[0], BlocksStored)
        change = self._index.apply_stored if is_stored else self._index.apply_removed
        return partial(change, Holder(node), events[0].tier, events[0].keys)

    def _apply(self, holder: Holder, events: Sequence[BlocksStored | BlocksRemoved]) -> None:
        """As `NodeDirectory` does."""
        for event in merged(events):
            match event:
                case BlocksStored(tier, keys):
                    self._index.apply_stored(holder, tier, keys)
                case BlocksRemoved(tier, keys):
                    self._index.apply_removed(holder, tier, keys)

    def question(self, keys: Keys) -> Callable[[], dict[int, int]]:
        def ask() -> dict[int, int]:
            found = self._index.query(keys)
            return dict(zip(found.holders, found.hit_blocks, strict=True))

        return ask

    def drain(self) -> None:
        pass  # each call returns when it is done


if __name__ == "__main__":
    warm_kernels()
    serve(Load(OurIndex(INDEXES[sys.argv[1]](MOST_BLOCKS))).verbs)
