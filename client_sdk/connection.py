"""A blocking connection that opens itself when needed, and the counters of its calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

from google.protobuf.message import Message

from client_sdk.session import (
    Backoff,
    M,
    Pending,
    Session,
    SessionEndpoint,
    SessionLostError,
    SessionState,
)
from emberkv_proto.errors import EmberError, StaleIncarnationError, UnavailableError
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method

B = TypeVar("B")
IDLE_BEAT_SECONDS = 0.25
"""How soon the background notices that a session was opened, or may be."""


@dataclass(slots=True)
class ClientCounters:
    """What a client has done since it was made."""

    calls: int = 0
    errors: int = 0
    reconnects: int = 0


class Connection:
    """Calls to one daemon, one at a time, on a session that is opened when it is first needed.

    A call costs at most `timeout_seconds` (and what the caller itself asked to wait), connecting
    included. A lost session fails the call in flight; the next call opens another, held back by
    `Backoff`: a call that may not try yet fails at once.
    """

    def __init__(self, endpoint: SessionEndpoint, timeout_seconds: float) -> None:
        """Raises InvalidRequestError when the endpoint can never be reached as it is."""
        endpoint.check_path()
        self.endpoint = endpoint
        self.counters = ClientCounters()
        self.is_draining = False
        self._timeout_seconds = timeout_seconds
        self._backoff = Backoff()
        self._last_failure = ""
        self._renewed_at = 0.0
        self._session: Session | None = None
        self._has_connected = False
        self._is_closed = False
        self._lock = threading.RLock()
        _connections.add(self)

    @property
    def session(self) -> Session | None:
        """The live session, if there is one."""
        session = self._session
        return session if session is not None and session.is_alive else None

    def connect(self) -> Session:
        """Open the session now, whatever the back-off says.

        Raises:
            UnavailableError: no daemon there, or it does not answer; names the path and the fix.
            AccessDeniedError, LayoutMismatchError, InvalidRequestError: it will not have us.
        """
        with self._lock:
            return self.session or self._open(time.monotonic() + self._timeout_seconds)

    def call(
        self, method: Method, request: Message, answer: type[M], wait_seconds: float = 0.0
    ) -> M:
        """Ask on the live session, or on a new one.

        Raises:
            UnavailableError: no session can be had, or it was lost; a miss for an engine.
            EmberError: what the daemon answered.
        """
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds + wait_seconds
            return self._ask(self._ready(deadline), method, request, answer, deadline)

    def call_on(
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
            EmberError: as `call`.
        """
        with self._lock:
            own = self._own(session)
            deadline = time.monotonic() + self._timeout_seconds + wait_seconds
            return self._ask(own, method, request, answer, deadline)

    def live_session(self) -> Session:
        """The live session, or a new one. Raises UnavailableError as `call`."""
        with self._lock:
            return self._ready(time.monotonic() + self._timeout_seconds)

    def send_on(
        self, session: SessionState, method: Method, request: Message, answer: type[M]
    ) -> Pending[M]:
        """As `call_on`, without waiting for the answer, which `take` gives."""
        with self._lock:
            own = self._own(session)
            self._beat_if_due(own, time.monotonic() + self._timeout_seconds)
            self.counters.calls += 1
            try:
                return own.send(method, request, answer, self._timeout_seconds)
            except SessionLostError as error:
                self.counters.errors += 1
                self.lose(own, str(error))
                raise

    def take(self, session: Session, sent: Pending[M], build: Callable[[M], B]) -> B:
        """What is made of the answer to what was sent on this session; `build` as in `borrow`.

        Raises:
            StaleIncarnationError: the session is over; whether the daemon did it is unknown.
            EmberError: what the daemon answered.
        """
        with self._lock:
            own = session if sent.received else self._own(session)
            try:
                result = build(own.take(sent, self._timeout_seconds))
            except SessionLostError as error:
                self.counters.errors += 1
                self.lose(own, str(error))
                raise
            except EmberError:
                self.counters.errors += 1
                raise
            self._succeeded(own)
            return result

    def borrow(
        self,
        method: Method,
        request: Message,
        answer: type[M],
        build: Callable[[Session, M, float], B],
    ) -> B:
        """As `call`, and make what the session lends of it, before anybody else can lose it.

        `build` gets the session, the answer, and when the request left. A SessionLostError of
        its own ends the session too.
        """
        with self._lock:
            now = time.monotonic()
            deadline = now + self._timeout_seconds
            session = self._session
            if session is None or not session.is_alive:
                session = self._ready(deadline)
                now = time.monotonic()
            message = self._ask(session, method, request, answer, deadline)
            try:
                return build(session, message, now)
            except SessionLostError as error:
                self.lose(session, str(error))
                raise

    def tell(self, session: SessionState, method: Method, request: Message) -> None:
        """Tell the daemon that something ended. If it is away, that has ended by itself.

        Does not wait for the answer; a refusal is counted as an error with the next call.
        """
        with self._lock:
            own = self.session
            if own is None or own is not session:
                return
            self.counters.calls += 1
            try:
                own.tell(method, request, self._timeout_seconds)
            except SessionLostError as error:
                self.counters.errors += 1
                self.lose(own, str(error))

    def heartbeat(self) -> None:
        """Renew leases and stages. Raises as `call`."""
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds
            self._beat(self._ready(deadline), deadline)

    @property
    def seconds_to_beat(self) -> float:
        """How long the background may sleep: until a heartbeat is due, or may be tried."""
        now, session = time.monotonic(), self.session
        if session is None:
            return max(self._backoff.wait_seconds(now), IDLE_BEAT_SECONDS)
        return max(self._renewed_at + session.terms.heartbeat_seconds - now, 0.0)

    def keep_alive(self) -> None:
        """As `heartbeat`, unless none is due or the attempt is held back."""
        with self._lock:
            if self.session is None:
                is_due = not self._backoff.wait_seconds(time.monotonic())
            else:
                is_due = self.seconds_to_beat <= 0
            if is_due:
                self.heartbeat()

    def close(self) -> None:
        """Leases and stages end; see `SessionState.close` for when it hangs up.

        Idempotent; later calls raise UnavailableError.
        """
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()
                self._session = None

    def check_integrity(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.check_integrity()
            assert not (self._is_closed and self._session), "closed with a session"

    def _ready(self, deadline: float) -> Session:
        session = self.session
        if session is not None:
            return session
        self.counters.calls += 1
        try:
            self._require_open()
            wait_seconds = self._backoff.wait_seconds(time.monotonic())
            if wait_seconds > 0:
                raise UnavailableError(
                    f"{self._last_failure} (next attempt in {wait_seconds:.1f} s)"
                )
            return self._open(deadline)
        except UnavailableError:
            self.counters.errors += 1
            raise
        except EmberError as error:
            # While serving, a daemon that refuses us is as good as none.
            self.counters.errors += 1
            raise UnavailableError(str(error)) from error

    def _open(self, deadline: float) -> Session:
        self._require_open()
        began = time.monotonic()
        try:
            session = self.endpoint.open(max(deadline - began, 1e-3))
        except EmberError as error:
            now = time.monotonic()
            self._backoff.failed(now, now - began)
            self._last_failure = str(error)
            raise
        self._session = session
        self._renewed_at = time.monotonic()
        self.counters.reconnects += self._has_connected
        self._has_connected = True
        return session

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this client is closed")

    def _ask(
        self, session: Session, method: Method, request: Message, answer: type[M], deadline: float
    ) -> M:
        self._beat_if_due(session, deadline)
        return self._exchange(session, method, request, answer, deadline)

    def _own(self, session: SessionState) -> Session:
        """This very session, if it is still ours."""
        own = self.session
        if own is None or own is not session:
            raise StaleIncarnationError(
                f"the session with node {session.terms.node_id} is over; ask again"
            )
        return own

    def _beat_if_due(self, session: Session, deadline: float) -> None:
        # The background thread may be kept from the lock by a busy caller; leases must not starve.
        if time.monotonic() - self._renewed_at > session.terms.heartbeat_seconds:
            self._beat(session, deadline)

    def _beat(self, session: Session, deadline: float) -> None:
        answer = self._exchange(
            session,
            Method.HEARTBEAT,
            store_pb2.HeartbeatRequest(),
            store_pb2.HeartbeatResponse,
            deadline,
        )
        self._renewed_at = time.monotonic()
        self.is_draining = answer.draining
        session.renew(self._renewed_at)

    def _exchange(
        self, session: Session, method: Method, request: Message, answer: type[M], deadline: float
    ) -> M:
        self.counters.calls += 1
        try:
            result = session.call(method, request, answer, max(deadline - time.monotonic(), 1e-3))
        except SessionLostError as error:
            self.counters.errors += 1
            self.lose(session, str(error))
            raise
        except EmberError:
            self.counters.errors += 1
            raise
        self._succeeded(session)
        return result

    def _succeeded(self, session: Session) -> None:
        if session.refused_tells:
            self.counters.errors += session.refused_tells
            session.refused_tells = 0
        self._backoff.succeeded()

    def lose(self, session: SessionState, why: str) -> None:
        """End a session that broke, or whose answers do not add up."""
        with self._lock:
            self._last_failure = why
            session.retire()
            if self._session is session:
                self._session = None

    def _forked(self) -> None:
        """In a child process: the parent's session is not ours."""
        self._lock = threading.RLock()
        if self._session is not None:
            self._session.forsake()
        self._session = None


_connections: WeakSet[Connection] = WeakSet()


def _after_fork() -> None:
    for connection in list(_connections):
        connection._forked()


os.register_at_fork(after_in_child=_after_fork)
