"""Events applied and chains queried by the Numba index, beside its pure-Python twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks._figure import Figure, Options, main, medians_seconds
from emberkv_proto.events import Keys
from emberkv_proto.types import Tier
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.memory_index import MemoryIndex, warm_kernels

BATCH = 1024
CHAIN_BLOCKS = 8192
HOLDERS = 4


def measure(options: Options) -> Sequence[Figure]:
    warm_kernels()
    blocks = 500_000 if options.quick else 5_000_000
    rng = np.random.default_rng(3)
    keys = rng.integers(1, 1 << 63, blocks, dtype=np.uint64)
    chain = keys[:CHAIN_BLOCKS].copy()
    indexes: list[BlockIndex] = [MemoryIndex(2 * blocks), DictIndex(2 * blocks)]
    for index in indexes:
        for start in range(0, blocks, BATCH):
            index.apply_stored(Holder(start // BATCH % 64), Tier.DRAM, keys[start : start + BATCH])
        for holder in range(HOLDERS):
            index.apply_stored(Holder(holder), Tier.DRAM, chain)
    repeats = options.repeats(60, 15)
    batches = [keys[start : start + BATCH] for start in range(0, 64 * BATCH, BATCH)]

    def apply(index: BlockIndex) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                index.apply_removed(Holder(70), Tier.SSD, batch)
                index.apply_stored(Holder(70), Tier.SSD, batch)

        return run

    def query(index: BlockIndex, asked: Keys) -> Callable[[], object]:
        return lambda: index.query(asked)

    fast, slow = medians_seconds([apply(index) for index in indexes], repeats)
    events = 2 * len(batches) * BATCH
    found, found_slowly = medians_seconds([query(index, chain) for index in indexes], repeats)
    return [
        Figure(
            "events_in_batches_of_1024",
            events / fast / 1e6,
            "M/s",
            "the pure-Python twin",
            events / slow / 1e6,
            repeats,
            at_least=2.0,
        ),
        Figure(
            f"query_{CHAIN_BLOCKS}_blocks_{HOLDERS}_holders",
            found * 1e6,
            "us",
            "the pure-Python twin",
            found_slowly * 1e6,
            repeats,
            at_most=0.5,
        ),
    ]


if __name__ == "__main__":
    main("index", measure)
