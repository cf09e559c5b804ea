"""Keep what saves the most prefill time per byte: GreedyDual-Size-Frequency over KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from store_daemon.policies.base import NOWHERE, EvictionPolicy

if TYPE_CHECKING:
    from store_daemon.block import Block

EVEN_TOKENS = 50_000
"""Tokens of context at which a token's attention costs as much as all else of its layer.

For 80 layers of width 8192 and 70e9 weights: 140e9 operations a token against 2.6e6 for each token
of context.
"""


class CostPolicy(EvictionPolicy):
    """A block's rank is the age of the store plus what a hit on it is worth.

    Worth is its uses times the relative prefill time of its tokens, which grows with their
    position, for each byte. The age is the highest rank that went, so what is not used again sinks
    below what comes later (Cherkasova, HPL-98-69R1). One second of prefill counts alike in all
    namespaces, since the store does not know the models' speeds.
    """

    def __init__(self) -> None:
        self._age = 0.0

    def entered(self, block: Block) -> None:
        block.rank = self._age + _worth(block)

    def touched(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.lane != NOWHERE:
                block.rank = max(block.rank, self._age + _worth(block))

    def left(self, block: Block) -> None:
        self._age = max(self._age, block.rank)

    def order(self, block: Block) -> float:
        return block.rank

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        return heads[0]

    def check_integrity(self) -> None:
        assert self._age >= 0.0


def _worth(block: Block) -> float:
    own = block.namespace
    tokens = own.namespace.block_tokens
    seconds = tokens * (1.0 + block.depth * tokens / EVEN_TOKENS)
    return (1 + block.uses) * seconds / own.block_bytes
