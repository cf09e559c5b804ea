"""Chains with holes, which an index made of prefixes answers wrong: right in every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from emberkv_proto.events import Keys
from emberkv_proto.types import Tier
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder, HolderHit
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex

pytestmark = pytest.mark.timeout(400)
"""The first run compiles the kernels."""

CHAIN: Keys = np.random.default_rng(11).integers(1, 1 << 63, 256, dtype=np.uint64)
HOLE = CHAIN[100:110]
ENGINE = Holder(7)


@pytest.fixture(params=[MemoryIndex, DictIndex, NaiveIndex])
def index(request: pytest.FixtureRequest) -> Iterator[BlockIndex]:
    make: Callable[[int], BlockIndex] = request.param
    index = make(10_000)
    yield index
    index.check_integrity()


@pytest.fixture(params=[1, 2], ids=["alone", "beside a whole chain"])
def others(request: pytest.FixtureRequest, index: BlockIndex) -> list[HolderHit]:
    """Hits of those who hold the whole chain all the time."""
    whole = [Holder(50 + n) for n in range(request.param - 1)]
    for holder in whole:
        index.apply_stored(holder, Tier.DRAM, CHAIN)
    return [HolderHit(holder, 256, 0, 256) for holder in whole]


def holders(index: BlockIndex, asked: Keys = CHAIN) -> list[HolderHit]:
    return sorted(index.query(asked), key=lambda hit: hit.holder)


def store(index: BlockIndex, holder: int, tier: Tier, *spans: Sequence[int]) -> None:
    for first, last in spans:
        index.apply_stored(Holder(holder), tier, CHAIN[first : last + 1])


def test_removed_blocks_end_the_run_before_them(index: BlockIndex, others: list[HolderHit]) -> None:
    store(index, 1, Tier.DRAM, (0, 255))
    index.apply_removed(Holder(1), Tier.DRAM, HOLE)
    assert holders(index) == [HolderHit(Holder(1), 100, 0, 100), *others]


@pytest.mark.parametrize("pieces", [1, 2, 10])
def test_blocks_stored_again_heal_the_run(
    index: BlockIndex, others: list[HolderHit], pieces: int
) -> None:
    store(index, 1, Tier.DRAM, (0, 255))
    index.apply_removed(Holder(1), Tier.DRAM, HOLE)
    for piece in np.split(HOLE, pieces)[::-1]:
        index.apply_stored(Holder(1), Tier.DRAM, piece)
    assert holders(index) == [HolderHit(Holder(1), 256, 0, 256), *others]


def test_a_hole_filled_in_another_tier_is_none(index: BlockIndex, others: list[HolderHit]) -> None:
    store(index, 1, Tier.DRAM, (0, 255))
    index.apply_removed(Holder(1), Tier.DRAM, HOLE)
    index.apply_stored(Holder(1), Tier.SSD, HOLE)
    assert holders(index) == [HolderHit(Holder(1), 256, 0, 246), *others]


def test_tiers_that_alternate_make_one_run_with_the_count_of_each(
    index: BlockIndex, others: list[HolderHit]
) -> None:
    store(index, 1, Tier.DRAM, (0, 9), (100, 179))
    store(index, 1, Tier.HBM, (10, 99))
    store(index, 1, Tier.SSD, (180, 255))
    (hit, *rest) = holders(index)
    assert hit == HolderHit(Holder(1), 256, 90, 90)
    assert hit.ssd_blocks == 76
    assert rest == others


def test_an_engines_run_alternates_between_its_memory_and_its_nodes(
    index: BlockIndex, others: list[HolderHit]
) -> None:
    index.set_base(ENGINE, Holder(1))
    store(index, 1, Tier.DRAM, (0, 9), (100, 179))
    store(index, 1, Tier.SSD, (180, 255))
    store(index, ENGINE, Tier.HBM, (10, 99), (170, 189))
    assert holders(index) == [
        HolderHit(Holder(1), 10, 0, 10),
        HolderHit(ENGINE, 256, 110, 80),
        *others,
    ]


def test_a_lost_head_leaves_no_hit_and_its_return_the_whole(
    index: BlockIndex, others: list[HolderHit]
) -> None:
    store(index, 1, Tier.SSD, (0, 255))
    index.apply_removed(Holder(1), Tier.SSD, CHAIN[:1])
    assert holders(index) == others
    assert holders(index, CHAIN[1:])[0] == HolderHit(Holder(1), 255, 0, 0)
    index.apply_stored(Holder(1), Tier.SSD, CHAIN[:1])
    assert holders(index)[0] == HolderHit(Holder(1), 256, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_holes_of_many_holders_are_theirs_alone(index: BlockIndex, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = []
    for holder in range(70):
        index.apply_stored(Holder(holder), Tier.DRAM, CHAIN)
    for holder in range(70):
        hole = int(rng.integers(1, 250))
        index.apply_removed(Holder(holder), Tier.DRAM, CHAIN[hole : hole + 5])
        expected.append(HolderHit(Holder(holder), hole, 0, hole))
    assert holders(index) == expected
