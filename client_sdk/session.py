"""A session with the store daemon: the handshake, its terms, and what ends with it.

The socket is the session. Leases and staged writes are borrowed from it, and are void once it is
lost. A lost session keeps its socket open until its last borrower has left, so that a daemon that
was only slow does not hand a slot to another while this process still copies. One that is closed
waits for its staged writes only: what a thread reads meanwhile is void, what it writes is not.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message

from client_sdk.attached_pool import AttachedPool, PoolShape
from client_sdk.frame_socket import Frame, FrameSocket
from client_sdk.transport.base import TransportAddress
from emberkv_proto import __version__
from emberkv_proto.convert import engine_to_wire, namespace_id_from_wire
from emberkv_proto.errors import (
    AccessDeniedError,
    EmberError,
    FrameError,
    InvalidRequestError,
    LayoutMismatchError,
    UnavailableError,
    error_from_wire,
)
from emberkv_proto.layout import Namespace
from emberkv_proto.types import EngineInfo, Incarnation, NamespaceId, NodeId
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import HEADER, PROTOCOL, FrameHeader, Method, pack_frame, unpack_header

if TYPE_CHECKING:
    from client_sdk.tls import Tls  # which needs grpcio

MAX_SOCKET_PATH_BYTES = 107
_READ_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 4
MAX_OWED_ANSWERS = 64
"""Most answers left unread: well below what a socket's buffer holds, so nobody ever blocks."""
M = TypeVar("M", bound=Message)


class SessionLostError(UnavailableError):
    """The connection broke, timed out or made no sense: the session is over."""


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A daemon on another host: host:port of its gRPC server, and the certificates for it."""

    address: str
    tls: Tls | None = None


class SessionEndpoint(Protocol):
    """Where a client connects, whatever carries its frames, and what it says of itself."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def namespace(self) -> Namespace | None: ...

    @property
    def part(self) -> int: ...

    def hello(self) -> store_pb2.HelloRequest: ...

    def check_path(self) -> None:
        """Raises InvalidRequestError when it can never be reached."""
        ...

    def open(self, seconds: float) -> Session:
        """Connect and shake hands; raises as `open_session`."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's socket on this node. Without a namespace: an operator."""

    socket_path: Path
    namespace: Namespace | None = None
    part: int = 0
    engine: EngineInfo | None = None
    client_name: str = ""

    @property
    def where(self) -> str:
        return str(self.socket_path)

    def open(self, seconds: float) -> Session:
        return open_session(self, seconds)

    def hello(self) -> store_pb2.HelloRequest:
        return store_pb2.HelloRequest(
            protocol=PROTOCOL,
            client=self.client_name or f"emberkv {__version__} pid {os.getpid()}",
            namespace_json=self.namespace.to_json() if self.namespace else "",
            part=self.part,
            engine=engine_to_wire(self.engine) if self.engine else None,
        )

    def check_path(self) -> None:
        """Raises InvalidRequestError when no AF_UNIX address can carry the path."""
        length = len(os.fsencode(self.socket_path))
        if length > MAX_SOCKET_PATH_BYTES:
            raise InvalidRequestError(
                f"socket path {self.socket_path} has {length} bytes, the limit is"
                f" {MAX_SOCKET_PATH_BYTES}; choose a shorter daemon.socket_path"
            )

    def describe(self, error: OSError) -> EmberError:
        """What a failed connect means, and the next step."""
        path = self.socket_path
        if isinstance(error, PermissionError):
            return AccessDeniedError(
                f"uid {os.getuid()} may not open {path}; add it to daemon.allowed_uids and let it"
                " enter the socket's directory"
            )
        if isinstance(error, FileNotFoundError):
            return UnavailableError(
                f"no socket at {path}; start the store daemon, or point this client at its"
                " daemon.socket_path"
            )
        if isinstance(error, ConnectionRefusedError):
            return UnavailableError(
                f"nobody listens at {path}: the store daemon is gone; start it again"
            )
        return UnavailableError(f"cannot connect to {path}: {error}; is the store daemon healthy?")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the daemon said when it opened the session."""

    node_id: NodeId
    incarnation: Incarnation
    session_id: int
    namespace_id: NamespaceId | None
    pool_bytes: int
    part_bytes: int
    heartbeat_seconds: float
    lease_seconds: float
    version: str
    transport: TransportAddress | None = None
    """Where a session over the network reads and writes its slots."""


class Borrower(Protocol):
    """A lease or staged write: void when its session is."""

    writes: ClassVar[bool]
    """Whether its slots may be written until it has left, whatever became of the session."""

    def renew(self, answered_at: float, lease_seconds: float) -> None:
        """The daemon answered a heartbeat at `answered_at`."""
        ...


class SessionState:
    """An open session: terms, mapped pool, borrowers. Safe to use from several threads."""

    def __init__(self, sock: socket.socket, terms: Terms, pool: PoolShape | None) -> None:
        self.terms = terms
        self._pool = pool
        self._sock = sock
        self._is_alive = True
        # Reentrant: the collector may drop a borrower while this thread is inside.
        self._lock = threading.RLock()
        self._borrowers: WeakSet[Borrower] = WeakSet()

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def stands(self) -> bool:
        """Whether the daemon holds its end of the session, as the kernel says now. A system call.

        `is_alive` ends only when somebody asks the daemon something. By then a killed daemon may
        be back and have given our blocks' slots to others; but its end was closed before that.
        """
        if not self.is_alive:
            return False
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False  # closed meanwhile, by another thread

    @property
    def shape(self) -> PoolShape:
        """Raises InvalidRequestError in an operator's session, which has no pool."""
        if self._pool is None:
            raise InvalidRequestError("an operator's session has no pool")
        return self._pool

    @property
    def pool(self) -> AttachedPool:
        """The mapped pool. Raises InvalidRequestError in a session that maps none."""
        if not isinstance(self.shape, AttachedPool):
            raise InvalidRequestError(
                "the pool of this session is on another host; a RemoteClient reads and writes it"
            )
        return self.shape

    @property
    def transport(self) -> TransportAddress:
        """Where its slots are reached. Raises InvalidRequestError where they are mapped."""
        if self.terms.transport is None:
            raise InvalidRequestError("this session's slots are mapped; no transport reaches them")
        return self.terms.transport

    def lend(self, borrower: Borrower) -> None:
        with self._lock:
            self._borrowers.add(borrower)

    def give_back(self, borrower: Borrower) -> None:
        with self._lock:
            self._borrowers.discard(borrower)
            if not self._is_alive and not self._borrowers:
                self._hang_up()

    def renew(self, answered_at: float) -> None:
        """A heartbeat was answered: the daemon has renewed what had not expired by then."""
        with self._lock:
            for borrower in self._borrowers:
                borrower.renew(answered_at, self.terms.lease_seconds)

    def retire(self) -> None:
        """Void all borrowers at once; hang up when the last one has left."""
        with self._lock:
            self._is_alive = False
            if not self._borrowers:
                self._hang_up()

    def close(self) -> None:
        """Void all borrowers; hang up now, or when the last staged write has left. Idempotent.

        Another thread may be in the midst of a copy into staged slots, which are others' as soon
        as the daemon sees the end.
        """
        with self._lock:
            for borrower in list(self._borrowers):
                if not borrower.writes:
                    self._borrowers.discard(borrower)
            self.retire()

    def forsake(self) -> None:
        """In a forked child: drop this copy. The session itself stays the parent's."""
        self._lock = threading.RLock()  # the parent's other threads may have held the old one
        self._is_alive = False
        self._hang_up()

    def check_integrity(self) -> None:
        """Assert that a dead session without borrowers holds no socket."""
        with self._lock:
            if not self._is_alive and not self._borrowers:
                assert self._sock.fileno() == -1, "a session is over but its socket is open"
            if self._is_alive:
                assert self._sock.fileno() != -1, "a live session has no socket"

    def _hang_up(self) -> None:
        self._sock.close()


class _Told(NamedTuple):
    """A request that was told, and not answered yet as far as we have read."""

    method: Method
    request_id: int


@dataclass(slots=True, eq=False)
class Pending(Generic[M]):
    """A request that was sent, whose answer is taken later."""

    method: Method
    request_id: int
    answer: type[M]
    received: Frame | None = None
    """The answer, once it was read."""


class Session(SessionState):
    """A session that one thread at a time waits on.

    The daemon answers in order, so what is told (`tell`) is done before what is called later.
    """

    def __init__(self, sock: socket.socket, terms: Terms, pool: PoolShape | None) -> None:
        super().__init__(sock, terms, pool)
        self.refused_tells = 0
        """How often the daemon refused what it was told."""
        self._last_request_id = 0
        self._frames = FrameSocket(sock)
        self._owed: deque[_Told | Pending[Any]] = deque()

    def call(self, method: Method, request: Message, answer: type[M], seconds: float) -> M:
        """Send one request and read its answer within `seconds`.

        Raises:
            SessionLostError: broken, too late or malformed; the caller retires the session.
            EmberError: what the daemon answered.
        """
        request_id = self._next_request_id()
        frame = pack_frame(method, request_id, request.SerializeToString())
        deadline = time.monotonic() + seconds
        frames = self._frames
        try:
            frames.send(frame, deadline)
            while self._owed:
                self._settle(deadline)
            header, payload = frames.receive(deadline)
        except (FrameError, OSError) as error:
            raise self._lost(error, method, seconds) from None
        _check_match(header, method, request_id)
        if frames.has_unread:
            raise SessionLostError("the daemon sent more bytes than one answer")
        return read_payload(header, payload, answer)

    def tell(self, method: Method, request: Message, seconds: float) -> None:
        """Send one request and leave its answer to be read with the next call's.

        Takes a wait of at most `seconds` when MAX_OWED_ANSWERS are unread. Raises SessionLostError.
        """
        self._send(_Told(method, self._next_request_id()), request, seconds)

    def send(self, method: Method, request: Message, answer: type[M], seconds: float) -> Pending[M]:
        """As `tell`, but the answer is kept until it is taken."""
        sent = Pending(method, self._next_request_id(), answer)
        self._send(sent, request, seconds)
        return sent

    def take(self, sent: Pending[M], seconds: float) -> M:
        """The answer to what this session sent. Raises as `call`."""
        deadline = time.monotonic() + seconds
        try:
            while sent.received is None:
                self._settle(deadline)
        except (FrameError, OSError) as error:
            raise self._lost(error, sent.method, seconds) from None
        if not self._owed and self._frames.has_unread:
            raise SessionLostError("the daemon sent more bytes than its answers")
        return read_payload(sent.received.header, sent.received.payload, sent.answer)

    def _send(self, sent: _Told | Pending[M], request: Message, seconds: float) -> None:
        frame = pack_frame(sent.method, sent.request_id, request.SerializeToString())
        deadline = time.monotonic() + seconds
        try:
            self._frames.send(frame, deadline)
            self._owed.append(sent)
            while len(self._owed) >= MAX_OWED_ANSWERS:
                self._settle(deadline)
        except (FrameError, OSError) as error:
            raise self._lost(error, sent.method, seconds) from None

    def _next_request_id(self) -> int:
        self._last_request_id = (self._last_request_id + 1) & 0xFFFFFFFF
        return self._last_request_id

    def _settle(self, deadline: float) -> None:
        """Read the answer that has been owed longest."""
        received = self._frames.receive(deadline)
        owed = self._owed.popleft()
        _check_match(received.header, owed.method, owed.request_id)
        if isinstance(owed, Pending):
            owed.received = received
        elif received.header.status:
            try:
                read_payload(received.header, received.payload, common_pb2.Empty)
            except SessionLostError:
                raise
            except EmberError:
                self.refused_tells += 1  # nobody waits for it

    def _lost(self, error: Exception, method: Method, seconds: float) -> SessionLostError:
        node = self.terms.node_id
        if isinstance(error, TimeoutError):
            return SessionLostError(
                f"the daemon of node {node} did not answer {method.name} within"
                f" {seconds:.2f} s; the session is closed"
            )
        if isinstance(error, FrameError):
            return SessionLostError(f"the daemon sent a malformed frame: {error}")
        return SessionLostError(f"the daemon of node {node} went away: {error}")


def open_session(endpoint: Endpoint, seconds: float) -> Session:
    """Connect and shake hands; every step within `seconds` in all.

    Raises:
        UnavailableError: no daemon there, or it does not answer.
        AccessDeniedError: this user may not connect.
        LayoutMismatchError, InvalidRequestError: the daemon refuses the namespace.
    """
    endpoint.check_path()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + seconds
    descriptors: list[int] = []
    try:
        sock.settimeout(seconds)
        sock.connect(os.fspath(endpoint.socket_path))
        sock.sendall(hello_frame(endpoint))
        received = b""
        while missing_bytes(received, len(received)) > 0:
            sock.settimeout(max(deadline - time.monotonic(), 1e-4))
            received += receive_with_descriptors(sock, descriptors)
        terms, pool = finish_handshake(endpoint, received, descriptors)
        return Session(sock, terms, pool)
    except TimeoutError:
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


def hello_frame(endpoint: SessionEndpoint) -> bytes:
    return pack_frame(Method.HELLO, 0, endpoint.hello().SerializeToString())


def receive_with_descriptors(sock: socket.socket, descriptors: list[int]) -> bytes:
    """One recvmsg; descriptors that came along are appended, and the caller's to close.

    Raises:
        ConnectionError: the other side hung up.
        OSError: as recvmsg does, BlockingIOError included.
    """
    chunk, ancillary, flags, _ = sock.recvmsg(
        _READ_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.extend(array("i", data[: len(data) - len(data) % 4]))
    if not chunk or flags & socket.MSG_CTRUNC:
        raise ConnectionResetError("it closed the connection")
    return chunk


def finish_handshake(
    endpoint: Endpoint, answer: bytes, descriptors: list[int]
) -> tuple[Terms, AttachedPool | None]:
    """Check the daemon's answer against what was asked, and map the pool."""
    terms = finish_terms(endpoint, answer)
    if endpoint.namespace is None:
        return terms, None
    if len(descriptors) != 1:
        raise UnavailableError(
            f"node {terms.node_id} sent {len(descriptors)} pool descriptors, wanted one"
        )
    return terms, AttachedPool(descriptors[0], terms.pool_bytes, terms.part_bytes)


def finish_terms(endpoint: SessionEndpoint, answer: bytes) -> Terms:
    """Check the daemon's answer to HELLO against what was asked."""
    try:
        hello = read_answer(memoryview(answer), Method.HELLO, 0, store_pb2.HelloResponse)
    except AccessDeniedError as error:
        raise AccessDeniedError(f"{endpoint.where}: {error}") from None
    for name in ("heartbeat_seconds", "lease_seconds"):
        if not 0 < getattr(hello, name) < 86400:
            raise UnavailableError(f"the daemon announced {name} {getattr(hello, name)}")
    namespace = endpoint.namespace
    terms = Terms(
        NodeId(hello.node_id),
        Incarnation(hello.incarnation),
        hello.session_id,
        namespace_id_from_wire(hello.namespace_id) if namespace else None,
        hello.pool_bytes,
        hello.part_bytes,
        hello.heartbeat_seconds,
        hello.lease_seconds,
        hello.version,
        TransportAddress(hello.transport, hello.transport_address, Incarnation(hello.incarnation))
        if hello.transport
        else None,
    )
    if namespace is None:
        return terms
    part_bytes = namespace.part_bytes(endpoint.part)
    if terms.namespace_id != namespace.id or terms.part_bytes != part_bytes:
        raise LayoutMismatchError(
            f"node {terms.node_id} opened namespace {hello.namespace_id.hex()} with parts of"
            f" {terms.part_bytes} bytes; asked was {namespace.id.hex()} with {part_bytes}"
        )
    return terms


def read_answer(frame: memoryview, method: Method, request_id: int, answer: type[M]) -> M:
    """Parse one whole frame as the answer to a request.

    Raises:
        SessionLostError: not the answer to this request, or not a message.
        EmberError: what the daemon answered.
    """
    header = _header(frame)
    if len(frame) != HEADER.size + header.payload_bytes:
        raise SessionLostError(f"the daemon sent {len(frame)} bytes where one answer was due")
    _check_match(header, method, request_id)
    return read_payload(header, frame[HEADER.size :], answer)


def _check_match(header: FrameHeader, method: Method, request_id: int) -> None:
    """Raises SessionLostError unless it is the answer to this request."""
    if header.method is not method or header.request_id != request_id:
        raise SessionLostError(
            f"the daemon answered {header.method.name} {header.request_id}"
            f" to {method.name} {request_id}"
        )


def read_payload(header: FrameHeader, payload: bytes | memoryview, answer: type[M]) -> M:
    """As `read_answer`, once the frame is matched to its request."""
    try:
        if header.status:
            detail = common_pb2.ErrorDetail.FromString(bytes(payload))
            error = error_from_wire(detail.type, detail.message)
            if isinstance(error, FrameError):
                raise SessionLostError(f"the daemon refused a frame: {error}")
            raise error
        return answer.FromString(payload if isinstance(payload, bytes) else bytes(payload))
    except DecodeError as error:
        raise SessionLostError(f"the daemon's answer is malformed: {error}") from None


class Backoff:
    """When a client may try to connect again. Pure; the caller brings the clock.

    The first attempt after a loss is free. After a failed one the next waits for
    `interval_seconds`, or four times what the failure cost: a daemon that hangs takes at most a
    fifth of its clients' time.
    """

    def __init__(self, interval_seconds: float = 0.5) -> None:
        self._interval_seconds = interval_seconds
        self._not_before = float("-inf")

    def wait_seconds(self, now: float) -> float:
        """0 when an attempt is allowed now."""
        return max(self._not_before - now, 0.0)

    def failed(self, now: float, cost_seconds: float) -> None:
        self._not_before = now + max(self._interval_seconds, 4 * cost_seconds)

    def succeeded(self) -> None:
        self._not_before = float("-inf")


def _header(raw: bytes | bytearray | memoryview) -> FrameHeader:
    try:
        return unpack_header(memoryview(raw)[: HEADER.size])
    except FrameError as error:
        raise SessionLostError(f"the daemon sent a malformed frame: {error}") from None


def missing_bytes(raw: bytes | bytearray, received: int) -> int:
    """How many bytes of the one frame in `raw[:received]` are still to come."""
    if received < HEADER.size:
        return HEADER.size - received if received else 1
    return HEADER.size + _header(raw).payload_bytes - received
