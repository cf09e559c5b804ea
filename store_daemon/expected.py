"""Blocks that are not here yet and that a peer waits for. Belongs to one event loop."""

from __future__ import annotations

import asyncio

from emberkv_proto.types import BlockHash

MAX_WAITING = 1024
"""Further ones are not made to wait: they hear at once that the block is not here."""


class Expected:
    """Who waits for which block."""

    def __init__(self) -> None:
        self._waiting: dict[BlockHash, set[asyncio.Future[None]]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    async def wait(self, block_hash: BlockHash, seconds: float) -> None:
        """Return when the block has arrived, or the time is over."""
        if self._count >= MAX_WAITING:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(block_hash, set()).add(waiter)
        self._count += 1
        try:
            await asyncio.wait({waiter}, timeout=seconds)
        finally:
            self._count -= 1
            others = self._waiting.get(block_hash)
            if others is not None:
                others.discard(waiter)
                if not others:
                    del self._waiting[block_hash]

    def arrived(self, block_hash: BlockHash) -> None:
        """The block can be read now."""
        for waiter in self._waiting.pop(block_hash, ()) if self._waiting else ():
            waiter.set_result(None)

    def check_integrity(self) -> None:
        waiting = [waiter for waiters in self._waiting.values() for waiter in waiters]
        assert len(waiting) <= self._count <= MAX_WAITING
        assert all(self._waiting.values()), "a block is kept for nobody"
