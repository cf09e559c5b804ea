"""Carries the servicer's calls over an AF_UNIX stream: frames, sessions, the pool's descriptor.

The connection is the session: when it closes, whatever it borrowed is given back. Calls are
answered as their frames arrive, in the same turn of the loop; only WAIT may be answered later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from emberkv_proto.errors import (
    AccessDeniedError,
    EmberError,
    FrameError,
    IntegrityError,
    InvalidRequestError,
    PreflightError,
    UnavailableError,
)
from emberkv_proto.wire import HEADER, FrameHeader, Method, pack_frame, unpack_header
from store_daemon.config import DaemonSection
from store_daemon.histogram import CALL_SAMPLE
from store_daemon.servicer import Servicer, error_detail
from store_daemon.sessions import Session

log = logging.getLogger(__name__)
MAX_SESSIONS = 1024
MAX_CONNECTIONS = 2 * MAX_SESSIONS
"""With those that have not said HELLO yet; the next is hung up on, to keep descriptors free."""
MAX_CALLS_IN_FLIGHT = 256
WRITE_BUFFER_BYTES = 1 << 20
UNREAD_SECONDS = 10.0
"""How long a client may leave our answers unread before it is cut off."""
HELLO_SECONDS = 10.0
TURN_SECONDS = 0.005
"""How long one client's calls may take before the loop serves the others."""
_CREDENTIALS = struct.Struct("3i")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    pid: int
    uid: int


class LocalServer:
    """Listens on the socket path. Created and closed on the loop that serves.

    The socket is for its owner only, unless other users are allowed: then also for its group.
    """

    def __init__(self, settings: DaemonSection, servicer: Servicer) -> None:
        self._settings = settings
        self._servicer = servicer
        self._allowed = set(settings.allowed_uids) | {os.geteuid()}
        self._server: asyncio.AbstractServer | None = None
        self._inode = 0
        self.connections: set[Connection] = set()
        self._all_gone = asyncio.Event()

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    async def start(self) -> None:
        """Raises PreflightError when the path cannot be listened on."""
        path = self._settings.socket_path
        listener = listen_on(path, "daemon.socket_path", bool(self._settings.allowed_uids))
        try:
            self._inode = path.stat().st_ino
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: Connection(self, self._servicer), sock=listener
            )
        except OSError as error:
            listener.close()
            raise PreflightError(f"cannot listen on {path}: {error.strerror}") from None

    async def admit_remote(self, sock: socket.socket) -> None:
        """Serve an engine of another host, whose frames come over this socket."""
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: RemoteConnection(self, self._servicer), sock
        )

    @property
    def lease_seconds(self) -> float:
        return self._settings.lease_seconds

    @property
    def stage_seconds(self) -> float:
        return self._settings.stage_seconds

    def reconfigure(self, settings: DaemonSection) -> None:
        """Another `stage_seconds`, for all sessions."""
        self._settings = settings

    def admits(self, uid: int) -> bool:
        return uid in self._allowed

    def cut_silent(self, now: float) -> None:
        """Cut off clients that hold stages and have not been heard of for `stage_seconds`."""
        for connection in list(self.connections):
            if connection.is_silent(now):
                connection.cut("no heartbeat while it holds staged blocks")

    def stop_listening(self) -> None:
        """Refuse new connections and remove the socket file, if it is still ours."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        path = self._settings.socket_path
        if path.exists() and path.stat().st_ino == self._inode:
            path.unlink()

    async def close(self) -> None:
        self.stop_listening()
        for connection in list(self.connections):
            connection.hang_up()
        if self.connections:
            self._all_gone.clear()
            await self._all_gone.wait()  # bounded by the timer that `hang_up` sets


class Connection(asyncio.Protocol):
    """One client. Its session begins with HELLO, its first frame."""

    is_remote = False
    """Whether its engine is on another host, so that it gets no descriptor."""

    def __init__(self, server: LocalServer, servicer: Servicer) -> None:
        self._server = server
        self._servicer = servicer
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._session: Session | None = None
        self._peer = PeerCredentials(0, -1)
        self._waits: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._was_cut = False
        self._is_closing = False
        self._is_unread = False
        """Whether answers pile up because the client does not read them."""
        self._last_heard = time.monotonic()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self._server.connections.add(self)
        if len(self._server.connections) > MAX_CONNECTIONS:
            self.cut("too many connections")
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._peer = self._with_socket(peer_credentials)
        self._set_timer(HELLO_SECONDS, "no HELLO")

    def data_received(self, data: bytes) -> None:
        self._last_heard = time.monotonic()
        if self._buffer or not self._answer_alone(data):
            self._buffer += data
            self._answer_frames()

    def pause_writing(self) -> None:
        # What it asks is not answered faster than it reads; so our memory for it is bounded.
        self._is_unread = True
        self._transport.pause_reading()
        self._set_timer(UNREAD_SECONDS, "it does not read its answers")

    def resume_writing(self) -> None:
        self._is_unread = False
        if not self._is_closing:
            self._clear_timer()
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._clear_timer()
        for task in self._waits:
            task.cancel()
        if self._session is not None:
            if self._was_cut:
                self._servicer.cut_session(self._session)
            else:
                self._servicer.end_session(self._session)
            log.debug(
                "session %d ended: pid=%d", self._session.id, self._peer.pid, extra=self._facts
            )
            self._session = None
        self._server.left(self)

    # ---- for the server ----

    def is_silent(self, now: float) -> bool:
        return (
            self._session is not None
            and bool(self._session.stages)
            and now - self._last_heard > self._server.stage_seconds
        )

    def cut(self, why: str) -> None:
        """Hang up on a client that misbehaves; it may go on writing to its staged slots."""
        log.warning("client cut off: pid=%d %s", self._peer.pid, why, extra=self._facts)
        self._was_cut = True
        self._is_closing = True
        self._transport.abort()

    def hang_up(self) -> None:
        """Close after what was answered has been sent, or soon."""
        self._was_cut = True
        self._is_closing = True
        self._transport.close()
        self._set_timer(1.0, "it does not read its last answers")

    # ---- frames ----

    def _answer_alone(self, data: bytes) -> bool:
        """Answer data that is just one frame, as nearly all is; whether it was."""
        if len(data) < HEADER.size or self._is_closing or self._is_unread:
            return False
        try:
            header = unpack_header(data)
        except FrameError:
            return False
        if header.status or len(data) != HEADER.size + header.payload_bytes:
            return False
        self._frame(header, data[HEADER.size :])
        return True

    def _answer_frames(self) -> None:
        """Answer the whole frames that are here, as long as it is this client's turn."""
        buffer = self._buffer
        start, end = 0, len(buffer)
        turn_ends = time.monotonic() + TURN_SECONDS
        while end - start >= HEADER.size and not (self._is_closing or self._is_unread):
            if start and time.monotonic() > turn_ends:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._go_on)
                break
            try:
                header = unpack_header(buffer, start)
                if header.status:
                    raise FrameError(f"a request has status 0, not {header.status}")
            except FrameError as error:
                self._refuse_stream(bytes(buffer[start : start + HEADER.size]), error)
                return
            frame_end = start + HEADER.size + header.payload_bytes
            if end < frame_end:
                break
            payload = bytes(memoryview(buffer)[start + HEADER.size : frame_end])
            start = frame_end
            self._frame(header, payload)
        if start:
            del buffer[:start]

    def _go_on(self) -> None:
        """Answer what is left of an earlier turn, and read on."""
        if not (self._is_closing or self._is_unread):
            self._transport.resume_reading()
            self._answer_frames()

    def _frame(self, header: FrameHeader, payload: bytes) -> None:
        try:
            if self._session is None:
                self._hello(header, payload)
            elif header.method is Method.WAIT:
                self._wait(header, payload)
            elif header.method is Method.HELLO:
                raise InvalidRequestError("the session is open already")
            elif header.request_id % CALL_SAMPLE:
                answer = self._servicer.call(self._session, header.method, payload)
                self._transport.write(pack_frame(header.method, header.request_id, answer))
            else:
                began = time.perf_counter()
                answer = self._servicer.call(self._session, header.method, payload)
                self._transport.write(pack_frame(header.method, header.request_id, answer))
                self._servicer.store.holdings.measures.observe_call(
                    header.method.name.lower(), time.perf_counter() - began
                )
        except EmberError as error:
            self._answer_error(header, error)
        except Exception as error:
            # Ours to repair, but no reason to fail the other clients.
            log.exception("%s failed", header.method.name)
            self._answer_error(header, IntegrityError(f"{header.method.name} failed: {error!r}"))

    def _hello(self, header: FrameHeader, payload: bytes) -> None:
        """Open the session, or answer why not and close."""
        try:
            if not self._server.admits(self._peer.uid):
                raise AccessDeniedError(
                    f"uid {self._peer.uid} may not connect; add it to daemon.allowed_uids"
                )
            if header.method is not Method.HELLO:
                raise InvalidRequestError(f"the first frame is HELLO, not {header.method.name}")
            if len(self._servicer.store.sessions) >= MAX_SESSIONS:
                raise UnavailableError(f"this daemon serves {MAX_SESSIONS} sessions already")
            session = self._servicer.open_session(payload)
            session.is_remote = self.is_remote
        except EmberError as error:
            self._answer_error(header, error)
            self._is_closing = True
            self._transport.close()
            return
        self._clear_timer()
        self._session = session
        answer = pack_frame(
            Method.HELLO, header.request_id, self._servicer.describe_session(session)
        )
        if session.namespace is None or self.is_remote:
            self._transport.write(answer)
        else:
            self._send_with_pool(answer)
        log.info(
            "session %d opened: pid=%d client=%r part=%d",
            session.id,
            self._peer.pid,
            session.client,
            session.part,
            extra=self._facts,
        )

    def _send_with_pool(self, answer: bytes) -> None:
        """Send the first answer past the transport, whose buffer is empty, with the descriptor."""
        pool_fd = self._servicer.store.holdings.pool.open_for_client()
        try:
            sent = self._with_socket(lambda sock: socket.send_fds(sock, [answer], [pool_fd]))
        except ConnectionError:
            return  # the client is gone; connection_lost follows
        finally:
            os.close(pool_fd)
        if sent < len(answer):
            self._transport.write(answer[sent:])

    def _wait(self, header: FrameHeader, payload: bytes) -> None:
        if len(self._waits) >= MAX_CALLS_IN_FLIGHT:
            raise InvalidRequestError(f"{MAX_CALLS_IN_FLIGHT} calls are in flight already")
        assert self._session is not None
        task = asyncio.get_running_loop().create_task(
            self._answer_later(self._session, header, payload)
        )
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    async def _answer_later(self, session: Session, header: FrameHeader, payload: bytes) -> None:
        try:
            answer = await self._servicer.wait(session, payload)
        except EmberError as error:
            self._answer_error(header, error)
        except Exception as error:
            log.exception("WAIT failed")
            self._answer_error(header, IntegrityError(f"WAIT failed: {error!r}"))
        else:
            if not self._is_closing:
                self._transport.write(pack_frame(header.method, header.request_id, answer))

    def _answer_error(self, header: FrameHeader, error: EmberError) -> None:
        if not self._is_closing:
            detail = error_detail(error)
            self._transport.write(
                pack_frame(header.method, header.request_id, detail, max(error.code, 1))
            )

    def _refuse_stream(self, raw: bytes, error: FrameError) -> None:
        """Answer a frame that cannot be trusted, then close: what follows it has no meaning."""
        _, method, _, request_id = HEADER.unpack(raw)
        detail = error_detail(error)
        self._transport.write(HEADER.pack(len(detail), method, error.code, request_id) + detail)
        log.warning("client cut off: pid=%d %s", self._peer.pid, error, extra=self._facts)
        self.hang_up()

    # ---- small things ----

    @property
    def _facts(self) -> dict[str, int]:
        """Fields of a log line about this connection."""
        found = {"pid": self._peer.pid, "uid": self._peer.uid}
        return found if self._session is None else {**found, "session": self._session.id}

    def _with_socket(self, use: Callable[[socket.socket], T]) -> T:
        """Use the connection's socket directly; the transport keeps its own descriptor."""
        transport_socket = self._transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(transport_socket.fileno())) as sock:
            return use(sock)

    def _set_timer(self, seconds: float, why: str) -> None:
        self._clear_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cut, why)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RemoteConnection(Connection):
    """A client on another host. Its network may break without a word, so silence ends it."""

    is_remote = True

    def is_silent(self, now: float) -> bool:
        allowed = max(self._server.stage_seconds, self._server.lease_seconds)
        return super().is_silent(now) or now - self._last_heard > allowed


def listen_on(path: Path, setting: str, for_group: bool) -> socket.socket:
    """A socket bound to a path that only its owner (and their group) may connect to.

    Raises PreflightError when the path cannot be had.
    """
    remove_stale_socket(path, setting)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        if for_group:
            path.chmod(0o660)
    except OSError as error:
        listener.close()
        raise PreflightError(f"{setting} {path} cannot be listened on: {error}") from None
    return listener


def remove_stale_socket(path: Path, setting: str = "daemon.socket_path") -> None:
    """Remove a socket on which nobody listens. `setting` is named in messages.

    Raises:
        PreflightError: a daemon listens there, or the path is something else than a socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise PreflightError(f"{setting} {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise PreflightError(f"{setting} {path} exists and is not a socket; move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise PreflightError(f"{setting} {path}: {error}") from None
    raise PreflightError(f"a daemon listens on {path} already; stop it or set another {setting}")


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Who is at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerCredentials(pid, uid)
