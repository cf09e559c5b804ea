"""The engine's own blocks: references, free queue, prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.engine.torch_engine.paged_kv import BlockPool
from emberkv_proto.types import BlockHash


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(4, keeps_prefixes=True)
    yield pool
    pool.check_integrity()


def fill(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.remember(block, block_hash(number))
    return blocks


def test_a_released_block_is_found_until_it_is_allocated_again(pool: BlockPool) -> None:
    blocks = fill(pool, 1, 2)
    pool.release(blocks)
    assert pool.match([block_hash(1), block_hash(2)]) == blocks
    pool.allocate(4)
    assert pool.match([block_hash(1)]) == []


def test_the_end_of_a_chain_is_the_first_victim(pool: BlockPool) -> None:
    blocks = fill(pool, 1, 2, 3)
    pool.release(blocks)
    pool.allocate(2)  # one never used, then the chain's last
    assert pool.match([block_hash(n) for n in (1, 2, 3)]) == blocks[:2]


def test_a_block_nobody_can_find_is_used_before_a_cached_one(pool: BlockPool) -> None:
    pool.release(fill(pool, 1, 2))
    plain = pool.allocate(2)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert len(pool.match([block_hash(1), block_hash(2)])) == 2


def test_a_touched_block_is_no_victim(pool: BlockPool) -> None:
    cached = fill(pool, 1)
    pool.release(cached)
    pool.touch(cached)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)
    assert cached[0] not in pool.allocate(3)


def test_a_hit_in_the_free_queue_does_not_count_as_room(pool: BlockPool) -> None:
    cached = fill(pool, 1, 2)
    pool.release(cached)
    assert pool.can_allocate(2, cached)
    assert not pool.can_allocate(3, cached)


def test_a_hole_ends_the_match(pool: BlockPool) -> None:
    fill(pool, 1, 3)
    assert len(pool.match([block_hash(1), block_hash(2), block_hash(3)])) == 1


def test_a_second_copy_of_known_content_is_not_findable(pool: BlockPool) -> None:
    first, second = fill(pool, 1)[0], fill(pool, 1)[0]
    assert pool.match([block_hash(1)]) == [first]
    pool.release([second])
    assert pool.match([block_hash(1)]) == [first]


def test_a_pool_without_prefix_cache_remembers_nothing() -> None:
    pool = BlockPool(2, keeps_prefixes=False)
    fill(pool, 1)
    assert pool.match([block_hash(1)]) == []
    pool.check_integrity()


def test_a_double_release_is_a_bug_and_says_so(pool: BlockPool) -> None:
    blocks = fill(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_references_and_hashes_add_up_after_any_history(steps: list[tuple[int, int]]) -> None:
    pool = BlockPool(6, keeps_prefixes=True)
    held: list[list[int]] = []
    for action, number in steps:
        if action == 0 and pool.can_allocate(number % 3 + 1):
            held.append(fill(pool, *(number * 3 + i for i in range(number % 3 + 1))))
        elif action == 1 and held:
            pool.release(held.pop(number % len(held)))
        elif action == 2:
            hit = pool.match([block_hash(number * 3 + i) for i in range(3)])
            pool.touch(hit)
            held.append(hit)
        pool.check_integrity()
        in_use = {block for blocks in held for block in blocks}
        assert pool.free_blocks == 6 - len(in_use)


def test_who_asks_is_told_of_every_block_that_can_be_found_no_longer() -> None:
    forgotten: list[BlockHash] = []
    pool = BlockPool(3, keeps_prefixes=True, on_forgotten=forgotten.append)
    first, second = BlockHash(bytes([1]) * 32), BlockHash(bytes([2]) * 32)
    blocks = pool.allocate(2)
    assert pool.remember(blocks[0], first)
    assert pool.remember(blocks[1], second)
    assert not pool.remember(blocks[1], second), "it is known already"
    pool.release(blocks)
    pool.release(pool.allocate(2))
    assert forgotten == [second], "the block that held nothing went first, then the chain's end"
    pool.allocate(3)
    assert forgotten == [second, first]
    pool.check_integrity()
