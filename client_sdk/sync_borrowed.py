"""What the blocking client lends: leases to wait on and release, slots to commit or abort."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from client_sdk.borrowed import LeasedBlocks, StagedBlocks
from client_sdk.connection import Connection
from client_sdk.patience import WAIT_SLICE_SECONDS, check_seconds
from client_sdk.session import SessionLostError, SessionState
from emberkv_proto.types import BlockHash
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method


class Lease(LeasedBlocks):
    """A lease got by `SyncClient.acquire`. Leaving its `with` block releases it."""

    def __init__(
        self,
        connection: Connection,
        session: SessionState,
        asked_blocks: int,
        granted: store_pb2.AcquireResponse,
        sent_at: float,
    ) -> None:
        super().__init__(session, asked_blocks, granted, sent_at)
        self._connection = connection

    def wait(self, blocks: int, timeout_seconds: float) -> int:
        """Wait until `blocks` blocks are ready, all usable ones are, or the time is over.

        Returns how many are ready. `usable_blocks` shrinks when a block cannot be brought.

        Raises:
            UnavailableError: the daemon went away; the lease is void.
            UnknownLeaseError, StaleIncarnationError, LeaseExpiredError: see `require_valid`.
        """
        deadline = time.monotonic() + check_seconds(timeout_seconds)
        while self.ready_blocks < min(blocks, self.usable_blocks):
            self.require_valid()
            left_seconds = max(deadline - time.monotonic(), 0.0)
            slice_seconds = min(left_seconds, WAIT_SLICE_SECONDS)
            from_block = self.ready_blocks
            answer = self._connection.call_on(
                self._session,
                Method.WAIT,
                store_pb2.WaitRequest(
                    lease_id=self._id,
                    from_block=from_block,
                    timeout_seconds=slice_seconds,
                    until_block=min(blocks, self.usable_blocks),
                ),
                store_pb2.WaitResponse,
                slice_seconds,
            )
            try:
                self._extend(from_block, answer)
            except SessionLostError as error:
                self._connection.lose(self._session, str(error))
                raise
            if left_seconds <= 0:
                break
        return self.ready_blocks

    def release(self) -> None:
        """Give the blocks back. Views must not be read afterwards.

        A daemon that is away has released them already.

        Raises:
            UnknownLeaseError: released before, or a miss.
        """
        if self._end():
            self._connection.tell(
                self._session, Method.RELEASE, store_pb2.ReleaseRequest(lease_ids=[self._id])
            )

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_released:
            self.release()


class StagedWrite(StagedBlocks):
    """Slots got by `SyncClient.stage`. Leaving its `with` block aborts what is not committed."""

    def __init__(
        self,
        connection: Connection,
        session: SessionState,
        hashes: Sequence[BlockHash],
        granted: store_pb2.StageResponse,
        sent_at: float,
    ) -> None:
        super().__init__(session, hashes, granted, sent_at)
        self._connection = connection

    def commit(
        self, indices: Sequence[int] | None = None, checksums: Sequence[int] | None = None
    ) -> int:
        """Publish granted blocks, all or those of `indices`; return how many the daemon took.

        Checksums are computed here unless the caller has them. Blocks left out stay staged.

        Raises:
            InvalidRequestError: an index that was not granted, or is committed.
            UnknownStageError, StaleIncarnationError: too late; nothing was published.
            UnavailableError: the daemon went away; whether it took the blocks is unknown.
        """
        if not self._is_open and indices is None:
            return 0
        chosen = self._chosen(indices)
        return self._commit(chosen, self._commit_request(chosen, checksums))

    def commit_unsummed(self, indices: Sequence[int] | None = None) -> int:
        """As `commit`, but leave the checksums to the daemon, which computes them when it has time.

        Until then a reader on this node can use the blocks but not verify them (see
        `Lease.checksum`), and no other node gets them. A block that this daemon's death finds
        without one is trusted when it comes back.
        """
        if not self._is_open and indices is None:
            return 0
        chosen = self._chosen(indices)
        return self._commit(chosen, self._unsummed_request(chosen))

    def _commit(self, chosen: Sequence[int], request: store_pb2.CommitRequest) -> int:
        answer = self._connection.call_on(
            self._session, Method.COMMIT, request, store_pb2.CommitResponse
        )
        self._committed(chosen)
        return answer.committed_blocks

    def abort(self) -> None:
        """Give uncommitted slots back. Idempotent; the daemon may be away."""
        if self._end():
            self._connection.tell(
                self._session, Method.ABORT, store_pb2.AbortRequest(stage_id=self._id)
            )

    def __enter__(self) -> StagedWrite:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
