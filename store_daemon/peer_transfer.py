"""Reads a leased run of blocks into its room: in chunks, verified in threads, landed in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from client_sdk import faults
from client_sdk.transport.base import Cancellation, Peer, Segment
from emberkv_proto.errors import CorruptionError, DeadlineError, IntegrityError, UnavailableError
from emberkv_proto.hashing import checksum
from emberkv_proto.types import BlockHash
from store_daemon.chunk_reads import ChunkReads
from store_daemon.peer_client import RemoteGrant
from store_daemon.ports import PoolRange, PullRoom
from store_daemon.transport.base import FirstBytes, Transport

_SEGMENTS_PER_READ = 1024
PUBLISH_SECONDS = 0.05
"""Blocks that land sooner after others are announced with them, at the latest with the last."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    read_bytes: int = 8 << 20
    """What one read is for, as far as whole blocks come to it."""
    most_blocks_per_read: int = 64
    reads_in_flight: int = 2
    """Of one transfer."""
    threads: int = 8
    first_seconds: float = 5.0
    """How long what comes right behind a lease may take; then it is read like the rest."""
    first_threads: int = 4
    """For what comes right behind leases. It holds its connection already, and all other threads
    may be waiting for just that one: it must not wait for them."""

    def first_blocks(self, block_bytes: int, parts: int) -> int:
        """How many blocks may come right behind a lease: one read's, if that is few segments."""
        step = self.blocks_per_read(block_bytes)
        return step if step * parts <= _SEGMENTS_PER_READ else 0

    def blocks_per_read(self, block_bytes: int) -> int:
        return min(max(self.read_bytes // block_bytes, 1), self.most_blocks_per_read)


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
        self.limits = limits or TransferLimits()
        self._clock = clock
        self._threads = ThreadPoolExecutor(self.limits.threads, "emberkv-pull")
        self._first_threads = ThreadPoolExecutor(self.limits.first_threads, "emberkv-first")
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
        if not ranges:
            return
        _check_room(ranges, remote)
        step = self.limits.blocks_per_read(sum(part.length for part in ranges[0]))
        chunks = [
            range(first, min(first + step, len(ranges))) for first in range(0, len(ranges), step)
        ]
        first_bytes = remote.first
        if first_bytes is not None and first_bytes.byte_count != _byte_count(
            ranges[: len(chunks[0])]
        ):
            first_bytes.abandon()  # there is not room for all of it
            first_bytes = None
        cancellation = Cancellation()
        self._cancellations.add(cancellation)
        read = partial(self._read_chunk, peer, remote, first_bytes, ranges, deadline, cancellation)
        first_threads = self._first_threads if first_bytes is not None else None
        at_once = self.limits.reads_in_flight
        reads = ChunkReads(read, chunks, at_once, self._threads, first_threads)
        published_at = self._clock()
        try:
            for number, blocks in enumerate(chunks):
                left = max(0.0, deadline - self._clock())
                good = await reads.good_blocks(number, left)
                if good is None:
                    raise DeadlineError(f"{blocks[0]} blocks came before the deadline")
                for block in blocks[:good]:
                    room.land(block, remote.block_checksums(block))
                    on_landed(hashes[block])
                if self._clock() - published_at >= PUBLISH_SECONDS:
                    room.publish()
                    published_at = self._clock()
                if good < len(blocks):
                    raise CorruptionError(
                        f"block {blocks[good]} from {remote.source.address}"
                        " does not match its checksum"
                    )
        finally:
            cancellation.cancel()
            try:
                await reads.join()
            finally:
                self._cancellations.discard(cancellation)

    def _read_chunk(
        self,
        peer: Peer,
        remote: RemoteGrant,
        first_bytes: FirstBytes | None,
        ranges: Sequence[Sequence[PoolRange]],
        deadline: float,
        cancellation: Cancellation,
        blocks: range,
    ) -> int:
        """Read `blocks` and return how many of them, from the first on, are right. Blocks."""
        segments = [
            Segment(here.offset, there.offset, there.length)
            for block in blocks
            for here, there in zip(ranges[block], remote.block_ranges(block), strict=True)
        ]
        faults.hit(faults.PEER_READ)
        found: list[int] = []
        if first_bytes is not None and blocks[0] == 0:
            seconds = min(deadline - self._clock(), self.limits.first_seconds)
            try:
                found += first_bytes.take(segments, seconds, cancellation)
                segments = []
            except (UnavailableError, DeadlineError):
                # The lease stands without them, and a busy owner may yet answer.
                cancellation.check()
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
        self._first_threads.shutdown()
        self._pool.release()


def _byte_count(ranges: Sequence[Sequence[PoolRange]]) -> int:
    return sum(part.length for parts in ranges for part in parts)


def _check_room(ranges: Sequence[Sequence[PoolRange]], remote: RemoteGrant) -> None:
    """A range of another length would let a read run into the next slot."""
    for block, parts in enumerate(ranges):
        here = [part.length for part in parts]
        there = [part.length for part in remote.block_ranges(block)]
        if here != there:
            raise IntegrityError(f"room of {here} bytes for a block of {there} bytes")
