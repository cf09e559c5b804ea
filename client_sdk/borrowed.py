"""What a session lends: leased blocks to read, staged blocks to write.

Bookkeeping only; the clients ask the daemon. A view is plain memory: once handed out it cannot be
taken back, so a reader copies first and then asks `is_valid`, and trusts the copy only if it holds.
"""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from client_sdk.attached_pool import AttachedPool, PartPlaces
from client_sdk.session import SessionLostError, SessionState
from client_sdk.transport.base import TransportAddress
from emberkv_proto import hashing
from emberkv_proto.convert import u64_array_from_wire, u64s_from_wire, u64s_to_wire
from emberkv_proto.errors import (
    ChecksumUnknownError,
    CorruptionError,
    InvalidRequestError,
    LeaseExpiredError,
    StaleIncarnationError,
    UnknownLeaseError,
    UnknownStageError,
)
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash, Source, StageState
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

Buffer = Any
"""Whatever lends contiguous memory: bytes, a bytearray, a numpy array."""
_SOURCES = {int(source): source for source in Source}  # several times faster than Source(value)
_STAGE_STATES = {int(state): state for state in StageState}
_ALL_SOURCES, _ALL_STAGE_STATES = bytes(_SOURCES), bytes(_STAGE_STATES)


def stage_states(packed: bytes | bytearray) -> list[StageState]:
    """One for each byte. Raises KeyError on one that is none."""
    return [_STAGE_STATES[state] for state in packed]


def pack_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """Hashes as they travel.

    Raises:
        InvalidRequestError: over the limit of one call, or one that has not 32 bytes.
    """
    if len(hashes) > MAX_BLOCKS_PER_CALL:
        raise InvalidRequestError(f"{len(hashes)} blocks in one call, limit {MAX_BLOCKS_PER_CALL}")
    if not set(map(len, hashes)) <= {BLOCK_HASH_BYTES}:
        raise InvalidRequestError("a block hash has 32 bytes")
    return b"".join(hashes)


class LeasedBlocks:
    """The leading blocks of an acquire that may be read while the lease lasts.

    Blocks `[0, ready_blocks)` are readable now, up to `usable_blocks` may become so. A miss is a
    lease over no block. Any thread may read; one at a time waits.

    In a namespace with window or state groups some blocks are not needed (see `needs`), and the
    lease is good for a hit of exactly `usable_blocks`: a shorter one needs other blocks.
    """

    writes: ClassVar[bool] = False

    def __init__(
        self,
        session: SessionState,
        asked_blocks: int,
        granted: store_pb2.AcquireResponse,
        sent_at: float,
    ) -> None:
        """`sent_at`: monotonic seconds before the request left; expiry counts from there.

        Raises:
            SessionLostError: the answer does not add up.
        """
        self.usable_blocks = self._usable_at_grant = granted.usable_blocks
        self._sources = b""
        self.needed_from = 0
        """Number of the first block to be read."""
        self.seconds_to_complete: float = granted.seconds_to_complete
        """The daemon's estimate when it last answered; 0 when complete or not known."""
        self._session = session
        self._id = granted.lease_id
        self._offsets: list[int] = []
        self._checksums = array("Q")
        self._expires_at = sent_at + granted.expires_in_seconds
        self._is_released = not granted.lease_id
        if not granted.lease_id:
            self.usable_blocks = 0
            return
        if self.usable_blocks > asked_blocks:
            raise SessionLostError(f"{self.usable_blocks} blocks leased, {asked_blocks} asked")
        self._take(granted.offsets, granted.checksums, granted.ready_blocks, 0)
        self._sources = _checked_sources(granted.sources, self.usable_blocks)
        self._need(granted.needed_from)
        session.lend(self)

    @property
    def id(self) -> int:
        """By which the daemon knows it, over whatever way its bytes are read."""
        return self._id

    @property
    def transport(self) -> TransportAddress:
        """The daemon's, in the life that knows the id. Raises InvalidRequestError: it is mapped."""
        return self._session.transport

    @property
    def pool(self) -> AttachedPool:
        """What its views lie in. Raises InvalidRequestError: it is on another host."""
        return self._session.pool

    def offset(self, block: int) -> int:
        """Where a ready block is in the daemon's pool. Raises InvalidRequestError as `view`."""
        return self._offsets[self._checked(block)]

    @property
    def ready_blocks(self) -> int:
        return len(self._offsets)

    @property
    def sources(self) -> list[Source]:
        """Where each usable block was when the lease was granted. O(usable_blocks)."""
        return [_SOURCES[number] for number in self._sources]

    def needs(self, block: int) -> bool:
        """Whether the hit needs this session's part of the block; otherwise it has no view."""
        return block >= self.needed_from

    @property
    def is_complete(self) -> bool:
        """Whether every usable block can be read."""
        return self.ready_blocks >= self.usable_blocks

    @property
    def is_valid(self) -> bool:
        """Whether what was read up to now can be trusted. Ask after the copy, not before it."""
        return (
            not self._is_released and time.monotonic() < self._expires_at and self._session.stands
        )

    def require_valid(self) -> None:
        """Raise why `is_valid` is false.

        Raises:
            UnknownLeaseError: released, or a miss.
            StaleIncarnationError: the session is over; a new one has other leases.
            LeaseExpiredError: no heartbeat was answered in time.
        """
        self._require_held(self._session.stands)

    def _require_held(self, is_session_up: bool) -> None:
        if self._is_released:
            raise UnknownLeaseError("the lease was released, or is over no block")
        if not is_session_up:
            raise StaleIncarnationError(
                f"lease {self._id} ended with its session (incarnation"
                f" {self._session.terms.incarnation}); acquire again"
            )
        late = time.monotonic() - self._expires_at
        if late >= 0:
            raise LeaseExpiredError(f"lease {self._id} ended {late:.3f} s ago; acquire again")

    def view(self, block: int) -> memoryview:
        """Payload of this session's part of a ready block, read-only. O(1), copies nothing.

        Raises:
            InvalidRequestError: the block is not ready, or not needed.
            UnknownLeaseError, StaleIncarnationError, LeaseExpiredError: see `require_valid`, which
                is what to ask after the copy; here a session that broke unnoticed still passes.
        """
        self._require_held(self._session.is_alive)
        return self._session.pool.readable(self._offsets[self._checked(block)])

    def read_into(self, buffer: Buffer, first_block: int = 0) -> None:
        """Copy ready blocks, from `first_block` on, into a buffer of whole blocks, and confirm it.

        Faster than a copy for each `view`. What is in the buffer after an error is of no use.

        Raises:
            InvalidRequestError: a block that is not ready or not needed, or no such buffer.
            UnknownLeaseError, StaleIncarnationError, LeaseExpiredError: see `require_valid`.
        """
        pool = self._session.pool
        target = whole_parts(buffer, pool.part_bytes)
        if not target.flags.writeable:
            raise InvalidRequestError("the buffer is read-only")
        count = len(target) // pool.part_bytes
        if count:  # what holds of its first and last block holds of all between
            self._checked(first_block)
            self._checked(first_block + count - 1)
        self._require_held(self._session.is_alive)
        offsets = self._offsets[first_block : first_block + count]
        pool.read_places(PartPlaces(range(count), offsets), target)
        self.require_valid()

    def checksum(self, block: int) -> int | None:
        """What the block's writer committed, or the daemon computed; None: not known at the grant.

        Raises InvalidRequestError as `view` does.
        """
        known = self._checksums[self._checked(block)]
        return known if known != hashing.UNKNOWN_CHECKSUM else None

    def verify(self, block: int) -> None:
        """Compare the bytes with their checksum. Reads the whole part.

        Raises:
            CorruptionError: they differ; recompute the block.
            ChecksumUnknownError: there is nothing to compare with yet.
            UnknownLeaseError, StaleIncarnationError, LeaseExpiredError: see `require_valid`.
        """
        wanted = self.checksum(block)
        if wanted is None:
            raise ChecksumUnknownError(
                f"block {block} of lease {self._id} was committed without a checksum, which the"
                " daemon had not computed yet; acquire again, or recompute the block"
            )
        found = hashing.checksum(self.view(block))
        self.require_valid()
        if found != wanted:
            raise CorruptionError(
                f"block {block} of lease {self._id}: checksum {found:#018x},"
                f" committed was {wanted:#018x}"
            )

    def renew(self, answered_at: float, lease_seconds: float) -> None:
        """A heartbeat was answered; a lease that had run out by then stays so."""
        if answered_at < self._expires_at:
            self._expires_at = max(self._expires_at, answered_at + lease_seconds)

    def check_integrity(self) -> None:
        """Assert that the counts agree and every offset lies in the pool."""
        assert self.ready_blocks <= self.usable_blocks, "more ready than usable blocks"
        assert len(self._checksums) == self.ready_blocks, "a ready block has no checksum"
        assert len(self._sources) == self.usable_blocks, "a usable block has no source"
        assert self.needed_from <= self.usable_blocks, "a block beyond the lease is needed"
        assert self._session.shape.holds_all(self._offsets), "a block outside the pool"

    def __del__(self) -> None:
        # Half-built objects get here too.
        if not getattr(self, "_is_released", True):
            self._session.give_back(self)
            if self._session.is_alive:
                warnings.warn(f"lease {self._id} was dropped, not released", ResourceWarning, 2)

    def _extend(self, from_block: int, answer: store_pb2.WaitResponse) -> None:
        """Take over what a wait brought. Raises SessionLostError when it does not add up."""
        if answer.usable_blocks > self._usable_at_grant:
            raise SessionLostError("a lease grew while it was waited for")
        self.usable_blocks = min(self.usable_blocks, answer.usable_blocks)
        self.seconds_to_complete = answer.seconds_to_complete
        if from_block == self.ready_blocks <= self.usable_blocks:  # nobody else waited meanwhile
            self._take(answer.offsets, answer.checksums, answer.ready_blocks, from_block)
            brought = self.ready_blocks - from_block
            known = self._sources
            self._sources = (
                known[:from_block]
                + _checked_sources(answer.sources, brought)
                + known[self.ready_blocks :]
            )
        self._sources = self._sources[: self.usable_blocks]
        del self._offsets[self.usable_blocks :]
        del self._checksums[self.usable_blocks :]
        if answer.usable_blocks == self.usable_blocks:
            self._need(answer.needed_from)

    def _need(self, needed_from: int) -> None:
        if needed_from > self.usable_blocks:
            raise SessionLostError(f"a hit of {self.usable_blocks} needs block {needed_from}")
        self.needed_from = needed_from

    def _take(self, offsets: bytes, checksums: bytes, ready_blocks: int, from_block: int) -> None:
        brought = ready_blocks - from_block
        if brought < 0 or len(offsets) != 8 * brought or len(checksums) != 8 * brought:
            raise SessionLostError(
                f"{len(offsets)} bytes of offsets and {len(checksums)} of checksums"
                f" for {brought} ready blocks"
            )
        fresh = u64s_from_wire(offsets)
        pool = self._session.shape
        if ready_blocks > self.usable_blocks or not pool.holds_all(fresh):
            raise SessionLostError("a leased block lies outside the lease or the pool")
        self._offsets += fresh
        self._checksums += u64_array_from_wire(checksums)

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.ready_blocks:
            raise InvalidRequestError(f"block {block} is not one of {self.ready_blocks} ready ones")
        if not self.needs(block):
            raise InvalidRequestError(
                f"block {block} is outside the window, which begins at {self.needed_from}"
            )
        return block

    def _end(self) -> bool:
        """Give the lease back; return whether the daemon has still to be told."""
        if self._is_released:
            raise UnknownLeaseError(f"lease {self._id} is not held; it can be released once")
        self._is_released = True
        must_tell = self._session.is_alive
        self._session.give_back(self)
        return must_tell


class StagedBlocks:
    """Slots granted for blocks that are not in the store yet. Invisible until committed."""

    writes: ClassVar[bool] = True

    def __init__(
        self,
        session: SessionState,
        hashes: Sequence[BlockHash],
        granted: store_pb2.StageResponse,
        sent_at: float,
    ) -> None:
        """Raises SessionLostError when the answer does not add up."""
        self._session = session
        self._hashes = tuple(hashes)
        self._id = granted.stage_id
        self._offsets = u64s_from_wire(granted.offsets)
        self._expires_at = sent_at + session.terms.lease_seconds
        self._is_open = False
        count = len(self._hashes)
        if len(granted.states) != count or len(self._offsets) != count:
            raise SessionLostError(f"{len(granted.states)} states for {count} staged blocks")
        unknown = granted.states.translate(None, _ALL_STAGE_STATES)
        if unknown:
            raise SessionLostError(f"a stage state is unknown: {unknown[0]}")
        self._states = granted.states
        self._uncommitted = (
            {i for i, state in enumerate(granted.states) if not state}
            if any(granted.states)
            else set(range(count))
        )
        if bool(self._uncommitted) != bool(self._id):
            raise SessionLostError("a stage without slots has an id, or slots have none")
        if not session.shape.holds_all(self._offsets):  # 0 where nothing was granted
            raise SessionLostError("a staged slot lies outside the pool")
        self._is_open = bool(self._uncommitted)
        if self._is_open:
            session.lend(self)

    @property
    def id(self) -> int:
        """By which the daemon knows it, over whatever way its slots are written."""
        return self._id

    @property
    def transport(self) -> TransportAddress:
        """The daemon's, in the life that knows the id. Raises InvalidRequestError: it is mapped."""
        return self._session.transport

    @property
    def pool(self) -> AttachedPool:
        """What its views lie in. Raises InvalidRequestError: it is on another host."""
        return self._session.pool

    def offset(self, block: int) -> int:
        """Where a granted block's slot is in the daemon's pool. Raises as `view`."""
        return self._offsets[self._checked(block)]

    @property
    def states(self) -> list[StageState]:
        """What became of each block when it was staged. O(blocks)."""
        return stage_states(self._states)

    @property
    def granted(self) -> list[int]:
        """Numbers of the blocks that were granted and are not committed yet."""
        return sorted(self._uncommitted)

    @property
    def is_valid(self) -> bool:
        """Whether granted slots may still be written."""
        return self._is_open and self._session.is_alive and time.monotonic() < self._expires_at

    def require_valid(self) -> None:
        """Raise why `is_valid` is false.

        Raises:
            UnknownStageError: committed or aborted, or nothing was granted.
            StaleIncarnationError: the session is over, or was not heard of for too long.
        """
        if not self._is_open:
            raise UnknownStageError("nothing is staged here: committed, aborted or never granted")
        if not self.is_valid:
            raise StaleIncarnationError(
                f"stage {self._id} ended with its session (incarnation"
                f" {self._session.terms.incarnation}); stage again"
            )

    def view(self, block: int) -> memoryview:
        """The writable payload of a granted block.

        Every write, device copies included, must be over before `commit`; after it the bytes are
        others' to read.

        Raises:
            InvalidRequestError: the block was not granted, or is committed.
            UnknownStageError, StaleIncarnationError: see `require_valid`.
        """
        self.require_valid()
        return self._session.pool.writable(self._offsets[self._checked(block)])

    def write_from(self, buffer: Buffer, first_block: int = 0) -> None:
        """Copy blocks, from `first_block` on, out of a buffer of whole blocks into their slots.

        Blocks that were not granted, or are committed, are passed over. Faster than a copy for
        each `view`.

        Raises:
            InvalidRequestError: more blocks than were asked for, or no such buffer.
            UnknownStageError, StaleIncarnationError: see `require_valid`.
        """
        pool = self._session.pool
        source = whole_parts(buffer, pool.part_bytes)
        count = len(source) // pool.part_bytes
        if not 0 <= first_block <= len(self._hashes) - count:
            raise InvalidRequestError(
                f"blocks {first_block}..{first_block + count - 1} of {len(self._hashes)}"
            )
        self.require_valid()
        offsets = self._offsets[first_block : first_block + count]
        places = PartPlaces(range(count), offsets)
        if len(self._uncommitted) < len(self._hashes):
            numbers = [i for i in range(count) if first_block + i in self._uncommitted]
            places = PartPlaces(numbers, [offsets[i] for i in numbers])
        pool.write_places(places, source)

    def renew(self, answered_at: float, lease_seconds: float) -> None:
        if answered_at < self._expires_at:
            self._expires_at = max(self._expires_at, answered_at + lease_seconds)

    def check_integrity(self) -> None:
        """Assert that what is uncommitted was granted and lies in the pool."""
        assert not any(self._states[i] for i in self._uncommitted), "not granted"
        assert self._session.shape.holds_all([self._offsets[i] for i in self._uncommitted])
        assert self._is_open or not self._uncommitted, "closed with uncommitted blocks"

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self._session.give_back(self)
            if self._session.is_alive:
                warnings.warn(f"stage {self._id} was dropped, not closed", ResourceWarning, 2)

    def _chosen(self, indices: Sequence[int] | None) -> Sequence[int]:
        """The blocks that a commit is about. Raises InvalidRequestError."""
        if indices is None:
            return self.granted
        chosen = [*indices]
        if not self._uncommitted.issuperset(chosen):
            for block in chosen:
                self._checked(block)
        if len(set(chosen)) != len(chosen):
            raise InvalidRequestError("a block is named twice in one commit")
        return chosen

    def _commit_request(
        self, chosen: Sequence[int], checksums: Sequence[int] | None
    ) -> store_pb2.CommitRequest:
        if checksums is None:
            checksums = [hashing.checksum(self.view(i)) for i in chosen]
        if len(checksums) != len(chosen):
            raise InvalidRequestError(f"{len(checksums)} checksums for {len(chosen)} blocks")
        self.require_valid()
        return store_pb2.CommitRequest(
            stage_id=self._id,
            hashes=b"".join([self._hashes[i] for i in chosen]),
            checksums=u64s_to_wire(checksums),
        )

    def _unsummed_request(self, chosen: Sequence[int]) -> store_pb2.CommitRequest:
        self.require_valid()
        return store_pb2.CommitRequest(
            stage_id=self._id, hashes=b"".join([self._hashes[i] for i in chosen])
        )

    def _committed(self, chosen: Sequence[int]) -> None:
        """The daemon took these blocks."""
        self._uncommitted.difference_update(chosen)
        if not self._uncommitted:
            self._end()

    def _checked(self, block: int) -> int:
        if block not in self._uncommitted:
            raise InvalidRequestError(f"block {block} is not granted here, or is committed")
        return block

    def _end(self) -> bool:
        """Stop writing; return whether the daemon has still to be told of an abort."""
        must_tell = self._is_open and bool(self._uncommitted) and self._session.is_alive
        self._is_open = False
        self._uncommitted = set()
        self._session.give_back(self)
        return must_tell


def whole_parts(buffer: Buffer, part_bytes: int) -> npt.NDArray[np.uint8]:
    """The buffer's own bytes. Raises InvalidRequestError unless they are whole parts in one run."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise InvalidRequestError("the buffer is not contiguous")
    if view.nbytes % part_bytes:
        raise InvalidRequestError(f"{view.nbytes} bytes are no whole blocks of {part_bytes}")
    if not view.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def _checked_sources(packed: bytes, count: int) -> bytes:
    """Raises SessionLostError on a wrong count or an unknown source."""
    if len(packed) != count:
        raise SessionLostError(f"{len(packed)} sources for {count} blocks")
    unknown = packed.translate(None, _ALL_SOURCES)
    if unknown:
        raise SessionLostError(f"a block's source is unknown: {unknown[0]}")
    return packed
