"""A chain out of the store into one buffer, with the daemon's work beside the copies.

The next batch is asked for before one is copied, so a get of many batches waits for the daemon at
its begin only, and nothing is held longer than it takes to copy two batches.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client_sdk.batch_size import batch_blocks
from client_sdk.borrowed import Buffer, pack_hashes, whole_parts
from client_sdk.connection import Connection
from client_sdk.session import Pending, Session
from client_sdk.sync_borrowed import Lease
from emberkv_proto.errors import EmberError, InvalidRequestError
from emberkv_proto.types import AcquirePolicy, BlockHash
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method

BATCH_BLOCKS = 64
"""See `batch_size`."""
MOST_ASKED = 2


@dataclass(frozen=True, slots=True)
class _Asked:
    """An acquire whose answer has not been taken."""

    blocks: range
    sent_at: float
    answer: Pending[store_pb2.AcquireResponse]


class GetPipeline:
    """One get. Every lease it took is given back, whatever happens."""

    def __init__(
        self,
        connection: Connection,
        part_bytes: int,
        hashes: Sequence[BlockHash],
        buffer: Buffer,
        policy: AcquirePolicy,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidRequestError unless the buffer is one of as many blocks, and writable."""
        self._target = whole_parts(buffer, part_bytes)
        if len(self._target) != len(hashes) * part_bytes:
            raise InvalidRequestError(
                f"a buffer of {len(self._target)} bytes for {len(hashes)} blocks of {part_bytes}"
            )
        if len(self._target) and not self._target.flags.writeable:
            raise InvalidRequestError("the buffer is read-only")
        self._connection = connection
        self._part_bytes = part_bytes
        self._hashes = hashes
        self._policy = policy
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._asked: deque[_Asked] = deque()
        self._next = 0
        """The first block that is not asked for."""

    def run(self) -> int:
        """Copy the blocks of the longest prefix that can be had; return how many.

        Raises:
            InvalidRequestError: a hit needs a window of the chain only, see `Lease.needs`.
            EmberError: what is in the buffer is of no use.
        """
        if not self._hashes:
            return 0
        session = self._connection.live_session()
        deadline = self._clock() + self._deadline_seconds
        done = 0
        try:
            while self._asked or self._next < len(self._hashes):
                while len(self._asked) < MOST_ASKED and self._next < len(self._hashes):
                    self._ask_next(session, deadline)
                blocks = self._asked[0].blocks
                with self._take(session) as lease:
                    done += self._copy(lease, blocks, deadline)
                if done < blocks.stop:
                    break
        finally:
            while self._asked and session.is_alive:
                with contextlib.suppress(EmberError):  # what was copied stays good
                    self._take(session).__exit__(None, None, None)
            self._asked.clear()  # what a lost session held is free
        return done

    def check_integrity(self) -> None:
        """Assert that no lease is held once `run` has ended."""
        assert not self._asked, "blocks were asked for and forgotten"

    def _ask_next(self, session: Session, deadline: float) -> None:
        size = batch_blocks(
            BATCH_BLOCKS, self._part_bytes, session.terms.pool_bytes, not self._next
        )
        blocks = range(self._next, min(self._next + size, len(self._hashes)))
        request = store_pb2.AcquireRequest(
            hashes=pack_hashes(self._hashes[blocks.start : blocks.stop]),
            policy=int(self._policy),  # type: ignore[arg-type]
            deadline_seconds=max(deadline - self._clock(), 0.0),
        )
        sent_at = time.monotonic()
        answer = self._connection.send_on(
            session, Method.ACQUIRE, request, store_pb2.AcquireResponse
        )
        self._asked.append(_Asked(blocks, sent_at, answer))
        self._next = blocks.stop

    def _take(self, session: Session) -> Lease:
        asked = self._asked.popleft()
        return self._connection.take(
            session,
            asked.answer,
            lambda answer: Lease(
                self._connection, session, len(asked.blocks), answer, asked.sent_at
            ),
        )

    def _copy(self, lease: Lease, blocks: range, deadline: float) -> int:
        """Copy a batch's leading blocks, waiting for those on their way; return how many."""
        if lease.needed_from:
            raise InvalidRequestError(
                f"a hit needs the blocks from {blocks.start + lease.needed_from} on only; acquire"
            )
        copied = 0
        while copied < lease.usable_blocks:
            ready = lease.ready_blocks
            if ready == copied:
                ready = lease.wait(copied + 1, max(deadline - self._clock(), 0.0))
                if ready == copied:
                    break
            start = (blocks.start + copied) * self._part_bytes
            stop = (blocks.start + ready) * self._part_bytes
            lease.read_into(self._target[start:stop], copied)
            copied = ready
        return copied
