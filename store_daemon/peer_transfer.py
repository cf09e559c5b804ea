"""Reads a leased run of blocks into its room: in chunks, verified in threads, landed in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from client_sdk import faults
from client_sdk.transport.base import Cancellation, Peer, Segment
from emberkv_proto.errors import CorruptionError, DeadlineError, IntegrityError
from emberkv_proto.hashing import checksum
from emberkv_proto.types import BlockHash
from store_daemon.peer_client import RemoteGrant
from store_daemon.ports import PoolRange, PullRoom
from store_daemon.transport.base import Transport

_SEGMENTS_PER_READ = 1024


@dataclass(frozen=True, slots=True)
class TransferLimits:
    blocks_per_read: int = 8
    reads_in_flight: int = 2
    """Of one transfer: the next chunk travels while the last one is verified."""
    threads: int = 8


class PeerTransfers:
    """Runs transfers from peers. Belongs to one event loop; blocking reads run in its threads."""

    def __init__(
        self,
        pool: memoryview,
        transport: Transport,
        limits: TransferLimits | None,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool.cast("B")
        self._transport = transport
        self._limits = limits or TransferLimits()
        self._clock = clock
        self._threads = ThreadPoolExecutor(self._limits.threads, "emberkv-pull")
        self._cancellations: set[Cancellation] = set()

    @property
    def running(self) -> int:
        return len(self._cancellations)

    async def run(
        self,
        peer: Peer,
        remote: RemoteGrant,
        room: PullRoom,
        hashes: Sequence[BlockHash],
        deadline: float,
        on_landed: Callable[[BlockHash], None],
    ) -> None:
        """Fill and land the room's blocks in order, telling of each.

        However it ends, cancelled included, no thread writes into the room afterwards.

        Raises:
            DeadlineError: the deadline passed first.
            CorruptionError: a block does not match its checksum; those before it are landed.
            EmberError: what the transport raised.
        """
        ranges = [tuple(parts) for parts in room.ranges[: remote.grant.usable_blocks]]
        _check_room(ranges, remote)
        step = self._limits.blocks_per_read
        chunks = deque(
            range(first, min(first + step, len(ranges))) for first in range(0, len(ranges), step)
        )
        cancellation = Cancellation()
        self._cancellations.add(cancellation)
        reads: deque[_Read] = deque()

        def begin() -> None:
            while chunks and len(reads) < self._limits.reads_in_flight:
                blocks = chunks.popleft()
                work = self._threads.submit(
                    self._read_chunk, peer, remote, ranges, blocks, deadline, cancellation
                )
                reads.append(_Read(blocks, work, asyncio.wrap_future(work)))

        try:
            begin()
            while reads:
                read = reads[0]
                left = max(0.0, deadline - self._clock())
                await asyncio.wait({read.ended}, timeout=left)
                if not read.ended.done():
                    raise DeadlineError(f"{read.blocks[0]} blocks came before the deadline")
                good = read.ended.result()
                reads.popleft()
                begin()  # what lands now does so beside the next bytes
                for block in read.blocks[:good]:
                    room.land(block, remote.block_checksums(block))
                    on_landed(hashes[block])
                room.publish()
                if good < len(read.blocks):
                    raise CorruptionError(
                        f"block {read.blocks[good]} from {remote.source.address}"
                        " does not match its checksum"
                    )
        finally:
            cancellation.cancel()
            try:
                await _join(reads)
            finally:
                self._cancellations.discard(cancellation)

    def _read_chunk(
        self,
        peer: Peer,
        remote: RemoteGrant,
        ranges: Sequence[Sequence[PoolRange]],
        blocks: range,
        deadline: float,
        cancellation: Cancellation,
    ) -> int:
        """Read `blocks` and return how many of them, from the first on, are right. Blocks."""
        segments = [
            Segment(here.offset, there.offset, there.length)
            for block in blocks
            for here, there in zip(ranges[block], remote.block_ranges(block), strict=True)
        ]
        faults.hit(faults.PEER_READ)
        found: list[int] = []
        for first in range(0, len(segments), _SEGMENTS_PER_READ):
            some = segments[first : first + _SEGMENTS_PER_READ]
            sums = self._transport.read(
                peer, remote.grant.lease_id, some, deadline - self._clock(), cancellation
            )
            found += map(self._checksum, some) if sums is None else sums
        faults.hit(faults.MID_TRANSFER)
        wanted = [one for block in blocks for one in remote.block_checksums(block)]
        parts = remote.grant.parts
        for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one != other:
                return at // parts
        return len(blocks)

    def _checksum(self, segment: Segment) -> int:
        end = segment.local_offset + segment.length
        with self._pool[segment.local_offset : end] as payload:
            return checksum(payload)

    def cancel(self) -> None:
        """Make all running transfers fail soon."""
        for cancellation in self._cancellations:
            cancellation.cancel()

    def close(self) -> None:
        """Join the threads and let go of the pool. No transfer may be running."""
        assert not self._cancellations, "closed while a transfer runs"
        self._threads.shutdown()
        self._pool.release()


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk under way in a thread."""

    blocks: range
    work: ConcurrentFuture[int]
    ended: asyncio.Future[int]


def _check_room(ranges: Sequence[Sequence[PoolRange]], remote: RemoteGrant) -> None:
    """A range of another length would let a read run into the next slot."""
    for block, parts in enumerate(ranges):
        here = [part.length for part in parts]
        there = [part.length for part in remote.block_ranges(block)]
        if here != there:
            raise IntegrityError(f"room of {here} bytes for a block of {there} bytes")


async def _join(reads: Sequence[_Read]) -> None:
    """Wait until no read runs, even while being cancelled; then pass the cancellation on."""
    for read in reads:
        read.work.cancel()  # takes those that no thread has begun
    interrupted: asyncio.CancelledError | None = None
    pending = {read.ended for read in reads}
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:  # noqa: PERF203 - the wait must be begun again
            interrupted = error
    for read in reads:
        if not read.ended.cancelled():
            read.ended.exception()  # the first failure is raised already
    if interrupted is not None:
        raise interrupted
