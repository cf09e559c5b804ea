"""Which node to ask before the index is: the one that the last pulls went to. Pure.

Where a node pulls from always the same one (a decode node from its prefill node, one of two), the
question to the index is half of what a small pull takes.
"""

from __future__ import annotations

from emberkv_proto.types import NodeId

CHOSEN_IN_A_ROW = 2
"""So often the index has to name a node first."""
KNOWN_SECONDS = 10.0
"""After so long without a pull from it, the index is asked: it knows who has gone meanwhile."""

MOST_GUESSES = 16
"""In a row; then the index is asked once: another node may be the better one by now."""


class LikelyOwner:
    """Told of every pull. Belongs to one event loop."""

    def __init__(self) -> None:
        self._node_id: NodeId | None = None
        self._in_a_row = 0
        self._used_at = float("-inf")
        self._guesses = 0
        """Since the index was asked last."""

    def gave(self, node_id: NodeId, now: float) -> None:
        """A pull brought blocks from there."""
        self._in_a_row = self._in_a_row + 1 if node_id == self._node_id else 1
        self._node_id, self._used_at = node_id, now

    def was_wrong(self) -> None:
        """It was asked and has not even the first block, or cannot be reached."""
        self._in_a_row = 0

    def guess(self, now: float) -> NodeId | None:
        is_known = now - self._used_at <= KNOWN_SECONDS
        if not is_known or self._in_a_row < CHOSEN_IN_A_ROW or self._guesses == MOST_GUESSES:
            self._guesses = 0
            return None
        self._guesses += 1
        return self._node_id
