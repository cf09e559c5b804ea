"""Prefetches: chains brought into DRAM while a request still queues, until told otherwise.

A prefetch sets a few blocks in motion at a time, in the chain's order, so that little is wasted
when it is cancelled, and holds what it brought until it ends: making room for its last block never
evicts its first. A block that cannot be brought cuts it: what stands behind is no hit then. It ends
when what is left has come, when it is cancelled, at its deadline, and with its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.leases import SessionId
from store_daemon.needs import Needs
from store_daemon.ports import Followed, PullTarget
from store_daemon.promotion import Promoter
from store_daemon.pulls import Pulls

PrefetchId = NewType("PrefetchId", int)
PREFETCH_WINDOW_BLOCKS = 32
"""Blocks of one prefetch in motion at a time: enough to keep a drive busy."""
MAX_PREFETCHES = 256
"""Most prefetches that one session may have at a time; a further one is refused."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Answer to a prefetch: how many blocks will move, or may come from peers."""

    prefetch_id: PrefetchId
    blocks: int


NOTHING = Scheduled(PrefetchId(0), 0)


@dataclass(eq=False, slots=True)
class _Prefetch:
    id: PrefetchId
    session: SessionId
    needs: Needs
    blocks: list[Block]
    """What of the chain is here, pinned until the prefetch ends."""
    timer: asyncio.TimerHandle
    next: int = 0
    """Blocks before this one are readable, or were set in motion."""
    moving: dict[Block, int] = field(default_factory=dict)
    """Blocks in motion, and their numbers."""
    pull: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Prefetcher:
    """All prefetches of the node. Belongs to the store's event loop; nothing here waits.

    Args:
        on_unwanted: told of blocks in motion that an ended prefetch wants no more.
    """

    def __init__(
        self,
        holdings: Holdings,
        promoter: Promoter,
        pulls: Pulls,
        on_unwanted: Callable[[Iterable[Block]], None],
    ) -> None:
        self._holdings = holdings
        self._promoter = promoter
        self._pulls = pulls
        self._on_unwanted = on_unwanted
        self._last_id = 0
        self._prefetches: dict[PrefetchId, _Prefetch] = {}
        self._by_session: dict[SessionId, set[PrefetchId]] = {}
        self._moving: dict[Block, list[_Prefetch]] = {}
        """Who wants a block that is in motion."""

    def __len__(self) -> int:
        return len(self._prefetches)

    def wants(self, block: Block) -> bool:
        """Whether the block is in motion for a prefetch, perhaps among others."""
        return block in self._moving

    def start(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        seconds: float,
        target: PullTarget,
        followed: Followed | None = None,
    ) -> Scheduled:
        """Begin to bring a chain from SSD and, where there are any, from peers. O(len(hashes)).

        What is missing comes from the node that is `followed`, while it makes it, if one is named.
        """
        self._holdings.catalog.wake(hashes)
        found = self._holdings.catalog.usable_prefix(namespace, hashes)
        self._holdings.queue.touch(found)
        missing = hashes[len(found) :]
        if self._pulls.puller is None or not missing or self._is_here(namespace, missing[0]):
            missing = []
        prefetch = self._begin(session, namespace, found, len(missing), seconds)
        if prefetch is None:
            return NOTHING
        # The number first: blocks that cannot be brought end the prefetch at once.
        scheduled = self._unreadable(prefetch) + len(missing)
        if missing:
            parent = hashes[len(found) - 1] if found else None
            prefetch.pull = self._pulls.start(
                self._pull(prefetch, namespace, parent, missing, target, seconds, followed)
            )
        self._advance(prefetch)
        self._holdings.publish()
        return Scheduled(prefetch.id, scheduled)

    def start_behind(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        found: Sequence[Block],
        seconds: float,
    ) -> None:
        """Begin to bring blocks of a hit that somebody would have liked to read at once.

        They may ask again and again: blocks that move already are left to it.
        """
        if found[-1] in self._moving:
            return
        prefetch = self._begin(session, namespace, found, 0, seconds)
        if prefetch is not None:
            self._advance(prefetch)
            self._holdings.publish()

    def over(self, prefetch_id: PrefetchId) -> asyncio.Event | None:
        """Set when the prefetch has ended; None when it has already, or never was."""
        prefetch = self._prefetches.get(prefetch_id)
        return prefetch.over if prefetch is not None else None

    def cancel(self, session: SessionId, prefetch_id: int) -> None:
        """Stop what has not begun to move. One that ended, or is another's, is no error."""
        prefetch = self._prefetches.get(PrefetchId(prefetch_id))
        if prefetch is not None and prefetch.session == session:
            self._holdings.counters["cancelled_prefetches"] += 1
            self._end(prefetch)

    def end_session(self, session: SessionId) -> None:
        for prefetch_id in list(self._by_session.get(session, ())):
            self._end(self._prefetches[prefetch_id])

    def close(self) -> None:
        """End all."""
        for prefetch in list(self._prefetches.values()):
            self._end(prefetch)

    def settled(self, block: Block, is_readable: bool) -> None:
        """A move has ended."""
        for prefetch in self._moving.pop(block, ()):
            number = prefetch.moving.pop(block)
            if prefetch.needs.are_readable(block, number):
                self._holdings.counters["prefetched_blocks"] += 1
                self._advance(prefetch)
            elif is_readable and self._set_in_motion(prefetch, number):
                continue  # it moved for others, who need other parts
            else:
                self._cut(prefetch, number)

    def check_integrity(self) -> None:
        """Assert that each prefetch has something to wait for, and the maps agree."""
        named = {p: s for s, ids in self._by_session.items() for p in ids}
        assert named == {p.id: p.session for p in self._prefetches.values()}
        wanted: dict[Block, list[_Prefetch]] = {}
        for prefetch in self._prefetches.values():
            assert prefetch.moving or prefetch.pull is not None, "a prefetch waits for nothing"
            assert len(prefetch.moving) <= PREFETCH_WINDOW_BLOCKS
            assert 0 <= prefetch.next <= len(prefetch.blocks)
            assert all(block.pins > 0 for block in prefetch.blocks)
            for block, number in prefetch.moving.items():
                assert prefetch.blocks[number] is block
                assert self._promoter.is_moving(block)
                wanted.setdefault(block, []).append(prefetch)
        assert {b: set(p) for b, p in wanted.items()} == {
            b: set(p) for b, p in self._moving.items()
        }

    # ---- inner steps ----

    def _begin(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        found: Sequence[Block],
        missing: int,
        seconds: float,
    ) -> _Prefetch | None:
        """A prefetch over these blocks; None when all can be read, or there are too many."""
        needs = namespace.needs(len(found))
        if not missing and needs.count_readable(found, 0) == len(found):
            return None
        mine = self._by_session.setdefault(session, set())
        if len(mine) >= MAX_PREFETCHES:
            self._holdings.counters["refused_prefetches"] += 1
            return None
        self._last_id += 1
        number = PrefetchId(self._last_id)
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, number)
        prefetch = _Prefetch(number, session, needs, list(found), timer)
        for block in found:
            self._holdings.catalog.pin(block)
        self._prefetches[number] = prefetch
        mine.add(number)
        return prefetch

    def _unreadable(self, prefetch: _Prefetch) -> int:
        needs = prefetch.needs
        return sum(not needs.are_readable(b, n) for n, b in enumerate(prefetch.blocks))

    def _advance(self, prefetch: _Prefetch) -> None:
        """Set the next blocks in motion; end the prefetch when nothing is left to wait for."""
        while (
            prefetch.next < len(prefetch.blocks) and len(prefetch.moving) < PREFETCH_WINDOW_BLOCKS
        ):
            if not self._set_in_motion(prefetch, prefetch.next):
                self._cut(prefetch, prefetch.next)
                return
            prefetch.next += 1
        if not prefetch.moving and prefetch.pull is None:
            self._end(prefetch)

    def _set_in_motion(self, prefetch: _Prefetch, number: int) -> bool:
        """Whether a block is readable, or now on its way to be."""
        block = prefetch.blocks[number]
        if prefetch.needs.are_readable(block, number):
            return True
        if not self._promoter.bring(block, prefetch.needs.parts(number)):
            return False
        prefetch.moving[block] = number
        self._moving.setdefault(block, []).append(prefetch)
        return True

    def _cut(self, prefetch: _Prefetch, number: int) -> None:
        """Give up the blocks from `number` on."""
        gone = prefetch.blocks[number:]
        del prefetch.blocks[number:]
        prefetch.next = min(prefetch.next, number)
        if prefetch.pull is not None:
            prefetch.pull.cancel()
            prefetch.pull = None
        self._let_go(prefetch, [block for block, n in prefetch.moving.items() if n >= number])
        self._holdings.unpin(gone)
        self._advance(prefetch)

    def _let_go(self, prefetch: _Prefetch, blocks: Sequence[Block]) -> None:
        """The prefetch waits for these blocks no more."""
        unwanted = []
        for block in blocks:
            del prefetch.moving[block]
            others = self._moving[block]
            others.remove(prefetch)
            if not others:
                del self._moving[block]
                unwanted.append(block)
        self._on_unwanted(unwanted)

    async def _pull(
        self,
        prefetch: _Prefetch,
        namespace: StoredNamespace,
        parent: BlockHash | None,
        missing: Sequence[BlockHash],
        target: PullTarget,
        seconds: float,
        followed: Followed | None,
    ) -> None:
        pulls = self._pulls
        try:
            if followed is None:
                await pulls.run(namespace, parent, missing, target, seconds)
            else:
                await pulls.follow(followed, namespace, parent, missing, target, seconds)
        finally:
            prefetch.pull = None
            if prefetch.id in self._prefetches:
                self._advance(prefetch)

    def _expire(self, prefetch_id: PrefetchId) -> None:
        self._holdings.counters["expired_prefetches"] += 1
        self._end(self._prefetches[prefetch_id])
        self._holdings.publish()

    def _end(self, prefetch: _Prefetch) -> None:
        """Moves that a thread has begun go on, and hold their blocks themselves."""
        del self._prefetches[prefetch.id]
        prefetch.over.set()
        mine = self._by_session[prefetch.session]
        mine.remove(prefetch.id)
        if not mine:
            del self._by_session[prefetch.session]
        prefetch.timer.cancel()
        if prefetch.pull is not None:
            prefetch.pull.cancel()
        self._let_go(prefetch, list(prefetch.moving))
        self._holdings.unpin(prefetch.blocks)

    def _is_here(self, namespace: StoredNamespace, block_hash: BlockHash) -> bool:
        block = self._holdings.catalog.find(namespace, block_hash)
        return block is not None and (block.in_dram or block.in_ssd)
