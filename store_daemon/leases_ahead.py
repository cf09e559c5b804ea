"""Leases of a run's windows at one owner: the next one is asked for while the last is read.

So an owner brings the next window from its drive while this one travels, and never holds more than
two windows for one reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from emberkv_proto.types import BlockHash
from store_daemon.peer_client import RemoteGrant

Ask = Callable[[Sequence[BlockHash]], Coroutine[None, None, RemoteGrant]]


class LeasesAhead:
    """Belongs to one pull. `close` in every case; grants that `next` returned are the caller's."""

    def __init__(
        self,
        ask: Ask,
        hashes: Sequence[BlockHash],
        window_blocks: int,
        on_unused: Callable[[asyncio.Task[RemoteGrant]], None],
    ) -> None:
        """`on_unused` gets a request whose grant nobody will take; it may be under way still."""
        self._ask = ask
        self._hashes = hashes
        self._window_blocks = window_blocks
        self._on_unused = on_unused
        self._next_block = 0
        self._ahead: asyncio.Task[RemoteGrant] | None = None
        self._advance()

    async def next(self) -> RemoteGrant | None:
        """The grant of the next window; None after the last. Raises EmberError."""
        task = self._ahead
        if task is None:
            return None
        await asyncio.wait({task})  # if cancelled here, `close` finds the task, done or not
        self._ahead = None
        grant = task.result()
        if grant.grant.usable_blocks == min(
            self._window_blocks, len(self._hashes) - (self._next_block - self._window_blocks)
        ):
            self._advance()
        return grant

    def close(self) -> None:
        """No more is taken. A request is not cancelled: its grant may be on the way already."""
        task, self._ahead = self._ahead, None
        if task is not None:
            self._on_unused(task)

    def _advance(self) -> None:
        """Ask for the next window, if there is one."""
        window = self._hashes[self._next_block : self._next_block + self._window_blocks]
        self._next_block += self._window_blocks
        if window:
            self._ahead = asyncio.create_task(self._ask(window))
