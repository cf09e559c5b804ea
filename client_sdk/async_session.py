"""A session on an asyncio transport: answers matched to requests, many in flight at once."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import Message

from client_sdk.attached_pool import AttachedPool
from client_sdk.session import (
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
from emberkv_proto.errors import FrameError, UnavailableError
from emberkv_proto.v1 import store_pb2
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
        elif answer.header.method is Method.PREFETCH:
            begun = read_payload(
                answer.header, memoryview(answer.payload), store_pb2.PrefetchResponse
            )
            if begun.prefetch_id:
                cancel = store_pb2.CancelPrefetchRequest(prefetch_id=begun.prefetch_id)
                self.send(Method.CANCEL_PREFETCH, cancel).cancel()

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
