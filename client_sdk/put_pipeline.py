"""A buffer of blocks into the store, with the daemon's work beside the copies.

The slots of the next batch are asked for before a batch is copied, and the answer to its commit is
taken later: a put of many batches waits for the daemon at its begin and at its end only.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from client_sdk.batch_size import batch_blocks
from client_sdk.borrowed import Buffer, StagedBlocks, pack_hashes, stage_states, whole_parts
from client_sdk.connection import Connection
from client_sdk.session import Pending, Session
from emberkv_proto.errors import EmberError, InvalidRequestError
from emberkv_proto.hashing import checksum
from emberkv_proto.types import BlockHash, SaltId, StageState
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method

BATCH_BLOCKS = 64
"""See `batch_size`."""
PIECE_BYTES = 512 << 10
"""What is summed before it is copied: then the copy reads it out of the cache."""
MOST_UNANSWERED = 2
"""Commits of which the answer has not been looked at."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a put."""

    committed_blocks: int
    states: tuple[StageState, ...]
    """Of each block when it was staged. Behind a NO_SPACE that stayed one nothing was asked for:
    those blocks are NO_SPACE too."""


class _Batch(StagedBlocks):
    """Staged slots of some blocks, and the answer to their commit once that is sent."""

    def __init__(
        self,
        session: Session,
        blocks: range,
        hashes: Sequence[BlockHash],
        granted: store_pb2.StageResponse,
        sent_at: float,
    ) -> None:
        super().__init__(session, hashes, granted, sent_at)
        self.blocks = blocks
        self.chosen = self.granted

    @property
    def packed_states(self) -> bytes:
        """A StageState for each block."""
        return self._states

    def commit_request(self, checksums: Sequence[int]) -> store_pb2.CommitRequest:
        return self._commit_request(self.chosen, checksums)

    def committed(self) -> None:
        self._committed(self.chosen)

    def abort(self, connection: Connection) -> None:
        """Give back what is not committed. Idempotent; the daemon may be away."""
        if self._end():
            request = store_pb2.AbortRequest(stage_id=self._id)
            connection.tell(self._session, Method.ABORT, request)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A stage whose answer has not been taken."""

    blocks: range
    sent_at: float
    answer: Pending[store_pb2.StageResponse]


@dataclass(frozen=True, slots=True)
class _Committing:
    """A commit whose answer has not been taken."""

    batch: _Batch
    answer: Pending[store_pb2.CommitResponse]


class PutPipeline:
    """One put. A block is committed only after all its bytes were copied, and what is not committed
    is given back, whatever happens.
    """

    def __init__(
        self,
        connection: Connection,
        part_bytes: int,
        hashes: Sequence[BlockHash],
        buffer: Buffer,
        parent: BlockHash | None,
        salt_id: SaltId | None,
        checksums: Sequence[int] | None,
    ) -> None:
        """Raises InvalidRequestError unless buffer and checksums are those of the blocks."""
        source = whole_parts(buffer, part_bytes)
        if len(source) != len(hashes) * part_bytes:
            raise InvalidRequestError(
                f"a buffer of {len(source)} bytes for {len(hashes)} blocks of {part_bytes}"
            )
        if checksums is not None and len(checksums) != len(hashes):
            raise InvalidRequestError(f"{len(checksums)} checksums for {len(hashes)} blocks")
        self._connection = connection
        self._part_bytes = part_bytes
        self._hashes = hashes
        self._source = source.data
        self._parent = parent
        self._salt_id = salt_id
        self._checksums = checksums
        self._states = bytearray([StageState.NO_SPACE]) * len(hashes)
        self._asked: deque[_Asked] = deque()
        self._committing: deque[_Committing] = deque()
        self._batch: _Batch | None = None
        """The one that is copied."""
        self._committed_blocks = 0
        self._next = 0
        """The first block that is not asked for."""
        self._most_asked = 2
        self._cut_at: int | None = None
        """The block that had no space when this was seen last."""

    def run(self) -> PutResult:
        """Write all blocks that the daemon grants.

        Raises:
            EmberError: the first trouble, and how many blocks are committed all the same.
        """
        if not self._hashes:
            return PutResult(0, ())
        try:
            self._write_all(self._connection.live_session())
        except EmberError as error:
            self._give_up()
            raise type(error)(
                f"{error}; {self._committed_blocks} of {len(self._hashes)} blocks are known to be"
                " committed"
            ) from error
        except BaseException:
            self._give_up()
            raise
        return PutResult(self._committed_blocks, tuple(stage_states(self._states)))

    def check_integrity(self) -> None:
        """Assert that no slot is held once `run` has ended."""
        assert not self._asked, "a stage was asked for and forgotten"
        assert not self._committing, "a commit's answer was not taken"
        assert self._batch is None, "a batch was neither committed nor aborted"

    def _write_all(self, session: Session) -> None:
        self._session = session
        while self._asked or self._next < len(self._hashes):
            while len(self._asked) < self._most_asked and self._next < len(self._hashes):
                self._ask_next()
            batch = self._batch = self._take_grant()
            self._note(batch)
            if batch.chosen:
                request = batch.commit_request(self._copy(batch))
                answer = self._connection.send_on(
                    session, Method.COMMIT, request, store_pb2.CommitResponse
                )
                self._committing.append(_Committing(batch, answer))
            self._batch = None
            cut = batch.packed_states.find(StageState.NO_SPACE)
            if cut >= 0 and not self._go_on_alone(batch.blocks.start + cut):
                break
            while len(self._committing) > MOST_UNANSWERED:
                self._take_commit()
        while self._committing:
            self._take_commit()

    def _go_on_alone(self, block: int) -> bool:
        """Ask for a block again that had no space, once no other slot is held by us.

        There is a limit to what a session may hold. False: asked so, it had no space either.
        """
        self._abort_asked()
        while self._committing:
            self._take_commit()
        if block == self._cut_at:
            return False
        self._cut_at = self._next = block
        self._most_asked = 1
        return True

    def _note(self, batch: _Batch) -> None:
        if self._cut_at is None:  # each block was asked for once
            self._states[batch.blocks.start : batch.blocks.stop] = batch.packed_states
            return
        for block, state in zip(batch.blocks, batch.packed_states, strict=True):
            if self._states[block] == StageState.NO_SPACE:
                self._states[block] = state

    def _ask_next(self) -> None:
        size = batch_blocks(
            BATCH_BLOCKS, self._part_bytes, self._session.terms.pool_bytes, not self._next
        )
        blocks = range(self._next, min(self._next + size, len(self._hashes)))
        parent = self._hashes[blocks.start - 1] if blocks.start else self._parent
        request = store_pb2.StageRequest(
            hashes=pack_hashes(self._hashes[blocks.start : blocks.stop]),
            parent=pack_hashes([parent] if parent else []),
            salt_id=self._salt_id or b"",
        )
        sent_at = time.monotonic()
        answer = self._connection.send_on(
            self._session, Method.STAGE, request, store_pb2.StageResponse
        )
        self._asked.append(_Asked(blocks, sent_at, answer))
        self._next = blocks.stop

    def _take_grant(self) -> _Batch:
        asked = self._asked.popleft()
        blocks = asked.blocks
        hashes = self._hashes[blocks.start : blocks.stop]
        return self._connection.take(
            self._session,
            asked.answer,
            lambda answer: _Batch(self._session, blocks, hashes, answer, asked.sent_at),
        )

    def _take_commit(self) -> None:
        oldest = self._committing[0]
        taken = self._connection.take(
            self._session, oldest.answer, lambda answer: answer.committed_blocks
        )
        self._committing.popleft()
        self._committed_blocks += taken
        oldest.batch.committed()

    def _copy(self, batch: _Batch) -> Sequence[int]:
        """Write a batch's slots; return the checksums of its granted blocks."""
        if self._checksums is not None:
            batch.write_from(self._bytes_of(batch.blocks))
            sums_of_all = self._checksums[batch.blocks.start : batch.blocks.stop]
            if len(batch.chosen) == len(batch.blocks):
                return sums_of_all
            return [sums_of_all[i] for i in batch.chosen]
        sums: list[int] = []
        chosen = set(batch.chosen)
        size = max(1, PIECE_BYTES // self._part_bytes)
        for first in range(0, len(batch.blocks), size):
            piece = batch.blocks[first : first + size]
            sums += [
                checksum(self._bytes_of(range(block, block + 1)))
                for i, block in enumerate(piece, first)
                if i in chosen
            ]
            batch.write_from(self._bytes_of(piece), first)
        return sums

    def _bytes_of(self, blocks: range) -> memoryview:
        return self._source[blocks.start * self._part_bytes : blocks.stop * self._part_bytes]

    def _abort_asked(self) -> None:
        """Give back slots that were asked for in vain."""
        while self._asked:
            self._take_grant().abort(self._connection)

    def _give_up(self) -> None:
        """Take what answers still come, and give all slots back that are not committed.

        What fails here, after the failure that is told, is counted by the connection. A session
        that is lost ends this at once, and everything with it.
        """
        if self._batch is not None:
            self._batch.abort(self._connection)
            self._batch = None
        while self._committing:
            oldest = self._committing[0]
            with contextlib.suppress(EmberError):
                self._take_commit()
                continue
            oldest.batch.abort(self._connection)
            self._committing.popleft()
        while self._asked:
            with contextlib.suppress(EmberError):
                self._abort_asked()
