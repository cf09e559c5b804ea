"""Which parts a hit needs, and whether they can be read. Pure.

In most namespaces every part of every block. In one with window or state groups what is needed
depends on the hit's length, so a hit cannot be cut shorter without asking again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from emberkv_proto.groups import WHOLE_PREFIX, needed_from, usable_blocks
from emberkv_proto.layout import Namespace

if TYPE_CHECKING:
    from store_daemon.block import Block


@dataclass(frozen=True, slots=True)
class Needs:
    """Of part `p`, the blocks from number `starts[p]` on."""

    starts: tuple[int, ...]
    is_divisible: bool
    """Whether every block is needed whole; then each shorter hit is usable as well."""

    @staticmethod
    def of(namespace: Namespace, length: int) -> Needs:
        """What a hit of `length` blocks needs."""
        starts = tuple(
            needed_from(group, namespace.block_tokens, length)
            for group in namespace.groups
            for _ in range(namespace.shards)
        )
        return Needs(starts, not any(starts))

    @staticmethod
    def everything(namespace: Namespace) -> Needs:
        return Needs((0,) * namespace.parts, True)

    def parts(self, number: int) -> list[int]:
        """Parts of block `number` that the hit needs."""
        return [part for part, start in enumerate(self.starts) if number >= start]

    def count_readable(self, blocks: Sequence[Block | None], start: int) -> int:
        """How many leading blocks are readable, when the first `start` are known to be."""
        number = start
        if self.is_divisible:  # without a call for each block of a long prefix
            for block in islice(blocks, start, None):
                if (
                    block is None
                    or not (block.in_dram and block.is_verified)
                    or None in block.slots
                ):
                    break
                number += 1
            return number
        while (
            number < len(blocks)
            and (block := blocks[number]) is not None
            and self.are_readable(block, number)
        ):
            number += 1
        return number

    def are_readable(self, block: Block, number: int) -> bool:
        """Whether they are in DRAM and verified."""
        if self.is_divisible:
            return block.in_dram and block.is_verified and all(block.slots)
        parts = self.parts(number)
        return not parts or (
            block.is_verified
            and not block.is_doomed
            and all(block.slots[part] is not None for part in parts)
        )


def required_parts(namespace: Namespace) -> tuple[int, ...]:
    """Parts without which a block is resident nowhere: those of the groups that need every block.

    Where there is no such group, all parts.
    """
    parts = range(namespace.parts)
    groups = namespace.groups
    whole = tuple(p for p in parts if groups[p // namespace.shards].kind in WHOLE_PREFIX)
    return whole or tuple(parts)


def longest_hit(namespace: Namespace, held: Sequence[Sequence[bool]]) -> int:
    """Blocks of the longest usable hit; `held` says of each block which parts are there."""
    shards = namespace.shards
    groups = range(0, namespace.parts, shards)
    rows = [[all(parts[first : first + shards]) for parts in held] for first in groups]
    return usable_blocks(namespace.groups, namespace.block_tokens, rows)
