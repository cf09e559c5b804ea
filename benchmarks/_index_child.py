"""Our indexes as children: `python -m benchmarks._index_child memory|python|naive`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from benchmarks._index_load import Adapter, Keys, Load
from benchmarks._workers import serve
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

    def stored(self, node: int, keys: Keys, parent: int | None) -> Callable[[], object]:
        return partial(self._index.apply_stored, Holder(node), Tier.DRAM, keys)

    def removed(self, node: int, keys: Keys) -> Callable[[], object]:
        return partial(self._index.apply_removed, Holder(node), Tier.DRAM, keys)

    def question(self, keys: Keys) -> Callable[[], dict[int, int]]:
        return lambda: {hit.holder: hit.hit_blocks for hit in self._index.query(keys)}

    def drain(self) -> None:
        pass  # each call returns when it is done


if __name__ == "__main__":
    warm_kernels()
    serve(Load(OurIndex(INDEXES[sys.argv[1]](MOST_BLOCKS))).verbs)
