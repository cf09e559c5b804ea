"""How much of a prefix a hybrid model can use. Pure; the daemon and the router share it.

A full, mla or cross group reads every earlier block, a window group the last few, a state group
only the state at the end. Whatever a group needs of a hit is a suffix of the hit's blocks, so one
number says it: the first needed block.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.layout import Group, GroupKind

WHOLE_PREFIX = frozenset({GroupKind.FULL, GroupKind.MLA, GroupKind.CROSS})
"""Kinds that need every block of a hit."""


def needed_from(group: Group, block_tokens: int, length: int) -> int:
    """First block that a hit of `length` blocks needs of the group; it needs all from there on.

    In 0..length; `length` when it needs none (a chunk that begins just there). Never falls as
    `length` grows.
    """
    tokens = length * block_tokens
    match group.kind:
        case GroupKind.FULL | GroupKind.MLA | GroupKind.CROSS:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(0, tokens - group.window_tokens) // block_tokens
        case GroupKind.CHUNKED_LOCAL:
            return tokens // group.window_tokens * group.window_tokens // block_tokens
        case GroupKind.MAMBA:
            return max(0, length - 1)


def usable_blocks(
    groups: Sequence[Group], block_tokens: int, held: Sequence[Sequence[bool]]
) -> int:
    """Blocks of the longest usable hit. O(groups x blocks).

    Args:
        held: per group, for each block of the chain, whether all its shards are there.

    Raises:
        InvalidRequestError: not one row for each group, or rows of different lengths.
    """
    lengths = {len(row) for row in held}
    if not groups or len(held) != len(groups) or len(lengths) != 1:
        raise InvalidRequestError(
            f"{len(held)} rows of {len(lengths)} lengths for {len(groups)} groups"
        )
    longest = lengths.pop()
    for group, row in zip(groups, held, strict=True):
        if group.kind in WHOLE_PREFIX:
            longest = min(longest, _leading(row))
    partial = [
        (group, _runs(row[:longest]))
        for group, row in zip(groups, held, strict=True)
        if group.kind not in WHOLE_PREFIX
    ]
    for length in range(longest, 0, -1):
        if all(
            runs[length] >= length - needed_from(group, block_tokens, length)
            for group, runs in partial
        ):
            return length
    return 0


def _leading(row: Sequence[bool]) -> int:
    return next((number for number, is_held in enumerate(row) if not is_held), len(row))


def _runs(row: Sequence[bool]) -> list[int]:
    """For each length 0..len(row), how many blocks in a row are held just before it."""
    runs = [0]
    for is_held in row:
        runs.append(runs[-1] + 1 if is_held else 0)
    return runs
