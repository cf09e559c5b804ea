"""Lends blocks to sessions and peers: leases that fill from DRAM, SSD and other nodes.

Runs on the daemon's event loop. `acquire` never waits; `wait` does, for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from emberkv_proto.errors import InvalidRequestError, PoolFullError
from emberkv_proto.hashing import UNKNOWN_CHECKSUM
from emberkv_proto.types import AcquirePolicy, BlockHash, Source
from store_daemon.block import Block, StoredNamespace
from store_daemon.estimates import Estimates
from store_daemon.expected import Expected
from store_daemon.holdings import Holdings
from store_daemon.lease_limit import blocks_that_fit
from store_daemon.leases import (
    PEERS,
    Lease,
    LeaseId,
    LeaseTable,
    SessionId,
    readable_parts,
)
from store_daemon.lending_terms import LendingTimes, Readers
from store_daemon.peer_ranges import PeerRanges
from store_daemon.ports import Followed, PeerGrant, PoolRange, PullTarget
from store_daemon.prefetching import Prefetcher, Scheduled
from store_daemon.promotion import Promoter
from store_daemon.pulls import Pulls
from store_daemon.tiers.ssd import SsdTier

LONGEST_FILL_SECONDS = 600.0
DEFAULT_FILL_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 60.0
MOVE_WINDOW_BLOCKS = 256
"""How far ahead of what is ready a lease's blocks are moved; bounds one turn of the loop."""
_DRAM, _SSD, _PEER = int(Source.DRAM), int(Source.SSD), int(Source.PEER)


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Block number `number` of a lease is on its way."""

    lease: Lease
    number: int


class Lender:
    """Leases and what fills them.

    A lease whose next block cannot be brought shrinks to what stands before it; bytes that are not
    there are never promised for longer than the fill's deadline.
    """

    def __init__(
        self,
        holdings: Holdings,
        ssd: SsdTier | None,
        readers: Readers,
        times: LendingTimes,
        clock: Callable[[], float],
    ) -> None:
        self.leases = LeaseTable()
        self.limit_bytes: int | None = None
        """Most DRAM that the leases of one session may hold."""
        self.promoter = Promoter(holdings, ssd, readers.executor, self._settled, clock)
        self.pulls = Pulls(holdings, clock)
        self.estimates = Estimates(self.promoter, self.pulls, readers.threads, clock)
        self.prefetches = Prefetcher(holdings, self.promoter, self.pulls, self._withdraw)
        self._holdings = holdings
        self._times = times
        self._clock = clock
        self._interest: defaultdict[BlockHash, list[_Awaited]] = defaultdict(list)
        """Who waits for a block to be moved or to come from a peer."""
        self._timers: dict[LeaseId, asyncio.TimerHandle] = {}
        self._waiters: dict[LeaseId, list[asyncio.Future[None]]] = {}
        self.peer_ranges = PeerRanges(clock)
        self._read_through: dict[LeaseId, list[Block]] = {}
        """Blocks that came from SSD for a peer's lease."""
        self._expected = Expected()
        self._pulling: dict[LeaseId, asyncio.Task[None]] = {}
        self._weighed: dict[LeaseId, Lease] = {}
        """Leases in motion whose reader would rather compute than wait too long."""

    def set_times(self, times: LendingTimes) -> None:
        """For grants from now on."""
        self._times = times

    # ---- sessions ----

    def acquire(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        policy: AcquirePolicy,
        deadline_seconds: float,
        target: PullTarget,
        recompute_seconds: float | None = None,
    ) -> Lease | None:
        """Lease the usable prefix, and begin to bring what of it is not in DRAM; None: no hit.

        With `recompute_seconds`, what the reader needs to compute a block, the lease is, and is
        kept, no longer than is worth waiting for.

        Raises PoolFullError when the session holds too many leases, or so much that not a block
        more fits under its limit; where some fit, the hit is no longer than these.
        """
        self.leases.check_room(session)
        holdings = self._holdings
        counters = holdings.counters
        if self.limit_bytes is not None:
            hashes = self._within_limit(self.limit_bytes, session, namespace, hashes)
        holdings.catalog.wake(hashes)
        found = holdings.catalog.usable_prefix(namespace, hashes)
        if found:
            idle_seconds = self._clock() - found[-1].used_at
            holdings.measures.reuse_gap_seconds.observe(idle_seconds)
        holdings.queue.touch(found)
        holdings.catalog.touch_parts(found)
        if policy is AcquirePolicy.BEST_EFFORT:
            found = self._readable_now(session, namespace, found)
        blocks: list[Block | None] = [*found]
        missing = len(hashes) - len(blocks)
        counters["missed_blocks"] += missing
        is_pulling = (
            bool(missing)
            and self.pulls.puller is not None
            and policy is not AcquirePolicy.BEST_EFFORT
        )
        if is_pulling:
            blocks += [
                self._resident(namespace, block_hash) for block_hash in hashes[len(blocks) :]
            ]
            if namespace.is_hybrid:
                everything = [True] * namespace.parts
                held = [everything if b is None else b.held_parts for b in blocks]
                del blocks[namespace.longest_hit(held) :]
        if not blocks:
            return None
        lease = self._grant(session, namespace, hashes, blocks, self._times.lease_seconds)
        sources = lease.sources
        counters["hit_blocks_dram"] += sources.count(Source.DRAM)
        counters["hit_blocks_ssd"] += sources.count(Source.SSD)
        if not lease.is_complete:
            seconds = min(deadline_seconds or DEFAULT_FILL_SECONDS, LONGEST_FILL_SECONDS)
            lease.recompute_seconds = recompute_seconds
            self._weigh(lease)
        if not lease.is_complete:
            self._fill(lease, seconds)
            if None in lease.blocks:
                self._pulling[lease.id] = self.pulls.start(self._pull(lease, seconds, target))
            if recompute_seconds is not None and not lease.is_complete:
                self._weighed[lease.id] = lease
            holdings.publish()
        if not lease.usable:
            self.release(session, lease.id)
            return None
        return lease

    async def wait(
        self,
        session: SessionId,
        lease_id: LeaseId,
        from_block: int,
        timeout_seconds: float,
        until_block: int = 0,
    ) -> Lease:
        """Return the lease once it is complete, or as many blocks are ready as are wanted.

        That is more than `from_block`, and at least `until_block`. Returns it as it is after the
        timeout.

        Raises:
            LeaseExpiredError, UnknownLeaseError: now, or while waiting.
            InvalidRequestError: from_block is beyond what was asked for.
        """
        lease = self.leases.check(session, lease_id, self._clock())
        if from_block > len(lease.hashes):
            raise InvalidRequestError(
                f"from_block {from_block} is beyond the {len(lease.hashes)} blocks of the lease"
            )
        wanted = max(from_block + 1, until_block)
        if lease.ready >= wanted or lease.is_complete or timeout_seconds <= 0:
            return lease
        loop = asyncio.get_running_loop()
        until = loop.time() + min(timeout_seconds, LONGEST_WAIT_SECONDS)
        while not (lease.ready >= wanted or lease.is_complete or lease.is_ended):
            if loop.time() >= until:
                break
            await self._woken(lease, until)
        return self.leases.check(session, lease_id, self._clock())

    def release(self, session: SessionId, lease_id: LeaseId) -> None:
        """End a lease, once. Raises UnknownLeaseError or LeaseExpiredError."""
        self._close(self.leases.end(session, lease_id))

    def end_session(self, session: SessionId) -> None:
        for lease in self.leases.end_session(session):
            self._close(lease)
        self.prefetches.end_session(session)

    def expire(self) -> None:
        """End the leases that ran out; their waiters see the error."""
        for lease in self.leases.expire(self._clock()):
            self._holdings.counters["expired_leases"] += 1
            self._close(lease)

    def reconsider(self) -> None:
        """Give up what has become slower to wait for than to compute. O(leases in motion)."""
        for lease in list(self._weighed.values()):
            if not lease.is_ended:
                self._weigh(lease)

    def prefetch(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        target: PullTarget,
        followed: Followed | None = None,
    ) -> Scheduled:
        """Begin to bring a chain into DRAM, without a lease. See `prefetching`."""
        seconds = min(deadline_seconds or DEFAULT_FILL_SECONDS, LONGEST_FILL_SECONDS)
        return self.prefetches.start(session, namespace, hashes, seconds, target, followed)

    # ---- peers ----

    async def peer_acquire(
        self,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        lease_seconds: float,
        wait_seconds: float = 0.0,
        ready_only: bool = False,
    ) -> PeerGrant:
        """Lease to another daemon what is in DRAM, or comes there from SSD in time.

        The blocks stay pinned `peer_seconds` longer than reads may begin, so that none that began
        in time sees its slot reused. Only whole blocks travel; the first one is waited for, for
        `wait_seconds`. With `ready_only` the answer waits for no drive: what is in DRAM.

        What had to come from SSD is read through: while DRAM is nearly full, it leaves again with
        the lease, unless somebody else asked for it.
        """
        self.leases.check_room(PEERS)
        self._holdings.catalog.wake(hashes)
        found = self._holdings.catalog.whole_prefix(namespace, hashes)
        if not found and wait_seconds > 0:
            await self._expected.wait(hashes[0], wait_seconds)
            self.leases.check_room(PEERS)
            found = self._holdings.catalog.whole_prefix(namespace, hashes)
        if ready_only:
            found = [*takewhile(lambda block: None not in block.slots, found)]
        if not found:
            return PeerGrant(0, 0, namespace.parts, (), ())
        self._holdings.queue.touch(found)
        self._holdings.catalog.touch_parts(found)
        began, held = self._clock(), lease_seconds + self._times.peer_seconds
        lease = self._grant(PEERS, namespace, hashes, [*found], held)
        if not lease.is_complete:
            self._read_through[lease.id] = [b for b in found if not b.in_dram]
            seconds = min(lease_seconds, self._times.peer_seconds) / 2
            self._fill(lease, seconds)
            self._holdings.publish()
            try:
                await self.wait(PEERS, lease.id, lease.usable, seconds)
            except BaseException:
                if not lease.is_ended:
                    self.release(PEERS, lease.id)
                raise
            self._freeze(lease)
        ready = self._with_checksums([*filter(None, lease.blocks[: lease.ready])])
        slots = [slot for block in ready for slot in block.slots if slot is not None]
        if not slots:
            self.release(PEERS, lease.id)
            return PeerGrant(0, 0, namespace.parts, (), ())
        self.peer_ranges.allow(lease.id, slots, began + lease_seconds - self._clock())
        self._holdings.counters["peer_granted_blocks"] += len(ready)
        return PeerGrant(
            lease.id,
            len(ready),
            namespace.parts,
            tuple(PoolRange(slot.offset, slot.payload_bytes) for slot in slots),
            tuple(slot.checksum for slot in slots),
            tuple(block.salt_id for block in ready),
        )

    def _with_checksums(self, blocks: list[Block]) -> list[Block]:
        """The leading blocks whose checksums are known, without which none goes to a peer."""
        for number, block in enumerate(blocks):
            if any(s is not None and s.checksum == UNKNOWN_CHECKSUM for s in block.slots):
                for unsummed in blocks[number:]:
                    self.promoter.learn_checksums(unsummed)
                return blocks[:number]
        return blocks

    def learn_checksums(self, lease: Lease) -> None:
        """Somebody reads blocks that were committed without: the next reader can verify them."""
        self._with_checksums([*filter(None, lease.blocks[: lease.ready])])

    # ---- the end ----

    async def close(self) -> None:
        """End every lease, stop pulling, and wait for the moves in flight."""
        self.prefetches.close()
        await self.pulls.close()
        for lease in list(self.leases):
            self.release(lease.session, lease.id)
        await self.promoter.settle()

    def check_integrity(self) -> None:
        """Assert that each fill in progress has a deadline, and nothing is kept for a dead one."""
        self.leases.check_integrity()
        self.promoter.check_integrity()
        self.prefetches.check_integrity()
        live = {lease.id for lease in self.leases}
        assert set(self._timers) <= live
        assert set(self._waiters) <= live
        self.peer_ranges.check_integrity(live)
        assert set(self._pulling) <= live
        assert set(self._read_through) <= live
        self._expected.check_integrity()
        assert set(self._weighed) <= set(self._timers)
        for lease in self.leases:
            assert lease.is_complete or lease.id in self._timers, "a fill without a deadline"
        for waiting in self._interest.values():
            assert waiting
            assert all(not awaited.lease.is_ended for awaited in waiting)

    def blocks_arrived(self, blocks: Sequence[Block]) -> None:
        """Blocks became readable in DRAM, by whatever way."""
        if self._interest or self._expected:
            for block in blocks:
                self.block_arrived(block)

    def block_arrived(self, block: Block) -> None:
        self._expected.arrived(block.hash)
        if block.hash not in self._interest:
            return
        for awaited in self._interest.pop(block.hash):
            lease, number = awaited.lease, awaited.number
            if number >= lease.usable or lease.namespace is not block.namespace:
                continue
            if lease.blocks[number] is None:
                self._holdings.catalog.pin(block)
                lease.blocks[number] = block
                self._holdings.counters["hit_blocks_peer"] += 1
            if not lease.is_readable(number):
                lease.moved = min(lease.moved, number)  # parts of it have still to be brought
            self._advance(lease)

    # ---- inner steps ----

    def _within_limit(
        self,
        limit_bytes: int,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
    ) -> Sequence[BlockHash]:
        fitting = blocks_that_fit(limit_bytes, self.leases.of(session), namespace, hashes)
        if fitting == len(hashes):
            return hashes
        self._holdings.counters["lease_limited_blocks"] += len(hashes) - fitting
        if not fitting:
            raise PoolFullError(
                f"the session's leases hold all of the {limit_bytes} bytes that it may lease;"
                " release those not needed, or raise daemon.lease_share"
            )
        return hashes[:fitting]

    def _readable_now(
        self, session: SessionId, namespace: StoredNamespace, found: list[Block]
    ) -> list[Block]:
        """The longest hit that can be read at once; what else is here only starts moving."""
        needs = namespace.needs(len(found))
        number = needs.count_readable(found, 0)
        if number == len(found):
            return found
        readable = found[:number]
        if not needs.is_divisible:
            readable = found[: namespace.longest_hit([readable_parts(b, namespace) for b in found])]
        self.prefetches.start_behind(session, namespace, found, DEFAULT_FILL_SECONDS)
        return readable

    def _resident(self, namespace: StoredNamespace, block_hash: BlockHash) -> Block | None:
        block = self._holdings.catalog.find(namespace, block_hash)
        return block if block is not None and (block.in_dram or block.in_ssd) else None

    def _grant(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        blocks: list[Block | None],
        seconds: float,
    ) -> Lease:
        sources = bytearray([_DRAM]) * len(blocks)
        for number, block in enumerate(blocks):
            if block is None:
                sources[number] = _PEER
            else:
                block.pins += 1  # catalog.pin, without a call for each block of a long prefix
                if not block.in_dram:
                    sources[number] = _SSD
        lease = self.leases.grant(
            session, namespace, hashes[: len(blocks)], blocks, sources, self._clock() + seconds
        )
        lease.advance()
        return lease

    def _weigh(self, lease: Lease) -> None:
        """Shrink the lease to what is worth waiting for."""
        if lease.recompute_seconds is None:
            return
        worth = self.estimates.usable_worth(lease, lease.recompute_seconds)
        if worth < lease.usable:
            before = lease.usable
            gone = lease.shrink(worth) if lease.needs.is_divisible else lease.freeze()
            self._holdings.counters["not_worth_blocks"] += before - lease.usable
            self._give_up(lease, gone)

    def _fill(self, lease: Lease, seconds: float) -> None:
        """Start to bring what is not readable yet, with a deadline for all of it."""
        loop = asyncio.get_running_loop()
        self._timers[lease.id] = loop.call_later(seconds, self._freeze, lease)
        for number in range(lease.arrived, lease.usable):
            if lease.blocks[number] is None:
                self._interest[lease.hashes[number]].append(_Awaited(lease, number))
        self._move(lease)

    def _move(self, lease: Lease) -> None:
        """Set the next blocks in motion, up to the window or the next that a peer must send.

        A block that cannot be moved ends the prefix.
        """
        while not lease.is_complete:
            number = max(lease.moved, lease.arrived)
            end = min(lease.usable, lease.arrived + MOVE_WINDOW_BLOCKS)
            while number < end and self._set_in_motion(lease, number):
                number += 1
            lease.moved = number
            if number == end or lease.blocks[number] is None:
                return
            self._give_up(lease, lease.shrink(number))

    def _set_in_motion(self, lease: Lease, number: int) -> bool:
        """Whether a block is readable or now on its way to be."""
        block = lease.blocks[number]
        if block is None:
            return False
        if not lease.is_readable(number):
            if not self.promoter.bring(block, lease.needs.parts(number)):
                return False
            waiting, mine = self._interest[block.hash], _Awaited(lease, number)
            if mine not in waiting:
                waiting.append(mine)
        return True

    def _freeze(self, lease: Lease) -> None:
        """The deadline passed: what is ready is all there will be."""
        if not lease.is_ended:
            self._give_up(lease, lease.freeze())

    def _settled(self, block: Block, is_readable: bool) -> None:
        if is_readable:
            self.block_arrived(block)
        else:
            for awaited in self._interest.pop(block.hash, []):
                if awaited.number < awaited.lease.usable:
                    self._shrink(awaited.lease, awaited.number)
        self.prefetches.settled(block, is_readable)

    def _advance(self, lease: Lease) -> None:
        if lease.advance():
            self._wake(lease)
        if not lease.is_complete:
            self._move(lease)
        if lease.is_complete:
            self._stop_filling(lease)

    def _shrink(self, lease: Lease, usable: int) -> None:
        """Block number `usable` cannot be brought; what remains may need other parts."""
        self._give_up(lease, lease.shrink(usable))
        self._move(lease)

    def _give_up(self, lease: Lease, gone: list[Block]) -> None:
        for block in gone:
            self._lose_interest(lease, block.hash)
        self._withdraw(gone)
        self._holdings.unpin(gone)
        if gone:
            self.peer_ranges.end(lease.id)  # what is left is allowed anew with the next answer
        if lease.id in self._pulling and None not in lease.blocks:
            self._stop_pulling(lease)
        if lease.is_complete:
            self._stop_filling(lease)
        self._wake(lease)

    def _stop_filling(self, lease: Lease) -> None:
        timer = self._timers.pop(lease.id, None)
        if timer is not None:
            timer.cancel()
            self._weighed.pop(lease.id, None)
            for block_hash in lease.hashes if self._interest else ():
                self._lose_interest(lease, block_hash)

    def _lose_interest(self, lease: Lease, block_hash: BlockHash) -> None:
        waiting = self._interest.pop(block_hash, [])
        left = [awaited for awaited in waiting if awaited.lease is not lease]
        if left:
            self._interest[block_hash] = left

    def _withdraw(self, blocks: Iterable[Block]) -> None:
        """Call off the moves that nobody waits for any more, and no thread has begun."""
        for block in blocks:
            if self.promoter.is_moving(block) and not self._is_wanted(block):
                self.promoter.withdraw(block)

    def _is_wanted(self, block: Block) -> bool:
        return block.hash in self._interest or self.prefetches.wants(block)

    async def _woken(self, lease: Lease, until: float) -> None:
        """Return when something changed about the lease, or at loop time `until`."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(until, _set, woken)
        self._waiters.setdefault(lease.id, []).append(woken)
        try:
            await woken
        finally:
            timer.cancel()
            others = self._waiters.get(lease.id, [])
            if woken in others:
                others.remove(woken)
                if not others:
                    del self._waiters[lease.id]

    def _wake(self, lease: Lease) -> None:
        for waiter in self._waiters.pop(lease.id, ()):
            _set(waiter)

    def _close(self, lease: Lease) -> None:
        """What every way a lease can end does."""
        self.peer_ranges.end(lease.id)
        self._stop_filling(lease)
        if lease.id in self._pulling:
            self._stop_pulling(lease)
        held = [*filter(None, lease.blocks)]
        if self.promoter.in_flight:
            self._withdraw(held)
        self._holdings.unpin(held)
        self._wake(lease)
        passing = self._read_through.pop(lease.id, None)
        if passing and self._holdings.is_over_low_watermark:
            self._holdings.drop_copies(passing)

    def _stop_pulling(self, lease: Lease) -> None:
        """Nobody waits for the peer's blocks any more; what has landed stays."""
        task = self._pulling.pop(lease.id)
        if task is not asyncio.current_task():
            task.cancel()

    async def _pull(self, lease: Lease, seconds: float, target: PullTarget) -> None:
        """Bring the lease's missing runs from peers, one after the other."""
        until = self._clock() + seconds
        while not lease.is_ended and None in lease.blocks:
            start = lease.blocks.index(None)
            stop = start
            while stop < lease.usable and lease.blocks[stop] is None:
                stop += 1
            parent = lease.hashes[start - 1] if start else None
            run = lease.hashes[start:stop]
            await self.pulls.run(lease.namespace, parent, run, target, until - self._clock())
            if not lease.is_ended and None in lease.blocks[start:stop]:
                self._shrink(lease, lease.blocks.index(None))
            elif not lease.is_ended:
                self._move(lease)
            self._holdings.publish()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
