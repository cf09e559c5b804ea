"""Buckets of a holder's rows, in every block index: exact, whatever lies beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import xor

import numpy as np
import pytest

from emberkv_proto.buckets import BUCKETS, bucket_numbers
from emberkv_proto.events import Keys
from emberkv_proto.types import BucketXors, Tier
from global_index.bucket_comparison import BucketComparison
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex

Make = Callable[[int], BlockIndex]


@pytest.fixture(params=[MemoryIndex, DictIndex, NaiveIndex])
def index(request: pytest.FixtureRequest) -> BlockIndex:
    make: Make = request.param
    return make(20_000)


def random_keys(seed: int, count: int) -> Keys:
    return np.random.default_rng(seed).integers(1, 2**64, count, np.uint64)


def by_bucket(keys: Keys) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(BUCKETS)]
    for key, bucket in zip(keys.tolist(), bucket_numbers(keys).tolist(), strict=True):
        found[bucket].add(key)
    return found


def fill(index: BlockIndex) -> Keys:
    """Holder 3's rows in SSD, amid others': in its DRAM, of one other, and of seven at once."""
    keys = random_keys(1, 700)
    index.apply_stored(Holder(3), Tier.SSD, keys)
    index.apply_stored(Holder(3), Tier.DRAM, random_keys(2, 300))
    index.apply_stored(Holder(9), Tier.SSD, random_keys(3, 300))
    for holder in range(10, 17):  # these blocks have bitmap rows
        index.apply_stored(Holder(holder), Tier.SSD, keys[:200])
    index.apply_removed(Holder(3), Tier.SSD, keys[150:250])
    return np.concatenate([keys[:150], keys[250:]])


def test_each_bucket_holds_just_the_rows_of_its_keys(index: BlockIndex) -> None:
    expected = by_bucket(fill(index))
    found = [index.bucket_keys(Holder(3), Tier.SSD, bucket) for bucket in range(BUCKETS)]
    assert [set(keys.tolist()) for keys in found] == expected
    assert sum(keys.size for keys in found) == sum(map(len, expected)), "a key is given twice"
    xors = [
        value
        for first in range(0, BUCKETS, 7)
        for value in index.bucket_xors(Holder(3), Tier.SSD, first, min(7, BUCKETS - first)).tolist()
    ]
    assert xors == [reduce(xor, keys, 0) for keys in expected]
    assert index.bucket_keys(Holder(4), Tier.SSD, 0).size == 0
    index.check_integrity()


def test_rows_pushed_past_the_end_of_the_table_are_found_in_its_last_bucket() -> None:
    index = MemoryIndex(20_000)
    pool = random_keys(5, 100_000)
    last = pool[bucket_numbers(pool) == BUCKETS - 1][:300]
    index.apply_stored(Holder(0), Tier.DRAM, last)  # far more than a 256th of the slots
    assert set(index.bucket_keys(Holder(0), Tier.DRAM, BUCKETS - 1).tolist()) == {*last.tolist()}
    assert index.bucket_keys(Holder(0), Tier.DRAM, 0).size == 0


def test_full_bucket_does_not_hide_its_neighbour() -> None:
    index = MemoryIndex(20_000)
    pool = random_keys(6, 100_000)
    numbers = bucket_numbers(pool)
    for bucket in (7, 8):
        index.apply_stored(Holder(bucket), Tier.DRAM, pool[numbers == bucket][:100])
    for bucket in (7, 8):
        found = index.bucket_keys(Holder(bucket), Tier.DRAM, bucket)
        assert set(found.tolist()) == set(pool[numbers == bucket][:100].tolist())


def test_comparison_names_the_buckets_that_differ_while_other_holders_change(
    index: BlockIndex,
) -> None:
    keys = fill(index)
    wrong = keys[[5, 77, 300]]
    xors = [reduce(xor, held, 0) for held in by_bucket(keys)]
    comparison = BucketComparison(index, Holder(3), (BucketXors(Tier.SSD, tuple(xors)),))
    index.apply_removed(Holder(3), Tier.SSD, wrong)
    other, steps = random_keys(8, 10_000), 0
    while comparison.step():  # the table grows and its entries move about
        index.apply_stored(Holder(20), Tier.SSD, other[40 * steps : 40 * steps + 40])
        index.apply_removed(Holder(20), Tier.SSD, other[40 * steps : 40 * steps + 20])
        steps += 1
    (choice,) = comparison.choices
    assert choice.tier is Tier.SSD
    assert choice.buckets == tuple(sorted(set(bucket_numbers(wrong).tolist())))


def test_comparison_of_equal_rows_names_nothing(index: BlockIndex) -> None:
    xors = tuple(reduce(xor, held, 0) for held in by_bucket(fill(index)))
    comparison = BucketComparison(index, Holder(3), (BucketXors(Tier.SSD, xors),))
    while comparison.step():
        pass
    assert comparison.choices == ()


def test_full_index_keeps_what_it_has_and_takes_new_blocks_when_others_go(
    index: BlockIndex,
) -> None:
    small = type(index)(1024)
    prefix, churn = random_keys(11, 200), random_keys(12, 3000)
    small.apply_stored(Holder(1), Tier.DRAM, prefix)
    dropped = 0
    for first in range(0, 3000, 100):
        dropped += small.apply_stored(Holder(2), Tier.DRAM, churn[first : first + 100]).dropped
        (hit,) = (hit for hit in small.query(prefix) if hit.holder == 1)
        assert hit.hit_blocks == 200, "a prefix that is only read was given up for new blocks"
    assert dropped == 3000 - (1024 - 200)
    small.apply_removed(Holder(2), Tier.DRAM, churn[:100])
    assert small.apply_stored(Holder(2), Tier.DRAM, churn[-50:]).changed == 50
    small.check_integrity()
