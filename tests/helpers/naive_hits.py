"""What a hybrid model needs of a prefix, token by token: the oracle of `emberkv_proto.groups`."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv_proto.layout import Group, GroupKind


def is_needed(group: Group, block_tokens: int, length: int, block: int) -> bool:
    """Whether the group may look at any token of the block after a hit of `length` blocks."""
    end = length * block_tokens
    tokens = range(block * block_tokens, (block + 1) * block_tokens)
    if group.kind is GroupKind.SLIDING_WINDOW:
        return any(token >= end - group.window_tokens for token in tokens)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        chunk = group.window_tokens
        return any(token // chunk == end // chunk for token in tokens)
    if group.kind is GroupKind.MAMBA:
        return end - 1 in tokens
    return True


def longest_hit(groups: Sequence[Group], block_tokens: int, held: Sequence[Sequence[bool]]) -> int:
    """`held`: per group, whether it has each block."""
    return max(
        length
        for length in range(len(held[0]) + 1)
        if all(
            row[block] or not is_needed(group, block_tokens, length, block)
            for group, row in zip(groups, held, strict=True)
            for block in range(length)
        )
    )
