"""Which bytes of the pool other daemons may read, under which lease. Asked from any thread."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from store_daemon.leases import Lease, LeaseId
from store_daemon.tiers.slots import Slot


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Of one lease, sorted by offset."""

    expires_at: float
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class PeerRanges:
    """Changes on the store's event loop only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_lease: dict[int, _Ranges] = {}

    def allow(self, lease_id: LeaseId, slots: Iterable[Slot], seconds: float) -> None:
        """From now on for so long, reads of these slots' payloads may begin."""
        by_offset = sorted(slots, key=lambda slot: slot.offset)
        self._by_lease[lease_id] = _Ranges(
            self._clock() + seconds,
            tuple(slot.offset for slot in by_offset),
            tuple(slot.payload_bytes for slot in by_offset),
        )

    def allow_ready(self, lease: Lease, part: int) -> None:
        """Let an engine on another host read its part of what is ready, until the lease ends."""
        blocks = lease.blocks[lease.needs.starts[part] : lease.ready]
        slots = [block.slots[part] for block in blocks if block is not None]
        self.allow(lease.id, filter(None, slots), math.inf)

    def end(self, lease_id: LeaseId) -> None:
        self._by_lease.pop(lease_id, None)

    def may_read(self, lease_id: int, offset: int, length: int) -> bool:
        """Whether the range lies within one slot that is allowed."""
        ranges = self._by_lease.get(lease_id)
        if ranges is None or self._clock() >= ranges.expires_at or length < 0:
            return False
        at = bisect_right(ranges.offsets, offset) - 1
        return at >= 0 and offset + length <= ranges.offsets[at] + ranges.lengths[at]

    def check_integrity(self, live: Set[int]) -> None:
        """Assert that nothing is allowed under a lease that has ended."""
        assert set(self._by_lease) <= live
