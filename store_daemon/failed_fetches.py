"""Peers that lately failed to give what the index said they have: not asked at once again.

The index is corrected by the owner's own events, and a dead owner's silence takes seconds to be
noticed. Until then its word stands, and every request would pay for it. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from emberkv_proto.types import BlockHash, NodeId

MAX_REMEMBERED = 4096


class FailedFetches:
    """`now` is monotonic seconds. O(1) a call, bounded; the oldest is forgotten first.

    Args:
        block_seconds: how long a peer is not asked for a block that it did not give.
        peer_seconds: how long one that could not be reached is not asked for anything.
    """

    def __init__(self, block_seconds: float, peer_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._peer_seconds = peer_seconds
        self._until: OrderedDict[tuple[NodeId, BlockHash | None], float] = OrderedDict()

    def lacks(self, node_id: NodeId, block_hash: BlockHash, now: float) -> None:
        """The peer did not give this block."""
        self._remember((node_id, block_hash), now + self._block_seconds)

    def is_away(self, node_id: NodeId, now: float) -> None:
        """The peer did not answer."""
        self._remember((node_id, None), now + self._peer_seconds)

    def is_back(self, node_id: NodeId) -> None:
        """The peer has begun another life."""
        self._until.pop((node_id, None), None)

    def may_ask(self, node_id: NodeId, block_hash: BlockHash, now: float) -> bool:
        """Whether nothing is remembered against asking the peer for a run from this block on."""
        until = self._until
        return now >= until.get((node_id, block_hash), 0.0) and now >= until.get(
            (node_id, None), 0.0
        )

    def check_integrity(self) -> None:
        assert len(self._until) <= MAX_REMEMBERED

    def _remember(self, name: tuple[NodeId, BlockHash | None], until: float) -> None:
        self._until[name] = until
        self._until.move_to_end(name)
        while len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)
