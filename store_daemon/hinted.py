"""A chain that a router wants in DRAM, for as long as it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from emberkv_proto.types import BlockHash
from store_daemon.block import StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.leases import ROUTERS
from store_daemon.prefetching import Prefetcher, Scheduled


class HintedChain:
    """Implements `ports.Hinted` over a prefetch of `ROUTERS`. Belongs to the store's event loop."""

    def __init__(
        self,
        holdings: Holdings,
        prefetches: Prefetcher,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        scheduled: Scheduled,
    ) -> None:
        self.scheduled_blocks = scheduled.blocks
        self._holdings = holdings
        self._prefetches = prefetches
        self._namespace = namespace
        self._hashes = hashes
        self._id = scheduled.prefetch_id
        self._over = prefetches.over(scheduled.prefetch_id)

    @property
    def is_done(self) -> bool:
        return self._over is None or self._over.is_set()

    def readable_blocks(self) -> int:
        """Leading blocks of the chain that can be read in DRAM now. O(len(hashes))."""
        find = self._holdings.catalog.find
        found = []
        for block_hash in self._hashes:
            block = find(self._namespace, block_hash)
            if block is None or not block.in_dram:
                break
            found.append(block)
        return self._namespace.needs(len(found)).count_readable(found, 0)

    async def ended(self, timeout_seconds: float) -> None:
        """Return when the prefetch is over, or after the timeout."""
        if self._over is None:
            return
        waiting = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({waiting}, timeout=timeout_seconds)
        finally:
            waiting.cancel()

    def cancel(self) -> None:
        """Stop what has not begun to move. One that has ended is no error."""
        if not self.is_done:
            self._prefetches.cancel(ROUTERS, self._id)
            self._holdings.publish()
