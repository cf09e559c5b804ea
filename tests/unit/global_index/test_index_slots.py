"""The memory index's hash table where it is crowded: beyond full buckets, and round its end."""

from __future__ import annotations

import numpy as np
import pytest

from emberkv_proto.buckets import KEY_MIX, bucket_numbers
from emberkv_proto.events import Keys
from emberkv_proto.types import Tier
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.kernels import MIN_SLOTS
from global_index.memory_index import MemoryIndex

pytestmark = pytest.mark.timeout(400)
"""The first run compiles the kernels."""

A, B = Holder(0), Holder(1)
UNMIX = pow(KEY_MIX, -1, 1 << 64)


def keys_homed_at(share: float, count: int, seed: int) -> Keys:
    """Keys whose home is this far along the table, whatever its size."""
    rng = np.random.default_rng(seed)
    first = min(int(share * 2**32), 2**32 - 4)
    mixed = [
        (first + int(tag)) << 32 | int(low)
        for tag, low in zip(rng.integers(0, 4, count), rng.integers(1, 1 << 32, count), strict=True)
    ]
    return np.array([word * UNMIX % 2**64 for word in mixed], np.uint64)


def assert_same(index: MemoryIndex, twin: BlockIndex, asked: Keys) -> None:
    index.check_integrity()
    for holder in (A, B):
        assert index.digest(holder, Tier.DRAM) == twin.digest(holder, Tier.DRAM)
        for bucket in sorted({*bucket_numbers(asked).tolist()}):
            found = index.bucket_keys(holder, Tier.DRAM, bucket)
            assert sorted(found) == sorted(twin.bucket_keys(holder, Tier.DRAM, bucket))
    assert sorted(index.query(asked)) == sorted(twin.query(asked))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_hundreds_of_keys_with_one_home_are_found_after_growth_and_removals(share: float) -> None:
    rng = np.random.default_rng(1)
    index, twin = MemoryIndex(100_000), DictIndex(100_000)
    crowd = keys_homed_at(share, 500, seed=2)
    others = rng.integers(1, 1 << 63, 4 * MIN_SLOTS, dtype=np.uint64)
    for table in (index, twin):
        table.apply_stored(A, Tier.DRAM, crowd)
        table.apply_stored(B, Tier.DRAM, crowd[::3])
    assert_same(index, twin, crowd)
    for part in np.split(others, 8):  # the table grows beneath them
        for table in (index, twin):
            table.apply_stored(A, Tier.DRAM, part)
        assert_same(index, twin, crowd)
    gone = rng.permutation(crowd)
    for part in (gone[:200], others[::2], gone[200:350]):
        for table in (index, twin):
            table.apply_removed(A, Tier.DRAM, part)
        assert_same(index, twin, crowd)
    for table in (index, twin):
        table.apply_stored(A, Tier.DRAM, crowd)
        table.apply_removed(B, Tier.DRAM, crowd)
    assert_same(index, twin, crowd)


@pytest.mark.parametrize("seed", range(6))
def test_churn_in_a_table_that_stays_as_full_as_it_gets_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = 2200
    index, twin = MemoryIndex(capacity), DictIndex(capacity)
    pool = np.concatenate(
        [
            rng.integers(1, 1 << 63, 3000, dtype=np.uint64),
            keys_homed_at(1.0, 300, seed),
            keys_homed_at(0.0, 300, seed),
        ]
    )
    for _ in range(40):
        stored, removed = rng.choice(pool, 400), rng.choice(pool, 150)
        for holder, tier in ((A, Tier.DRAM), (B, Tier.DRAM)):
            expected = twin.apply_stored(holder, tier, stored)
            assert index.apply_stored(holder, tier, stored) == expected
            expected = twin.apply_removed(holder, tier, removed)
            assert index.apply_removed(holder, tier, removed) == expected
        index.check_integrity()
    assert index.size().blocks == twin.size().blocks > capacity * 0.9
    assert_same(index, twin, pool)


def test_nothing_but_what_is_used_is_in_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    indexes = [MemoryIndex(1 << 24) for _ in range(4)]
    assert sum(index.size().table_bytes for index in indexes) < 1 << 20
    assert resident() - before < 64 << 20, "room for the capacity is only reserved"
