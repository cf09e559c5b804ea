"""Which block goes next: the policy's order, but never a parent before its children. Pure.

Only blocks that may go at all are candidates, so whatever a policy says, leaves go first and
nobody loses what is pinned. Candidates lie in a heap for each namespace and lane of the policy,
once each, under the rank they had when they were queued. A rank only grows, so a stale one is
noticed at the front and the block moves back then. A touch is O(1); choosing a victim costs
O(log n) for each block that was touched or evicted since.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from emberkv_proto.types import NamespaceId
from store_daemon.block import Block
from store_daemon.policies.base import NOWHERE, EvictionPolicy
from store_daemon.policies.lru import LruPolicy

log = logging.getLogger(__name__)
REUSE_SECONDS = 1.0
"""Touches closer than this count as one use: the ranks of one engine ask for the same blocks."""
MOST_SPARE_ENTRIES = 1024
"""Entries of moved or evicted blocks, beyond half of all, that are left for the front to find."""

_Entry = tuple[float, int, Block]
"""Rank and ticket when it was queued; it counts only while the block still has that ticket."""


class _PolicyFailedError(Exception):
    """The policy raised, or named a block that it was not shown."""


class EvictionQueue:
    """Candidates by namespace. `is_evictable` is asked again before a block is named.

    A policy that raises is replaced by LRU for good, logged and reported to `on_policy_failure`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_policy_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy or LruPolicy()
        self._clock = clock
        self._on_policy_failure = on_policy_failure
        self.on_reused: Callable[[Block], None] | None = None
        """Told of a block that was asked for again."""
        self._lanes: dict[NamespaceId, list[list[_Entry]]] = {}
        self._tickets = 0
        self._entries = 0
        self._candidates = 0
        self._accesses = 0

    def __len__(self) -> int:
        """How many blocks are queued."""
        return self._candidates

    @property
    def entries(self) -> int:
        """Entries held for them, with those that count no more."""
        return self._entries

    def use(self, policy: EvictionPolicy, blocks: Iterable[Block]) -> None:
        """Go on with another policy; all of `blocks` that is in DRAM is new to it. O(n log n)."""
        queued = list(self._queued())
        in_dram = [block for block in blocks if block.lane != NOWHERE]
        self._policy = policy
        try:
            for block in sorted(in_dram, key=lambda block: (block.access, block.depth)):
                block.lane, block.rank, block.uses = 0, 0.0, 0
                policy.entered(block)
            self._queue_anew(queued)
        except Exception:
            self._lanes = {}
            self._fall_back()
            self._queue_anew(queued)

    # ---- what happens ----

    def next_access(self) -> int:
        """A number larger than all before; blocks touched together share one."""
        self._accesses += 1
        return self._accesses

    def touch(self, blocks: Sequence[Block]) -> None:
        """The blocks, root first, were asked for together."""
        access, now = self.next_access(), self._clock()
        for block in blocks:
            block.access = access
            if now - block.used_at >= REUSE_SECONDS:
                block.used_at = now
                block.uses += 1
                if self.on_reused is not None:
                    self.on_reused(block)
        lanes = [block.lane for block in blocks] if self._policy.lanes > 1 else []
        try:
            self._policy.touched(blocks)
            for block, lane in zip(blocks, lanes, strict=False):
                if block.lane != lane and block.is_queued:
                    self._push(block)
        except Exception:
            self._fall_back()

    def entered(self, block: Block) -> None:
        """The block takes room in DRAM from now on; it counts as touched by the last access."""
        self.all_entered((block,))

    def all_entered(self, blocks: Sequence[Block]) -> None:
        """`entered` for each block."""
        access, now = self._accesses, self._clock()
        for block in blocks:
            block.access, block.used_at, block.uses, block.lane = access, now, 0, 0
        if type(self._policy).entered is EvictionPolicy.entered:
            return  # it does not care
        try:
            for block in blocks:
                self._policy.entered(block)
        except Exception:
            self._fall_back()

    def left(self, block: Block) -> None:
        """The block takes no room in DRAM any more."""
        self._forget(block)
        try:
            self._policy.left(block)
        except Exception:
            self._fall_back()
        block.lane = NOWHERE

    def offer(self, block: Block) -> None:
        """Queue a block that has become a candidate."""
        assert not block.is_queued
        try:
            self._push(block)
        except _PolicyFailedError:
            self._fall_back()
            self._push(block)
        if block.tenant is not None:
            block.tenant.in_dram.offer(block)  # queued by now, so its entry is not stale

    def withdraw(self, block: Block) -> None:
        """The block is no candidate at present. It is offered again when it becomes one."""
        self._forget(block)

    # ---- who goes ----

    def oldest(
        self, namespace_id: NamespaceId, is_evictable: Callable[[Block], bool]
    ) -> Block | None:
        """The namespace's next victim. It stays queued; evicting it is the caller's."""
        return self._choose((namespace_id,), is_evictable)

    def oldest_of_all(self, is_evictable: Callable[[Block], bool]) -> Block | None:
        """The next victim whatever its namespace. O(namespaces)."""
        return self._choose(tuple(self._lanes), is_evictable)

    def order_behind(self, victim: Block) -> float:
        """Blocks with a smaller `access` would all be chosen before any other candidate.

        The victim is what was chosen last. 0 under a policy that has an order of its own.
        """
        if not self._policy.is_by_access:
            return 0
        heaps = [lanes[0] for lanes in self._lanes.values()]
        behind = [
            entry[0]
            for heap in heaps
            for entry in (heap[1:3] if heap and heap[0][2] is victim else heap[:1])
        ]
        return min(behind, default=self._accesses + 1)

    def check_integrity(self) -> None:
        """Assert that each candidate is queued once, in its lane, and marked so."""
        seen: set[int] = set()
        entries = 0
        for lanes in self._lanes.values():
            for lane, heap in enumerate(lanes):
                entries += len(heap)
                for rank, ticket, block in heap:
                    if block.ticket != ticket:
                        continue
                    assert block.is_queued
                    assert id(block) not in seen, "a block is queued twice"
                    assert self._lane(block) == lane, "a block waits in a lane that is not its own"
                    assert rank <= self._policy.order(block)
                    seen.add(id(block))
        assert entries == self._entries
        assert len(seen) == self._candidates
        self._policy.check_integrity()

    # ---- inner steps ----

    def _choose(
        self, namespaces: Sequence[NamespaceId], is_evictable: Callable[[Block], bool]
    ) -> Block | None:
        try:
            return self._choose_by_policy(namespaces, is_evictable)
        except _PolicyFailedError:
            self._fall_back()
        return self._choose_by_policy(namespaces, is_evictable)

    def _choose_by_policy(
        self, namespaces: Sequence[NamespaceId], is_evictable: Callable[[Block], bool]
    ) -> Block | None:
        namespaces = [one for one in namespaces if one in self._lanes]
        if self._policy.is_by_access:
            return self._oldest_by_access(namespaces, is_evictable)
        # A policy may give each candidate a few more rounds, but not forever.
        for _ in range(4 * self._candidates + 4):
            heads: list[Block | None] = []
            for lane in range(self._policy.lanes):
                best: _Entry | None = None
                for namespace_id in namespaces:
                    head = self._head(self._lanes[namespace_id][lane], lane, is_evictable)
                    if head is not None and (best is None or head[0] < best[0]):
                        best = head
                heads.append(best[2] if best is not None else None)
            if not any(heads):
                return None
            try:
                chosen = self._policy.choose(heads)
            except Exception as error:
                raise _PolicyFailedError from error
            if chosen is not None:
                if chosen not in heads:
                    raise _PolicyFailedError("it chose a block that is no head")
                return chosen
        raise _PolicyFailedError("it does not make up its mind")

    def _oldest_by_access(
        self, namespaces: Sequence[NamespaceId], is_evictable: Callable[[Block], bool]
    ) -> Block | None:
        oldest: Block | None = None
        for namespace_id in namespaces:
            heap = self._lanes[namespace_id][0]
            while heap:
                rank, ticket, block = heap[0]
                if block.ticket != ticket:
                    self._pop(heap)
                elif not is_evictable(block):
                    self._pop(heap)
                    self._forget(block)
                elif block.access != rank:
                    self._push(block)
                else:
                    if oldest is None or rank < oldest.access:
                        oldest = block
                    break
        return oldest

    def _head(
        self, heap: list[_Entry], lane: int, is_evictable: Callable[[Block], bool]
    ) -> _Entry | None:
        """The lane's first candidate, after what is no longer one was cleared away."""
        while heap:
            rank, ticket, block = heap[0]
            if block.ticket != ticket:
                self._pop(heap)
            elif not is_evictable(block):
                # It is offered again when its last pin, writer or child goes.
                self._pop(heap)
                self._forget(block)
            elif self._lane(block) != lane or self._order(block) != rank:
                self._push(block)  # this entry counts no more
            else:
                return heap[0]
        return None

    def _pop(self, heap: list[_Entry]) -> None:
        heapq.heappop(heap)
        self._entries -= 1

    def _push(self, block: Block) -> None:
        """Queue the block where it belongs now; an entry it had counts no more."""
        rank, lane = self._order(block), self._lane(block)
        self._tickets += 1
        if not block.is_queued:
            block.is_queued = True
            self._candidates += 1
        block.ticket = self._tickets
        namespace_id = block.namespace.id
        lanes = self._lanes.get(namespace_id)
        if lanes is None:
            lanes = self._lanes[namespace_id] = [[] for _ in range(self._policy.lanes)]
        heapq.heappush(lanes[lane], (rank, block.ticket, block))
        self._entries += 1
        if self._entries > 2 * self._candidates + MOST_SPARE_ENTRIES:
            self._clear_spare_entries()

    def _forget(self, block: Block) -> None:
        if block.is_queued:
            block.is_queued = False
            block.ticket = 0
            self._candidates -= 1

    def _clear_spare_entries(self) -> None:
        """Drop the entries that count no more. O(entries), once for as many pushes."""
        for lanes in self._lanes.values():
            for heap in lanes:
                heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
                heapq.heapify(heap)
        self._entries = self._candidates

    def _lane(self, block: Block) -> int:
        lanes = self._policy.lanes
        if lanes == 1:
            return 0
        if not 0 <= block.lane < lanes:
            raise _PolicyFailedError(f"a candidate in lane {block.lane} of {lanes}")
        return block.lane

    def _order(self, block: Block) -> float:
        try:
            return self._policy.order(block)
        except Exception as error:
            raise _PolicyFailedError from error

    def _fall_back(self) -> None:
        """Go on with LRU after the policy raised. Called in an except clause. O(n log n)."""
        log.exception("policy %s failed; lru goes on", type(self._policy).__name__)
        self._on_policy_failure()
        self._policy = LruPolicy()
        self._queue_anew(list(self._queued()))

    def _queue_anew(self, queued: Sequence[Block]) -> None:
        self._lanes = {}
        self._entries = self._candidates = 0
        for block in queued:
            block.is_queued = False
            self._push(block)

    def _queued(self) -> Iterator[Block]:
        for lanes in self._lanes.values():
            for heap in lanes:
                for _, ticket, block in heap:
                    if block.ticket == ticket:
                        yield block
