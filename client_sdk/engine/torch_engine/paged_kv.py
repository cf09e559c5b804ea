"""Which block of the paged KV pool holds what: reference counts, free queue, prefix cache.

Pure bookkeeping over block numbers; the pages themselves are one tensor the engine owns. A block
that nobody references stays findable by its hash until it is the oldest in the free queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

from emberkv_proto.types import BlockHash


class BlockPool:
    """All blocks of the pool. Only full blocks are ever hashed. Used by one thread."""

    def __init__(
        self,
        num_blocks: int,
        *,
        keeps_prefixes: bool,
        on_forgotten: Callable[[BlockHash], None] = lambda _: None,
    ) -> None:
        """`on_forgotten` gets the hash of each block that can be found no longer."""
        self._keeps_prefixes = keeps_prefixes
        self._on_forgotten = on_forgotten
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest cached prefix. Takes no reference: touch them before allocating."""
        return [self._block_of[h] for h in takewhile(self._block_of.__contains__, hashes)]

    def can_allocate(self, count: int, touched: Sequence[int] = ()) -> bool:
        """Whether `count` new blocks are free once those of `touched` are no longer."""
        return count + sum(1 for block in touched if not self._refs[block]) <= len(self._free)

    def touch(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each block, out of the free queue if it was there."""
        for block in blocks:
            self._free.pop(block, None)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """The `count` blocks that were free longest, emptied; the caller has asked can_allocate."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            if block in self._hash_of:
                forgotten = self._hash_of.pop(block)
                del self._block_of[forgotten]
                self._on_forgotten(forgotten)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block. The last ones of a chain become victims first."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} was released more often than taken"
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                # What nobody can find again is the first to be used again.
                self._free.move_to_end(block, last=block in self._hash_of)

    def remember(self, block: int, block_hash: BlockHash) -> bool:
        """Make a full, computed block findable; False if it was, or is not to be.

        A second copy of known content is not kept.
        """
        if not self._keeps_prefixes or block in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block], self._block_of[block_hash] = block_hash, block
        return True

    def check_integrity(self) -> None:
        """Assert: free is exactly the unreferenced; hashes and blocks map one to one."""
        assert set(self._free) == {n for n, refs in enumerate(self._refs) if refs == 0}
        assert all(refs >= 0 for refs in self._refs)
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
