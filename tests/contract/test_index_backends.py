"""One suite for every block index; each test ends in check_integrity()."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from emberkv_proto.errors import IntegrityError
from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier
from global_index.dict_index import DictIndex
from global_index.index import MAX_HOLDERS, Applied, BlockIndex, Holder, Holding
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex

pytestmark = pytest.mark.timeout(400)
"""The first run compiles the kernels."""

Make = Callable[[int], BlockIndex]
A, B, C = Holder(0), Holder(1), Holder(8191)


def keys(*numbers: int) -> Keys:
    return np.array(numbers, dtype=np.uint64)


def chain(start: int, stop: int) -> Keys:
    return np.arange(start, stop, dtype=np.uint64)


@pytest.fixture(params=[MemoryIndex, DictIndex, NaiveIndex])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def index(make: Make) -> Iterator[BlockIndex]:
    index = make(10_000)
    yield index
    index.check_integrity()


def hits(index: BlockIndex, chain: Keys) -> dict[int, tuple[int, int, int, int]]:
    found = index.query(chain)
    assert len({hit.holder for hit in found}) == len(found), "a holder is reported twice"
    return {h.holder: (h.hit_blocks, h.hbm_blocks, h.dram_blocks, h.ssd_blocks) for h in found}


def test_empty_index_and_empty_chain_hit_nothing(index: BlockIndex) -> None:
    assert hits(index, chain(1, 100)) == {}
    assert hits(index, keys()) == {}
    assert index.apply_stored(A, Tier.DRAM, keys()) == Applied(0, 0, 0)


def test_run_ends_at_the_first_missing_block_of_each_holder(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.DRAM, chain(1, 11))
    index.apply_stored(B, Tier.SSD, chain(1, 6))
    index.apply_stored(C, Tier.DRAM, chain(2, 11))
    assert hits(index, chain(1, 21)) == {A: (10, 0, 10, 0), B: (5, 0, 0, 5)}


def test_hole_cuts_the_run_and_refilling_it_heals_the_run(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.DRAM, chain(1, 257))
    index.apply_removed(A, Tier.DRAM, chain(101, 111))
    assert hits(index, chain(1, 257)) == {A: (100, 0, 100, 0)}
    index.apply_stored(A, Tier.DRAM, chain(101, 111))
    assert hits(index, chain(1, 257)) == {A: (256, 0, 256, 0)}


def test_tiers_may_alternate_along_a_run_and_the_fastest_counts(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.DRAM, chain(1, 11))
    index.apply_stored(A, Tier.SSD, chain(11, 101))
    index.apply_stored(A, Tier.DRAM, chain(101, 257))
    index.apply_stored(A, Tier.SSD, chain(1, 6))
    index.apply_stored(A, Tier.HBM, chain(4, 7))
    assert hits(index, chain(1, 300)) == {A: (256, 3, 163, 90)}
    assert index.holdings(IndexKey(4)) == (Holding(A, (Tier.HBM, Tier.DRAM, Tier.SSD)),)


def test_loss_of_the_head_alone_loses_the_whole_run(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.SSD, chain(1, 161))
    index.apply_removed(A, Tier.SSD, keys(1))
    assert hits(index, chain(1, 161)) == {}


def test_storing_twice_and_removing_the_absent_change_nothing(index: BlockIndex) -> None:
    assert index.apply_stored(A, Tier.DRAM, keys(1, 2, 2)) == Applied(2, 1, 0)
    assert index.apply_stored(A, Tier.DRAM, keys(1, 3)) == Applied(1, 1, 0)
    assert index.apply_removed(A, Tier.SSD, keys(1)) == Applied(0, 1, 0)
    assert index.apply_removed(B, Tier.DRAM, keys(1)) == Applied(0, 1, 0)
    assert index.apply_removed(A, Tier.DRAM, keys(9, 1, 1)) == Applied(1, 2, 0)
    assert index.digest(A, Tier.DRAM).blocks == 2
    assert index.digest(A, Tier.DRAM).xor == 2 ^ 3


def test_key_zero_names_no_block(index: BlockIndex) -> None:
    assert index.apply_stored(A, Tier.DRAM, keys(0, 1)) == Applied(1, 1, 0)
    assert index.apply_removed(A, Tier.DRAM, keys(0)) == Applied(0, 1, 0)
    assert hits(index, keys(0, 1)) == {}
    assert hits(index, keys(1, 0, 1)) == {A: (1, 0, 1, 0)}
    assert index.holdings(IndexKey(0)) == ()


def test_removing_key_zero_beside_other_keys_removes_none(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.DRAM, chain(1, 9))
    index.apply_removed(A, Tier.DRAM, keys(4, 6))  # what stood there is free now
    assert index.apply_removed(A, Tier.DRAM, keys(3, 0, 5, 0, 7, 0)) == Applied(3, 3, 0)
    assert index.apply_stored(A, Tier.DRAM, keys(1, 0, 2, 0)) == Applied(0, 4, 0)
    assert hits(index, chain(1, 9)) == {A: (2, 0, 2, 0)}


def test_digests_follow_rows_through_all_ways_of_removal(index: BlockIndex) -> None:
    numbers = [int(n) for n in np.random.default_rng(7).integers(1, 2**63, 500)]
    index.apply_stored(A, Tier.DRAM, keys(*numbers))
    index.apply_stored(A, Tier.SSD, keys(*numbers[:100]))
    expected = 0
    for number in numbers[:100]:
        expected ^= number
    assert index.digest(A, Tier.SSD).xor == expected
    assert index.clear_tier(A, Tier.DRAM) == 500
    assert index.clear_tier(A, Tier.DRAM) == 0
    assert (index.digest(A, Tier.DRAM).blocks, index.digest(A, Tier.DRAM).xor) == (0, 0)
    assert index.digest(A, Tier.SSD).xor == expected
    assert index.size().blocks == 100


@pytest.mark.parametrize("holders", [4, 5, 64, 65, 130])
def test_any_number_of_holders_of_a_block_gives_exact_runs(index: BlockIndex, holders: int) -> None:
    for holder in range(holders):
        index.apply_stored(Holder(holder), Tier.DRAM, chain(1, 2 + holder % 40))
        index.apply_stored(Holder(holder), Tier.SSD, chain(2 + holder % 40, 5 + holder % 40))
    expected = {h: (4 + h % 40, 0, 1 + h % 40, 3) for h in range(holders)}
    assert hits(index, chain(1, 100)) == expected
    for holder in range(0, holders, 2):
        assert index.remove_holder(Holder(holder))
    odd = {holder: hit for holder, hit in expected.items() if holder % 2}
    assert hits(index, chain(1, 100)) == odd
    for holder in range(1, holders, 2):
        assert index.remove_holder(Holder(holder))
    assert index.size().blocks == 0


def test_many_holders_with_holes_and_changing_tiers_stay_exact(index: BlockIndex) -> None:
    for holder in range(70):
        for block in range(1, 60):
            if (block * 7 + holder) % 61:
                tier = Tier(1 + (block // (1 + holder % 5)) % 3)
                index.apply_stored(Holder(holder), tier, keys(block))
    oracle = NaiveIndex(10_000)
    for holder in range(70):
        for block in range(1, 60):
            if (block * 7 + holder) % 61:
                tier = Tier(1 + (block // (1 + holder % 5)) % 3)
                oracle.apply_stored(Holder(holder), tier, keys(block))
    assert hits(index, chain(1, 80)) == hits(oracle, chain(1, 80))


def test_new_blocks_beyond_capacity_are_dropped_and_counted(make: Make) -> None:
    index = make(1500)
    assert index.apply_stored(A, Tier.DRAM, chain(1, 1501)) == Applied(1500, 0, 0)
    assert index.apply_stored(B, Tier.DRAM, chain(1499, 1503)) == Applied(2, 0, 2)
    assert index.size().blocks == index.size().capacity_blocks == 1500
    assert hits(index, chain(1499, 1510)) == {A: (2, 0, 2, 0), B: (2, 0, 2, 0)}
    index.apply_removed(A, Tier.DRAM, keys(1))
    assert index.apply_stored(B, Tier.DRAM, keys(1501, 1502)) == Applied(1, 0, 1)
    index.check_integrity()


@pytest.mark.parametrize("others", [1, 9])
def test_rows_lists_what_one_holder_has_in_one_tier(index: BlockIndex, others: int) -> None:
    for other in range(1, 1 + others):
        index.apply_stored(Holder(other), Tier.DRAM, chain(40, 700))
    index.apply_stored(A, Tier.DRAM, chain(1, 601))
    index.apply_stored(A, Tier.SSD, chain(500, 520))
    index.apply_removed(A, Tier.DRAM, chain(100, 200))
    expected = [*range(1, 100), *range(200, 601)]
    assert sorted(index.rows(A, Tier.DRAM).tolist()) == expected
    assert sorted(index.rows(A, Tier.SSD).tolist()) == [*range(500, 520)]
    assert index.rows(A, Tier.HBM).size == index.rows(C, Tier.DRAM).size == 0


def test_growth_keeps_every_row(index: BlockIndex) -> None:
    numbers = np.random.default_rng(1).integers(1, 2**63, 6000).astype(np.uint64)
    for start in range(0, len(numbers), 500):
        index.apply_stored(A, Tier.DRAM, numbers[start : start + 500])
        index.apply_stored(B, Tier.SSD, numbers[: start + 500])
    assert hits(index, numbers) == {A: (6000, 0, 6000, 0), B: (6000, 0, 0, 6000)}


def test_removing_a_holder_in_pieces_ends_with_none_of_its_rows(index: BlockIndex) -> None:
    index.apply_stored(A, Tier.DRAM, chain(1, 3001))
    index.apply_stored(A, Tier.SSD, chain(1000, 2000))
    index.apply_stored(B, Tier.DRAM, chain(1, 4001))
    pieces = 1
    while not index.remove_holder(A, budget_slots=100):
        # other calls come between and move entries about
        index.apply_removed(B, Tier.DRAM, chain(1 + 40 * pieces, 21 + 40 * pieces))
        pieces += 1
        assert pieces < 10_000
    assert [index.digest(A, tier).blocks for tier in Tier] == [0, 0, 0]
    assert A not in hits(index, chain(1, 4001))
    assert index.remove_holder(A)


def test_churn_returns_to_where_it_began(make: Make) -> None:
    index = make(10_000)
    index.apply_stored(A, Tier.DRAM, chain(1, 101))
    before = index.size()
    for round_ in range(50):
        holder = Holder(1 + round_ % 60)
        index.apply_stored(holder, Tier.DRAM, chain(50, 550))
        index.apply_removed(holder, Tier.DRAM, chain(50, 300))
        assert index.remove_holder(holder)
    assert index.size().blocks == before.blocks
    assert index.size().table_bytes <= 3 * before.table_bytes
    assert hits(index, chain(1, 600)) == {A: (100, 0, 100, 0)}
    index.check_integrity()


def test_read_only_keys_of_the_wire_are_taken(index: BlockIndex) -> None:
    wire = np.frombuffer(chain(1, 9).tobytes(), dtype="<u8")
    assert index.apply_stored(A, Tier.DRAM, wire).changed == 8
    assert hits(index, wire) == {A: (8, 0, 8, 0)}
    unaligned = np.frombuffer(b"x" + chain(1, 9).tobytes(), dtype="<u8", offset=1)
    assert hits(index, unaligned) == {A: (8, 0, 8, 0)}
    assert index.apply_removed(A, Tier.DRAM, wire).changed == 8


def test_highest_holder_number_works_like_the_lowest(index: BlockIndex) -> None:
    assert MAX_HOLDERS - 1 == C
    for holder in (*range(5), C):
        index.apply_stored(Holder(holder), Tier.DRAM, chain(1, 5))
    assert hits(index, chain(1, 9))[C] == (4, 0, 4, 0)
    assert [holding.holder for holding in index.holdings(IndexKey(1))] == [0, 1, 2, 3, 4, C]
    assert index.remove_holder(C)
    assert C not in hits(index, chain(1, 9))


def test_engine_counts_what_its_node_has_block_by_block(index: BlockIndex) -> None:
    node, engine, other = A, B, C
    index.set_base(engine, node)
    index.set_base(other, node)
    index.apply_stored(node, Tier.DRAM, chain(1, 11))
    index.apply_stored(node, Tier.SSD, chain(21, 31))
    index.apply_stored(engine, Tier.HBM, chain(5, 26))
    expected = {node: (10, 0, 10, 0), engine: (30, 21, 4, 5), other: (10, 0, 10, 0)}
    assert hits(index, chain(1, 100)) == expected
    assert index.digest(engine, Tier.HBM).blocks == 21
    assert index.clear_tier(engine, Tier.HBM) == 21
    assert hits(index, chain(1, 100)) == dict.fromkeys((node, engine, other), (10, 0, 10, 0))


def test_engine_is_named_when_only_one_of_the_two_has_the_first_block(index: BlockIndex) -> None:
    node, engine, cold = A, B, C
    index.set_base(engine, node)
    index.set_base(cold, node)
    index.apply_stored(engine, Tier.HBM, chain(1, 4))
    index.apply_stored(node, Tier.SSD, chain(4, 9))
    assert hits(index, chain(1, 20)) == {engine: (8, 3, 0, 5)}
    assert hits(index, chain(4, 20)) == dict.fromkeys((node, engine, cold), (5, 0, 0, 5))
    index.set_base(engine, None)
    assert hits(index, chain(1, 20)) == {engine: (3, 3, 0, 0)}


def test_base_without_a_block_beyond_all_other_numbers_changes_nothing(index: BlockIndex) -> None:
    for holder in range(6):
        index.apply_stored(Holder(holder), Tier.DRAM, chain(1, 9 - holder))
    index.set_base(A, Holder(MAX_HOLDERS - 1))
    assert hits(index, chain(1, 20)) == {h: (8 - h, 0, 8 - h, 0) for h in range(6)}


def test_base_may_change_and_has_none_itself(index: BlockIndex) -> None:
    old, new, engine = A, B, C
    index.apply_stored(old, Tier.DRAM, chain(1, 3))
    index.apply_stored(new, Tier.DRAM, chain(1, 9))
    index.set_base(engine, old)
    index.set_base(engine, new)
    assert hits(index, chain(1, 20))[engine] == (8, 0, 8, 0)
    for holder, base in ((engine, engine), (Holder(5), engine), (new, old)):
        with pytest.raises(IntegrityError):
            index.set_base(holder, base)
    assert hits(index, chain(1, 20))[engine] == (8, 0, 8, 0)


@pytest.mark.parametrize("gone", [A, B])
def test_removed_holder_has_no_links_left(index: BlockIndex, gone: Holder) -> None:
    node, engine = A, B
    index.set_base(engine, node)
    index.apply_stored(node, Tier.DRAM, chain(1, 5))
    index.apply_stored(engine, Tier.HBM, chain(1, 5))
    while not index.remove_holder(gone, budget_slots=50):
        pass
    index.apply_stored(gone, Tier.SSD, chain(1, 9))
    left = engine if gone == node else node
    assert hits(index, chain(1, 9))[gone] == (8, 0, 0, 8)
    assert hits(index, chain(1, 9))[left][0] == 4
    index.set_base(node, engine)  # neither is a base any more


@pytest.mark.parametrize("nodes", [1, 3, 40, 70])
def test_many_engines_on_many_nodes_stay_exact(index: BlockIndex, nodes: int) -> None:
    oracle = NaiveIndex(10_000)
    rng = np.random.default_rng(nodes)
    for backend in (index, oracle):
        for node in range(nodes):
            for engine in range(node % 4):
                backend.set_base(Holder(100 + 4 * node + engine), Holder(node))
    for _ in range(60 + 12 * nodes):
        node = int(rng.integers(nodes))
        engine = 100 + 4 * node + int(rng.integers(4))
        first, length = int(rng.integers(1, 60)), int(rng.integers(1, 40))
        holder = Holder(node if rng.random() < 0.6 else engine)
        tier = Tier(int(rng.integers(1, 4)))
        for backend in (index, oracle):
            backend.apply_stored(holder, tier, chain(first, first + length))
            backend.apply_removed(holder, tier, chain(first + 3, first + 4))
    for first in range(1, 60, 5):
        assert hits(index, chain(first, 110)) == hits(oracle, chain(first, 110))
