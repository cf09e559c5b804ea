"""How long until a lease is complete, by the speeds measured on this node."""

from __future__ import annotations

from collections.abc import Callable

from emberkv_proto.types import Source
from store_daemon.block import Block
from store_daemon.leases import Lease
from store_daemon.promotion import Promoter
from store_daemon.pulls import Pulls
from store_daemon.worth import Pace, blocks_worth_loading, expected_arrivals

MOVING_BLOCKS = 256
"""How many of a lease's blocks are looked at for moves of its own; no more are moved at a time."""


class Estimates:
    """Looks at moves and pulls; changes nothing."""

    def __init__(
        self, promoter: Promoter, pulls: Pulls, threads: int, clock: Callable[[], float]
    ) -> None:
        """`threads`: how many blocks the promoter moves at a time."""
        self._promoter = promoter
        self._pulls = pulls
        self._threads = threads
        self._clock = clock

    def seconds_to_complete(self, lease: Lease) -> float:
        """0 when it is complete, or when the speed of what it waits for is not known.

        Takes what is here already behind the first missing block for missing too.
        """
        if lease.is_complete:
            return 0.0
        from_peers = lease.blocks.count(None)
        counts = {
            Source.PEER: from_peers,
            Source.SSD: lease.usable - lease.arrived - from_peers,
        }
        paces = self._paces(lease)
        return max(
            (paces[s].arrival_seconds(n - 1) for s, n in counts.items() if n and s in paces),
            default=0.0,
        )

    def usable_worth(self, lease: Lease, recompute_seconds: float) -> int:
        """How many of the usable blocks are worth waiting for. O(blocks that are not ready).

        A lease that serves only a hit of its whole length is worth all of it or nothing of what
        is not there.
        """
        if lease.is_complete:
            return lease.usable
        pending = [
            self._source(lease, number, block)
            for number, block in enumerate(lease.blocks[lease.arrived :], lease.arrived)
        ]
        arrivals = expected_arrivals(pending, self._paces(lease))
        worth = blocks_worth_loading(arrivals, recompute_seconds)
        if not lease.needs.is_divisible:
            worth = len(arrivals) if arrivals[-1] <= recompute_seconds * len(arrivals) else 0
        return lease.arrived + worth

    def _paces(self, lease: Lease) -> dict[Source, Pace]:
        """Of the sources whose speed is known."""
        now, block_bytes = self._clock(), lease.namespace.block_bytes
        paces: dict[Source, Pace] = {}
        from_ssd = self._promoter.speed.seconds_for(block_bytes, now)
        stalled_seconds = self._promoter.stalled_seconds
        if from_ssd is not None or stalled_seconds:
            # A read that takes longer than the others did says what reads take now.
            seconds = max(from_ssd or 0.0, stalled_seconds)
            is_moving = self._promoter.is_moving
            window = lease.blocks[lease.arrived : lease.arrived + MOVING_BLOCKS]
            mine = sum(is_moving(block) for block in window if block is not None)
            paces[Source.SSD] = Pace(seconds, self._threads, self._promoter.in_flight - mine)
        line = self._pulls.speed.line(now)
        if line is not None:
            seconds = line.byte_seconds * block_bytes
            paces[Source.PEER] = Pace(seconds, 1, setup_seconds=line.setup_seconds)
        return paces

    def _source(self, lease: Lease, number: int, block: Block | None) -> Source:
        if block is None:
            return Source.PEER
        is_away = any(block.slots[part] is None for part in lease.needs.parts(number))
        return Source.SSD if is_away else Source.DRAM
