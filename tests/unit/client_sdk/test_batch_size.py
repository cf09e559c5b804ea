"""Batches are as long as the pool, the blocks and the call's limit allow."""

from __future__ import annotations

import pytest

from client_sdk.batch_size import LEAST_BYTES, MOST_BYTES, batch_blocks

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("part_bytes", "pool_bytes", "whole"),
    [
        (64 * KIB, 64 * GIB, 128),
        (256 * KIB, 64 * GIB, 128),
        (4 * MIB, 64 * GIB, MOST_BYTES // (4 * MIB)),
        (4 * MIB, 640 * MIB, 5),
        (4 * MIB, 64 * MIB, LEAST_BYTES // (4 * MIB)),
        (100 * MIB, 64 * GIB, 1),
    ],
)
def test_a_batch_fits_the_pool_and_the_limit(part_bytes: int, pool_bytes: int, whole: int) -> None:
    assert batch_blocks(128, part_bytes, pool_bytes, False) == whole


def test_the_first_batch_is_short_where_that_leaves_several_blocks() -> None:
    assert batch_blocks(128, 64 * KIB, GIB, True) == 32
    assert batch_blocks(8, 64 * KIB, GIB, True) == 2
    assert batch_blocks(7, 64 * KIB, GIB, True) == 7
    assert batch_blocks(1, 64 * KIB, GIB, True) == 1
