"""How many blocks puts and gets ask for at a time. Pure."""

from __future__ import annotations

LEAST_BYTES, MOST_BYTES = 16 << 20, 32 << 20
POOL_SHARE = 32
"""A batch takes no more than one part in so many of the pool, but always LEAST_BYTES."""
SHORT_BATCH = 4
"""The first batch is one part in so many of a whole one, so that its copy begins soon."""


def batch_blocks(most_blocks: int, part_bytes: int, pool_bytes: int, is_first: bool) -> int:
    """At least one, at most `most_blocks`.

    Long enough that its messages cost little beside its copy, after which nothing that they need is
    in a cache any more; short enough that little of a small pool is held back from eviction.
    """
    most_bytes = min(max(pool_bytes // POOL_SHARE, LEAST_BYTES), MOST_BYTES)
    whole = max(1, min(most_blocks, most_bytes // part_bytes))
    return whole // SHORT_BATCH if is_first and whole >= 2 * SHORT_BATCH else whole
