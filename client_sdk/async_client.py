"""The asyncio client: same calls and same guarantees as `SyncClient`, many in flight at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

from google.protobuf.message import Message

from client_sdk.attached_pool import AttachedPool
from client_sdk.borrowed import LeasedBlocks, StagedBlocks, pack_hashes
from client_sdk.connection import IDLE_BEAT_SECONDS, ClientCounters
from client_sdk.session import (
    Backoff,
    Endpoint,
    M,
    SessionLostError,
    SessionState,
    Terms,
    finish_handshake,
    hello_frame,
    missing_bytes,
    read_payload,
    receive_with_descriptors,
)
from client_sdk.status import NodeStatus, status_from_wire
from client_sdk.sync_client import (
    TIER_SETS,
    WAIT_SLICE_SECONDS,
    ProbeResult,
    check_seconds,
)
from emberkv_proto.errors import (
    EmberError,
    FrameError,
    StaleIncarnationError,
    UnavailableError,
)
from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, EngineInfo, Incarnation, NodeId
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import HEADER, FrameHeader, Method, pack_frame, unpack_header


@dataclass(frozen=True, slots=True)
class _Answer:
    header: FrameHeader
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Pending:
    method: Method
    future: asyncio.Future[_Answer]


class _Link(asyncio.Protocol):
    """Matches answers to requests. A cancelled request's grant is given back when it arrives."""

    def __init__(self) -> None:
        self.pending: dict[int, _Pending] = {}
        self.transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._last_request_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the daemon closed the connection: {error or 'end of stream'}")

    def send(self, method: Method, request: Message) -> asyncio.Future[_Answer]:
        """Raises FrameError when the request is too large, SessionLostError after the end."""
        if self.transport is None or self.transport.is_closing():
            raise SessionLostError("the connection is closed")
        self._last_request_id = (self._last_request_id + 1) & 0xFFFFFFFF
        frame = pack_frame(method, self._last_request_id, request.SerializeToString())
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self.pending[self._last_request_id] = _Pending(method, future)
        self.transport.write(frame)
        return future

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while len(self._received) >= HEADER.size:
                header = unpack_header(bytes(self._received[: HEADER.size]))
                end = HEADER.size + header.payload_bytes
                if len(self._received) < end:
                    return
                payload = bytes(self._received[HEADER.size : end])
                del self._received[:end]
                self._take(_Answer(header, payload))
        except (FrameError, SessionLostError) as error:
            self._fail(f"the daemon's answer is malformed: {error}")
            if self.transport is not None:
                self.transport.abort()

    def _take(self, answer: _Answer) -> None:
        asked = self.pending.get(answer.header.request_id)
        if asked is None or asked.method is not answer.header.method:
            raise SessionLostError(f"an answer to {answer.header.method.name} that nobody asked")
        del self.pending[answer.header.request_id]
        if not asked.future.done():
            asked.future.set_result(answer)
        elif answer.header.status == 0:
            self._give_back(answer)

    def _give_back(self, answer: _Answer) -> None:
        """The caller was cancelled; what it asked for must not stay granted."""
        if answer.header.method is Method.ACQUIRE:
            granted = read_payload(
                answer.header, memoryview(answer.payload), store_pb2.AcquireResponse
            )
            if granted.lease_id:
                request = store_pb2.ReleaseRequest(lease_ids=[granted.lease_id])
                self.send(Method.RELEASE, request).cancel()
        elif answer.header.method is Method.STAGE:
            staged = read_payload(
                answer.header, memoryview(answer.payload), store_pb2.StageResponse
            )
            if staged.stage_id:
                self.send(Method.ABORT, store_pb2.AbortRequest(stage_id=staged.stage_id)).cancel()

    def _fail(self, why: str) -> None:
        pending, self.pending = self.pending, {}
        for asked in pending.values():
            if not asked.future.done():
                asked.future.set_exception(SessionLostError(why))


class AsyncSession(SessionState):
    """A session on an asyncio transport. All calls on its loop."""

    def __init__(
        self, sock: socket.socket, link: _Link, terms: Terms, pool: AttachedPool | None
    ) -> None:
        super().__init__(sock, terms, pool)
        self._link = link
        self._loop = asyncio.get_running_loop()

    @property
    def is_alive(self) -> bool:
        transport = self._link.transport
        return super().is_alive and transport is not None and not transport.is_closing()

    async def call(self, method: Method, request: Message, answer: type[M], seconds: float) -> M:
        """Send one request and await its answer. Cancelling is safe: see `_Link`.

        Raises:
            SessionLostError: broken, too late or malformed; the caller retires the session.
            EmberError: what the daemon answered.
        """
        future = self._link.send(method, request)
        try:
            reply = await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            raise SessionLostError(
                f"the daemon of node {self.terms.node_id} did not answer {method.name} within"
                f" {seconds:.2f} s; the session is closed"
            ) from None
        return read_payload(reply.header, memoryview(reply.payload), answer)

    def check_integrity(self) -> None:
        """Assert that nobody waits on a session that is over."""
        if not self.is_alive:
            waiting = [p for p in self._link.pending.values() if not p.future.done()]
            assert not waiting, f"{len(waiting)} calls wait on a dead session"

    def _hang_up(self) -> None:
        # A dropped borrower may be collected in any thread, even after the loop.
        if self._link.transport is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._link.transport.abort)


async def open_async_session(endpoint: Endpoint, seconds: float) -> AsyncSession:
    """As `session.open_session`, on the running loop."""
    endpoint.check_path()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        sock.setblocking(False)
        return await asyncio.wait_for(_shake_hands(endpoint, sock, descriptors), seconds)
    except asyncio.TimeoutError:
        sock.close()
        raise UnavailableError(
            f"the daemon at {endpoint.socket_path} did not answer within {seconds:g} s;"
            " is it stopped or overloaded?"
        ) from None
    except OSError as error:
        sock.close()
        raise endpoint.describe(error) from None
    except BaseException:
        sock.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _shake_hands(
    endpoint: Endpoint, sock: socket.socket, descriptors: list[int]
) -> AsyncSession:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, os.fspath(endpoint.socket_path))
    await loop.sock_sendall(sock, hello_frame(endpoint))
    received = b""
    while missing_bytes(received, len(received)) > 0:
        await _readable(sock)
        received += receive_with_descriptors(sock, descriptors)
    terms, pool = finish_handshake(endpoint, received, descriptors)
    _, link = await loop.create_unix_connection(_Link, sock=sock)
    return AsyncSession(sock, link, terms, pool)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    loop.add_reader(sock, wake.set)
    try:
        await wake.wait()
    finally:
        loop.remove_reader(sock)


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
                    lease_id=self._id, from_block=from_block, timeout_seconds=slice_seconds
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
        request = self._commit_request(indices, checksums)
        answer = await self._client.call_on(
            self._session, Method.COMMIT, request, store_pb2.CommitResponse
        )
        self._committed(request)
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
    ) -> None:
        """Does not connect: the daemon may be away. Raises as `SyncClient` does."""
        namespace.part_bytes(part)
        self._endpoint = Endpoint(Path(socket_path), namespace, part, engine, client_name)
        self._endpoint.check_path()
        self._timeout_seconds = check_seconds(timeout_seconds)
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
        deadline_seconds: float = 1.0,
    ) -> AsyncLease:
        """As `SyncClient.acquire`."""
        request = store_pb2.AcquireRequest(
            hashes=pack_hashes(hashes),
            policy=int(policy),  # type: ignore[arg-type]
            deadline_seconds=check_seconds(deadline_seconds),
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
        self, hashes: Sequence[BlockHash], parent: BlockHash | None = None
    ) -> AsyncStagedWrite:
        """As `SyncClient.stage`."""
        request = store_pb2.StageRequest(
            hashes=pack_hashes(hashes), parent=pack_hashes([parent] if parent else [])
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
        request = store_pb2.PrefetchRequest(
            hashes=pack_hashes(hashes), deadline_seconds=check_seconds(deadline_seconds)
        )
        answer = await self._call(Method.PREFETCH, request, store_pb2.PrefetchResponse)
        return answer.scheduled_blocks

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
