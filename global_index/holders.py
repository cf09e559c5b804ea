"""The numbers under which rows are kept, handed out lowest first and again only when swept."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import Tier
from global_index.index import MAX_HOLDERS, BlockIndex, Holder

SWEEP_SLOTS = 1 << 17
"""Slots looked at in one go while old rows are removed: some milliseconds."""


class HolderPool:
    """Who needs numbers reserves as many as it can have at once, and then takes and retires."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._reserved = 0
        self._next = 0
        self._free: list[int] = []  # a heap: low numbers keep bitmap rows narrow
        self._swept: deque[Holder] = deque()

    def has_room(self, count: int) -> bool:
        return self._reserved + count <= MAX_HOLDERS

    def reserve(self, count: int) -> None:
        """Raises UnavailableError when so many more cannot be promised."""
        if not self.has_room(count):
            raise UnavailableError(f"no room in the index: {MAX_HOLDERS} holders are in use")
        self._reserved += count

    def unreserve(self, count: int) -> None:
        self._reserved -= count

    def take(self) -> Holder:
        """One of the reserved numbers; it has no rows and no base."""
        if self._free:
            return Holder(heapq.heappop(self._free))
        if self._next < MAX_HOLDERS:
            self._next += 1
            return Holder(self._next - 1)
        # No more are taken than reserved, so some wait to be swept.
        holder = self._swept.popleft()
        self._index.remove_holder(holder)
        return holder

    def retire(self, holder: Holder) -> None:
        """No query is to name it from now on; its rows go little by little."""
        self._swept.append(holder)

    def sweep(self) -> bool:
        """Remove some rows of retired holders; True while there are more."""
        if self._swept and self._index.remove_holder(self._swept[0], SWEEP_SLOTS):
            heapq.heappush(self._free, self._swept.popleft())
        return bool(self._swept)

    @property
    def numbers(self) -> int:
        """How many different ones were ever handed out."""
        return self._next

    @property
    def swept(self) -> int:
        """Retired holders whose rows are still being removed."""
        return len(self._swept)

    def check_integrity(self, live: Iterable[Holder]) -> None:
        """Assert that every number is live, free or being swept; `live`: all that were taken."""
        live = list(live)
        assert len(live) <= self._reserved <= MAX_HOLDERS
        assert sorted([*live, *self._swept, *self._free]) == list(range(self._next)), (
            "a holder is lost"
        )
        for free in self._free:
            assert not any(self._index.digest(Holder(free), tier).blocks for tier in Tier)
