"""Hashes of blocks that have gone, so that one that comes back is known."""

from __future__ import annotations

from emberkv_proto.types import BlockHash


class Ghosts:
    """A set that can forget its oldest; its owner bounds it. O(1) per hash."""

    def __init__(self) -> None:
        self._hashes: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hash: BlockHash) -> None:
        """Remember the hash as the newest."""
        self._hashes.pop(block_hash, None)
        self._hashes[block_hash] = None

    def take(self, block_hash: BlockHash) -> bool:
        """Forget the hash; return whether it was known."""
        if block_hash in self._hashes:
            del self._hashes[block_hash]
            return True
        return False

    def trim(self, most: int) -> None:
        """Forget the oldest until at most `most` are left."""
        while len(self._hashes) > most:
            del self._hashes[next(iter(self._hashes))]
