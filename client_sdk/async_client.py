"""The asyncio client: same calls and same guarantees as `SyncClient`, many in flight at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from google.protobuf.message import Message

from client_sdk.async_session import AsyncSession, open_async_session
from client_sdk.borrowed import LeasedBlocks, StagedBlocks, pack_hashes
from client_sdk.connection import IDLE_BEAT_SECONDS, ClientCounters
from client_sdk.patience import (
    DEFAULT_PATIENCE,
    WAIT_SLICE_SECONDS,
    Patience,
    check_seconds,
)
from client_sdk.prefetch import AsyncPrefetch, HintedSource, prefetch_request
from client_sdk.session import Backoff, Endpoint, M, SessionLostError, SessionState, Terms
from client_sdk.status import NodeStatus, status_from_wire
from client_sdk.sync_client import TIER_SETS, ProbeResult
from emberkv_proto.errors import (
    EmberError,
    StaleIncarnationError,
    UnavailableError,
)
from emberkv_proto.layout import Namespace
from emberkv_proto.types import (
    AcquirePolicy,
    BlockHash,
    EngineInfo,
    Incarnation,
    NodeId,
    SaltId,
)
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import Method


class AsyncLease(LeasedBlocks):
    """A lease got by `AsyncClient.acquire`. Leaving its `async with` block releases it."""

    def __init__(
        self,
        client: AsyncClient,
        session: AsyncSession,
        asked_blocks: int,
        granted: store_pb2.AcquireResponse,
        sent_at: float,
    ) -> None:
        super().__init__(session, asked_blocks, granted, sent_at)
        self._client = client

    async def wait(self, blocks: int, timeout_seconds: float) -> int:
        """As `Lease.wait`. Cancelling leaves the lease as it is."""
        deadline = time.monotonic() + check_seconds(timeout_seconds)
        while self.ready_blocks < min(blocks, self.usable_blocks):
            self.require_valid()
            left_seconds = max(deadline - time.monotonic(), 0.0)
            slice_seconds = min(left_seconds, WAIT_SLICE_SECONDS)
            from_block = self.ready_blocks
            answer = await self._client.call_on(
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
                self._client.lose(self._session, str(error))
                raise
            if left_seconds <= 0:
                break
        return self.ready_blocks

    async def release(self) -> None:
        """As `Lease.release`."""
        if self._end():
            await self._client.tell(
                self._session, Method.RELEASE, store_pb2.ReleaseRequest(lease_ids=[self._id])
            )

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_released:
            await self.release()


class AsyncStagedWrite(StagedBlocks):
    """Slots got by `AsyncClient.stage`. Leaving its `async with` block aborts the uncommitted."""

    def __init__(
        self,
        client: AsyncClient,
        session: AsyncSession,
        hashes: Sequence[BlockHash],
        granted: store_pb2.StageResponse,
        sent_at: float,
    ) -> None:
        super().__init__(session, hashes, granted, sent_at)
        self._client = client

    async def commit(
        self, indices: Sequence[int] | None = None, checksums: Sequence[int] | None = None
    ) -> int:
        """As `StagedWrite.commit`. Computing checksums takes the loop's time: bring them along."""
        if not self._is_open and indices is None:
            return 0
        chosen = self._chosen(indices)
        return await self._commit(chosen, self._commit_request(chosen, checksums))

    async def commit_unsummed(self, indices: Sequence[int] | None = None) -> int:
        """As `StagedWrite.commit_unsummed`."""
        if not self._is_open and indices is None:
            return 0
        chosen = self._chosen(indices)
        return await self._commit(chosen, self._unsummed_request(chosen))

    async def _commit(self, chosen: Sequence[int], request: store_pb2.CommitRequest) -> int:
        answer = await self._client.call_on(
            self._session, Method.COMMIT, request, store_pb2.CommitResponse
        )
        self._committed(chosen)
        return answer.committed_blocks

    async def abort(self) -> None:
        """As `StagedWrite.abort`."""
        if self._end():
            await self._client.tell(
                self._session, Method.ABORT, store_pb2.AbortRequest(stage_id=self._id)
            )

    async def __aenter__(self) -> AsyncStagedWrite:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.abort()


class AsyncClient:
    """As `SyncClient`, on one event loop; calls run concurrently and may be cancelled."""

    def __init__(
        self,
        socket_path: Path | str,
        namespace: Namespace,
        *,
        part: int = 0,
        engine: EngineInfo | None = None,
        client_name: str = "",
        timeout_seconds: float = 1.0,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """Does not connect: the daemon may be away. Raises as `SyncClient` does."""
        namespace.part_bytes(part)
        self._endpoint = Endpoint(Path(socket_path), namespace, part, engine, client_name)
        self._endpoint.check_path()
        self._timeout_seconds = check_seconds(timeout_seconds)
        self._patience = patience
        self._block_tokens = namespace.block_tokens
        self.counters = ClientCounters()
        self.is_draining = False
        self._backoff = Backoff()
        self._last_failure = ""
        self._has_connected = False
        self._is_closed = False
        self._session: AsyncSession | None = None
        self._opening = asyncio.Lock()
        self._beater: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._live() is not None

    @property
    def node_id(self) -> NodeId:
        """Raises UnavailableError when there is no session."""
        return self._terms().node_id

    @property
    def incarnation(self) -> Incarnation:
        """Raises UnavailableError when there is no session."""
        return self._terms().incarnation

    async def connect(self) -> None:
        """As `SyncClient.connect`."""
        async with self._opening:
            if self._live() is None:
                await self._open()

    async def probe(self, hashes: Sequence[BlockHash]) -> ProbeResult:
        """As `SyncClient.probe`."""
        answer = await self._call(
            Method.PROBE,
            store_pb2.ProbeRequest(hashes=pack_hashes(hashes)),
            store_pb2.ProbeResponse,
        )
        return ProbeResult(answer.hit_blocks, tuple(TIER_SETS[bits] for bits in answer.tiers))

    async def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        policy: AcquirePolicy = AcquirePolicy.TIMEOUT,
        deadline_seconds: float | None = None,
        recompute_seconds_per_block: float | None = None,
    ) -> AsyncLease:
        """As `SyncClient.acquire`."""
        if deadline_seconds is None:
            tokens = len(hashes) * self._block_tokens
            deadline_seconds = self._patience.deadline_seconds(policy, tokens)
        request = store_pb2.AcquireRequest(
            hashes=pack_hashes(hashes),
            policy=int(policy),  # type: ignore[arg-type]
            deadline_seconds=check_seconds(deadline_seconds),
            recompute_seconds_per_block=check_seconds(recompute_seconds_per_block or 0.0),
        )
        session = await self._ready()
        sent_at = time.monotonic()
        answer = await self._ask(session, Method.ACQUIRE, request, store_pb2.AcquireResponse)
        try:
            return AsyncLease(self, session, len(hashes), answer, sent_at)
        except SessionLostError as error:
            self.lose(session, str(error))
            raise

    async def stage(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
    ) -> AsyncStagedWrite:
        """As `SyncClient.stage`."""
        request = store_pb2.StageRequest(
            hashes=pack_hashes(hashes),
            parent=pack_hashes([parent] if parent else []),
            salt_id=salt_id or b"",
        )
        session = await self._ready()
        sent_at = time.monotonic()
        answer = await self._ask(session, Method.STAGE, request, store_pb2.StageResponse)
        try:
            return AsyncStagedWrite(self, session, hashes, answer, sent_at)
        except SessionLostError as error:
            self.lose(session, str(error))
            raise

    async def prefetch(self, hashes: Sequence[BlockHash], deadline_seconds: float) -> int:
        """As `SyncClient.prefetch`."""
        return (await self.start_prefetch(hashes, deadline_seconds)).scheduled_blocks

    async def start_prefetch(
        self,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        source: HintedSource | None = None,
    ) -> AsyncPrefetch:
        """As `SyncClient.start_prefetch`. Cancelling the call cancels the prefetch."""
        request = prefetch_request(hashes, deadline_seconds, source)
        session = await self._ready()
        answer = await self._ask(session, Method.PREFETCH, request, store_pb2.PrefetchResponse)
        return AsyncPrefetch(self, session, answer)

    async def heartbeat(self) -> None:
        """As `SyncClient.heartbeat`."""
        session = await self._ready()
        answer = await self._ask(
            session, Method.HEARTBEAT, store_pb2.HeartbeatRequest(), store_pb2.HeartbeatResponse
        )
        self.is_draining = answer.draining
        session.renew(time.monotonic())

    async def status(self) -> NodeStatus:
        """As `SyncClient.status`."""
        return status_from_wire(
            await self._call(Method.STATUS, store_pb2.StatusRequest(), store_pb2.StatusResponse)
        )

    async def close(self) -> None:
        """End the session with its leases and stages, and the heartbeat task. Idempotent."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()
            self._session = None
        beater, self._beater = self._beater, None
        if beater is not None:
            beater.cancel()
            await asyncio.wait([beater], timeout=self._timeout_seconds)
        # Let the transport's own callback close its socket before the caller goes on.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def check_integrity(self) -> None:
        if self._session is not None:
            self._session.check_integrity()
        assert not (self._is_closed and (self._session or self._beater)), "closed, but not quiet"

    async def call_on(
        self,
        session: SessionState,
        method: Method,
        request: Message,
        answer: type[M],
        wait_seconds: float = 0.0,
    ) -> M:
        """Ask on this very session, whose lease or stage the request names.

        Raises:
            StaleIncarnationError: it is over.
            EmberError: what the daemon answered.
        """
        own = self._live()
        if own is None or own is not session:
            raise StaleIncarnationError(
                f"the session with node {session.terms.node_id} is over; ask again"
            )
        return await self._ask(own, method, request, answer, wait_seconds)

    async def tell(self, session: SessionState, method: Method, request: Message) -> None:
        """Tell the daemon that something ended. If it is away, that has ended by itself."""
        try:
            await self.call_on(session, method, request, common_pb2.Empty)
        except (UnavailableError, StaleIncarnationError):
            return  # counted already

    def lose(self, session: SessionState, why: str) -> None:
        """End a session that broke, or whose answers do not add up."""
        self._last_failure = why
        session.retire()
        if self._session is session:
            self._session = None

    async def _call(self, method: Method, request: Message, answer: type[M]) -> M:
        return await self._ask(await self._ready(), method, request, answer)

    async def _ask(
        self,
        session: AsyncSession,
        method: Method,
        request: Message,
        answer: type[M],
        wait_seconds: float = 0.0,
    ) -> M:
        self.counters.calls += 1
        try:
            result = await session.call(
                method, request, answer, self._timeout_seconds + wait_seconds
            )
        except SessionLostError as error:
            self.counters.errors += 1
            self.lose(session, str(error))
            raise
        except EmberError:
            self.counters.errors += 1
            raise
        self._backoff.succeeded()
        return result

    async def _ready(self) -> AsyncSession:
        self._keep_beating()
        session = self._live()
        if session is not None:
            return session
        async with self._opening:
            session = self._live()
            if session is not None:
                return session
            try:
                self._require_open()
                wait_seconds = self._backoff.wait_seconds(time.monotonic())
                if wait_seconds > 0:
                    raise UnavailableError(
                        f"{self._last_failure} (next attempt in {wait_seconds:.1f} s)"
                    )
                return await self._open()
            except UnavailableError:
                self.counters.errors += 1
                raise
            except EmberError as error:
                # While serving, a daemon that refuses us is as good as none.
                self.counters.errors += 1
                raise UnavailableError(str(error)) from error

    async def _open(self) -> AsyncSession:
        self._keep_beating()
        self._require_open()
        if self._session is not None:
            self._session.retire()
        began = time.monotonic()
        try:
            session = await open_async_session(self._endpoint, self._timeout_seconds)
        except EmberError as error:
            now = time.monotonic()
            self._backoff.failed(now, now - began)
            self._last_failure = str(error)
            raise
        if self._is_closed:
            session.close()
            raise UnavailableError("this client was closed while it connected")
        self._session = session
        self.counters.reconnects += self._has_connected
        self._has_connected = True
        return session

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this client is closed")

    def _live(self) -> AsyncSession | None:
        session = self._session
        return session if session is not None and session.is_alive else None

    def _terms(self) -> Terms:
        session = self._live()
        if session is None:
            raise UnavailableError(f"not connected to {self._endpoint.socket_path}")
        return session.terms

    def _keep_beating(self) -> None:
        if not self._is_closed and (self._beater is None or self._beater.done()):
            self._beater = asyncio.create_task(self._beat_until_closed(), name="emberkv-heartbeat")

    async def _beat_until_closed(self) -> None:
        while not self._is_closed:
            session = self._live()
            await asyncio.sleep(session.terms.heartbeat_seconds if session else IDLE_BEAT_SECONDS)
            with contextlib.suppress(EmberError):  # counted already; the next beat tries again
                if self._live() or not self._backoff.wait_seconds(time.monotonic()):
                    await self.heartbeat()
