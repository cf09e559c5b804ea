"""Blocks that are on their way from peers, so that all who want one wait for the same. Pure.

A pull says which blocks it will bring; each is in flight until it has landed or the pull has given
it up. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from emberkv_proto.types import BlockHash, NamespaceId

Name = tuple[NamespaceId, BlockHash]


class SharedPull:
    """One pull in progress. `landed` are its blocks so far, in the order of the chain."""

    def __init__(self, in_flight: dict[Name, SharedPull], names: Sequence[Name]) -> None:
        self.landed: list[BlockHash] = []
        self._in_flight = in_flight
        self._names = list(names)
        self._has_landed: set[BlockHash] = set()
        self._waiting: list[asyncio.Future[None]] = []
        for name in names:
            assert name not in in_flight, "a block is pulled twice at a time"
            in_flight[name] = self

    def has_landed(self, block_hash: BlockHash) -> bool:
        return block_hash in self._has_landed

    @property
    def expected(self) -> int:
        """How many blocks it brings in all, those that have landed included."""
        return len(self._names)

    @property
    def next_block(self) -> BlockHash:
        """The first block that has not landed."""
        return self._names[len(self.landed)][1]

    def keep(self, count: int) -> None:
        """No more than the first `count` blocks will come."""
        gone = self._names[count:]
        del self._names[count:]
        for name in gone:
            del self._in_flight[name]
        if gone:
            self._wake()

    def land(self, block_hash: BlockHash) -> None:
        """The next block is in the pool."""
        name = self._names[len(self.landed)]
        assert name[1] == block_hash, "landed out of order"
        self.landed.append(block_hash)
        self._has_landed.add(block_hash)
        del self._in_flight[name]
        self._wake()

    def end(self) -> None:
        """What has not landed will not come by this pull."""
        self.keep(len(self.landed))

    async def moved(self, timeout_seconds: float) -> None:
        """Return when a block has landed or was given up, at the latest after the timeout."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_seconds)
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class SharedPulls:
    """All pulls in progress of one node."""

    def __init__(self) -> None:
        self._in_flight: dict[Name, SharedPull] = {}

    def __len__(self) -> int:
        """Blocks in flight."""
        return len(self._in_flight)

    def bringing(self, namespace_id: NamespaceId, block_hash: BlockHash) -> SharedPull | None:
        """The pull by which the block is coming."""
        return self._in_flight.get((namespace_id, block_hash))

    def begin(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash]) -> SharedPull:
        """A pull of the leading blocks that no other one is bringing. `end` must follow."""
        names: list[Name] = []
        for block_hash in hashes:
            name = namespace_id, block_hash
            if name in self._in_flight:
                break
            names.append(name)
        return SharedPull(self._in_flight, names)

    def check_integrity(self) -> None:
        for name, pull in self._in_flight.items():
            assert not pull.has_landed(name[1]), "a block that has landed is still in flight"
