"""The client of an engine whose daemon is on another host, or has no mount in common with it.

Blocks go between the engine's registered memory and the daemon's slots without a copy in between:
from where they lie in the pages, on the GPU where that is, and back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from client_sdk.put_pipeline import PutResult
from client_sdk.remote_pool import RemotePool
from client_sdk.session import RemoteAddress
from client_sdk.sync_borrowed import Lease
from client_sdk.sync_client import SyncClient
from client_sdk.transport.base import Segment
from client_sdk.transport.frames import MAX_SEGMENTS
from emberkv_proto.errors import CorruptionError, InvalidRequestError
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, RunningChecksum
from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, EngineInfo, SaltId, StageState

BATCH_BYTES = 64 << 20
"""Of one call of the pool: what is staged at once, and what a failure costs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block where they lie in the engine's memory, counted through all its regions."""

    offset: int
    length: int


Pieces = Sequence[Piece]
"""A block's part: its pieces, in the order of the payload."""


class RemoteClient:
    """`put` and `get` for blocks that lie anywhere in one registered memory.

    A daemon that is away, stopped or restarted in the middle is an EmberError within `move_seconds`
    and the client's timeout: a miss for the engine. Threads may share it; calls of one session are
    serialised by it, moves are not.

    Args:
        view: the same memory as this process sees it, all regions in one, where it can: then
            checksums are computed and compared here. On a GPU there is none: the daemon computes
            them, and reads are protected by what the network checks.
    """

    def __init__(
        self,
        daemon: RemoteAddress,
        namespace: Namespace,
        pool: RemotePool,
        *,
        view: memoryview | None = None,
        part: int = 0,
        engine: EngineInfo | None = None,
        client_name: str = "",
        timeout_seconds: float = 2.0,
        move_seconds: float = 30.0,
    ) -> None:
        """Does not connect. The pool stays the caller's to close, after this client.

        Raises InvalidRequestError: no such part, or not host:port.
        """
        self.session = SyncClient(
            daemon,
            namespace,
            part=part,
            engine=engine,
            client_name=client_name,
            timeout_seconds=timeout_seconds,
        )
        self._pool = pool
        self._view = view
        self._part_bytes = namespace.part_bytes(part)
        self._move_seconds = move_seconds

    def put(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Pieces],
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
    ) -> PutResult:
        """Write the blocks of a chain: stage, write into the slots, commit; batch by batch.

        The pieces are not to be changed before this returns. What is not committed is given back.

        Raises:
            InvalidRequestError: pieces that are not of so many blocks.
            EmberError: what failed; batches before it are committed.
        """
        self._check(hashes, blocks)
        committed, states = 0, [StageState.NO_SPACE] * len(hashes)
        for batch in self._batches(blocks):
            before = hashes[batch.start - 1] if batch.start else parent
            run = [hashes[i] for i in batch]
            with self.session.stage(run, before, salt_id) as staged:
                states[batch.start : batch.stop] = staged.states
                granted = staged.granted
                if granted:
                    segments = [
                        segment
                        for i in granted
                        for segment in _segments(blocks[batch.start + i], staged.offset(i))
                    ]
                    self._pool.write(staged.transport, staged.id, segments, self._move_seconds)
                    sums = [self._checksum(blocks[batch.start + i]) for i in granted]
                    committed += staged.commit(granted, sums)
            if StageState.NO_SPACE in states[batch.start : batch.stop]:
                break
        return PutResult(committed, tuple(states))

    def get(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[Pieces],
        *,
        policy: AcquirePolicy = AcquirePolicy.TIMEOUT,
        deadline_seconds: float | None = None,
    ) -> int:
        """Read the longest prefix of a chain that can be had into its blocks' pieces; how many.

        Blocks behind those that it returns hold anything, and nothing writes into them afterwards.

        Raises:
            InvalidRequestError: pieces that are not of so many blocks, or a hit that needs a window
                only.
            CorruptionError: a block differs from its checksum; use none.
            EmberError: what failed.
        """
        self._check(hashes, blocks)
        if not hashes:
            return 0
        with self.session.acquire(
            hashes, policy=policy, deadline_seconds=deadline_seconds
        ) as lease:
            if lease.needed_from:
                raise InvalidRequestError("the hit needs a window only; get takes whole prefixes")
            until = time.monotonic() + (deadline_seconds or self._move_seconds)
            done = 0
            while done < lease.usable_blocks:
                if lease.ready_blocks <= done:
                    lease.wait(done + 1, max(0.0, until - time.monotonic()))
                if lease.ready_blocks <= done:
                    break
                for batch in self._batches(blocks[done : lease.ready_blocks]):
                    self._read(lease, blocks, range(done, done + len(batch)))
                    done += len(batch)
            return done

    def close(self) -> None:
        """End the session. Idempotent."""
        self.session.close()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check_integrity(self) -> None:
        self.session.check_integrity()

    def _read(self, lease: Lease, blocks: Sequence[Pieces], run: range) -> None:
        segments = [s for i in run for s in _segments(blocks[i], lease.offset(i))]
        self._pool.read(lease.transport, lease.id, segments, self._move_seconds)
        lease.require_valid()
        for number in run:
            wanted, found = lease.checksum(number), self._checksum(blocks[number])
            if wanted is not None and found not in (UNKNOWN_CHECKSUM, wanted):
                raise CorruptionError(
                    f"block {number} of lease {lease.id}: checksum {found:#018x},"
                    f" committed was {wanted:#018x}"
                )

    def _checksum(self, pieces: Pieces) -> int:
        """UNKNOWN_CHECKSUM where this process cannot see the bytes."""
        if self._view is None:
            return UNKNOWN_CHECKSUM
        running = RunningChecksum()
        for piece in pieces:
            with self._view[piece.offset : piece.offset + piece.length] as view:
                running.update(view)
        return running.value

    def _batches(self, blocks: Sequence[Pieces]) -> list[range]:
        """Runs of blocks that fit one call of the pool. A block alone always makes one."""
        most_bytes = max(1, BATCH_BYTES // self._part_bytes)
        runs, start, pieces = [], 0, 0
        for number, block in enumerate(blocks):
            full = number - start >= most_bytes or pieces + len(block) > MAX_SEGMENTS
            if full and number > start:
                runs.append(range(start, number))
                start, pieces = number, 0
            pieces += len(block)
        if start < len(blocks):
            runs.append(range(start, len(blocks)))
        return runs

    def _check(self, hashes: Sequence[BlockHash], blocks: Sequence[Pieces]) -> None:
        if len(hashes) != len(blocks):
            raise InvalidRequestError(f"pieces of {len(blocks)} blocks for {len(hashes)} hashes")
        for number, block in enumerate(blocks):
            length = sum(piece.length for piece in block)
            if length != self._part_bytes or len(block) > MAX_SEGMENTS:
                raise InvalidRequestError(
                    f"block {number} has {length} bytes in {len(block)} pieces; wanted are"
                    f" {self._part_bytes} in at most {MAX_SEGMENTS}"
                )


def _segments(pieces: Pieces, slot_offset: int) -> list[Segment]:
    segments = []
    for piece in pieces:
        segments.append(Segment(piece.offset, slot_offset, piece.length))
        slot_offset += piece.length
    return segments
