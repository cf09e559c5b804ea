"""Blocks are copied in pieces that are not too large; what a driver cannot copy goes beside."""

from __future__ import annotations

import numpy as np
import pytest

from client_sdk.attached_pool import AttachedPool
from client_sdk.engine.vllm_connector.pieces import Piece, pieces
from tests.helpers.anonymous_pool import AnonymousPool

PART = 4096
BLOCKS = [2, 3, 5, 6, 7, 9]
OFFSETS = [0, PART, 5 * PART, 3 * PART, 2 * PART, 4 * PART]


def fresh_pool() -> AttachedPool:
    with AnonymousPool(8 * PART) as memory:
        return AttachedPool(memory.descriptor, 8 * PART, PART)


def cut(pool: AttachedPool, split: set[int], most_blocks: int) -> list[Piece]:
    return list(pieces(pool, BLOCKS, OFFSETS, split.__contains__, most_blocks))


def test_all_blocks_are_in_one_piece_each_and_no_piece_is_too_large() -> None:
    pool = fresh_pool()
    for most_blocks in (1, 4, 6, 100):
        found = cut(pool, set(), most_blocks)
        assert [block for piece in found for block in piece.blocks] == BLOCKS
        assert [offset for piece in found for offset in piece.slots.offsets] == OFFSETS
        assert max(len(piece.blocks) for piece in found) == min(most_blocks, len(BLOCKS))
        assert all(piece.slots.memory is pool.mapping.array for piece in found)


@pytest.mark.parametrize("split", [{0}, {5 * PART}, {4 * PART}, {PART, 5 * PART}, set(OFFSETS)])
def test_what_cannot_be_copied_in_place_is_a_piece_beside_the_pool(split: set[int]) -> None:
    pool = fresh_pool()
    pool.mapping.array[:] = np.repeat(np.arange(8, dtype=np.uint8), PART)
    found = cut(pool, split, 100)
    assert [block for piece in found for block in piece.blocks] == BLOCKS
    beside = [piece for piece in found if piece.is_beside]
    assert {piece.offsets[0] for piece in beside} == split
    for piece in beside:
        assert len(piece.blocks) == 1
        number = piece.offsets[0] // PART
        piece.fetch(pool)
        assert piece.slots.memory.tolist() == [number] * PART
        piece.slots.memory[:] = 100 + number
        assert (pool.mapping.array[number * PART : (number + 1) * PART] == number).all()
        piece.store(pool)
        assert (pool.mapping.array[number * PART : (number + 1) * PART] == 100 + number).all()
    changed = {offset // PART for offset in split}
    others = [number for number in range(8) if number not in changed]
    assert all((pool.mapping.array[n * PART : (n + 1) * PART] == n).all() for n in others)


def test_no_blocks_are_no_pieces() -> None:
    assert list(pieces(fresh_pool(), [], [], lambda offset: False, 0)) == []
