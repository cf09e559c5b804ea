"""Any history of calls leaves every backend with the oracle's rows, runs and digests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from emberkv_proto.errors import IntegrityError
from emberkv_proto.types import IndexKey, Tier
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex

pytestmark = pytest.mark.timeout(300)
"""The first run compiles the kernels."""
CAPACITY = 900
HOLDERS = st.sampled_from([0, 1, 2, 3, 4, 5, 63, 64, 200]).map(Holder)
TIERS = st.sampled_from(list(Tier))
# Small numbers meet each other; a stride spreads them over the table and past its first growth.
RUNS = st.tuples(st.integers(0, 30), st.integers(0, 40)).map(
    lambda run: np.arange(run[0], run[0] + run[1], dtype=np.uint64)
)
BULKS = st.tuples(st.integers(1, 40), st.integers(1, 400)).map(
    lambda bulk: np.arange(bulk[1], dtype=np.uint64) * np.uint64(0x1000001) + np.uint64(bulk[0])
)
BASES = st.sampled_from([None, 0, 1, 63, 64])
KEYS = st.one_of(RUNS, RUNS, BULKS)


def _is_taken(index: BlockIndex, holder: Holder, base: Holder | None) -> bool:
    try:
        index.set_base(holder, base)
    except IntegrityError:
        return False
    return True


class IndexHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.oracle = NaiveIndex(CAPACITY)
        self.indexes: list[BlockIndex] = [MemoryIndex(CAPACITY), DictIndex(CAPACITY)]

    @rule(holder=HOLDERS, tier=TIERS, keys=KEYS)
    def store(self, holder: Holder, tier: Tier, keys: np.ndarray) -> None:
        expected = self.oracle.apply_stored(holder, tier, keys)
        for index in self.indexes:
            assert index.apply_stored(holder, tier, keys) == expected

    @rule(tier=TIERS, keys=RUNS)
    def store_on_many(self, tier: Tier, keys: np.ndarray) -> None:
        for holder in range(6):
            self.store(Holder(holder), tier, keys)

    @rule(holder=HOLDERS, tier=TIERS, keys=KEYS)
    def remove(self, holder: Holder, tier: Tier, keys: np.ndarray) -> None:
        expected = self.oracle.apply_removed(holder, tier, keys)
        for index in self.indexes:
            assert index.apply_removed(holder, tier, keys) == expected

    @rule(holder=HOLDERS, tier=TIERS)
    def clear(self, holder: Holder, tier: Tier) -> None:
        expected = self.oracle.clear_tier(holder, tier)
        for index in self.indexes:
            assert index.clear_tier(holder, tier) == expected

    @rule(holder=HOLDERS, budget=st.sampled_from([50, 10_000]))
    def remove_node(self, holder: Holder, budget: int) -> None:
        self.oracle.remove_holder(holder)
        for index in self.indexes:
            while not index.remove_holder(holder, budget):
                pass

    @rule(holder=HOLDERS, base=BASES)
    def set_base(self, holder: Holder, base: int | None) -> None:
        target = None if base is None else Holder(base)
        taken = {_is_taken(index, holder, target) for index in (self.oracle, *self.indexes)}
        assert len(taken) == 1

    @rule(keys=KEYS)
    def query(self, keys: np.ndarray) -> None:
        expected = sorted(self.oracle.query(keys), key=lambda hit: hit.holder)
        for index in self.indexes:
            assert sorted(index.query(keys), key=lambda hit: hit.holder) == expected

    @rule(key=st.integers(0, 70).map(IndexKey))
    def holdings(self, key: IndexKey) -> None:
        for index in self.indexes:
            assert index.holdings(key) == self.oracle.holdings(key)

    @invariant()
    def everything_adds_up(self) -> None:
        for index in self.indexes:
            index.check_integrity()
            assert index.size().blocks == self.oracle.size().blocks
            for holder in (0, 4, 63, 200):
                for tier in Tier:
                    assert index.digest(Holder(holder), tier) == self.oracle.digest(
                        Holder(holder), tier
                    )

    def teardown(self) -> None:
        for start in range(0, 30, 3):
            self.query(np.arange(start, 90, dtype=np.uint64))


@pytest.mark.slow
class TestIndexHistory(IndexHistory.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30)
