"""What an eviction policy is: it ranks blocks and chooses between the heads of a few lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store_daemon.block import Block


class EvictionPolicy:
    """Three calls tell it what happens, two ask it for an order.

    The queue keeps those blocks that may go at all in one heap for each lane, and shows the policy
    the heads. A policy writes `block.lane`, `block.rank` and `block.uses`, and nothing else of a
    block. A block's rank never falls while it stays in its lane. All calls are O(1).
    """

    lanes = 1
    is_by_access = False
    """Whether it is one lane in the order of `access`, and chooses its head."""

    def entered(self, block: Block) -> None:
        """The block takes room in DRAM from now on. Its `uses` are 0."""

    def touched(self, blocks: Sequence[Block]) -> None:
        """The blocks were asked for; `access` and `uses` say so already. Some may be elsewhere
        than in DRAM: their lane is `NOWHERE`."""

    def left(self, block: Block) -> None:
        """The block takes no room in DRAM any more."""

    def order(self, block: Block) -> float:
        """Its place in its lane; the smallest goes first."""
        return block.access

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        """The head that goes next, at least one of them being a block.

        None: it has moved a head (to another lane or back in its own) and wants to be asked again.
        """
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert what the policy promises of its own books."""


NOWHERE = -1
"""The lane of a block that takes no room in DRAM."""
