"""The one servicer of local sessions and operators: convert, call, convert back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from client_sdk import faults
from client_sdk.transport.base import TransportAddress
from emberkv_proto import __version__
from emberkv_proto.convert import (
    engine_from_wire,
    engine_to_wire,
    hashes_from_wire,
    parent_from_wire,
    salt_id_from_wire,
    u64s_from_wire,
    u64s_to_wire,
)
from emberkv_proto.errors import EmberError, InvalidRequestError, LayoutMismatchError
from emberkv_proto.hashing import UNKNOWN_CHECKSUM
from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, Incarnation, NodeId
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import METHODS, PROTOCOL, Method
from store_daemon.config import DaemonSection
from store_daemon.facts import status_facts
from store_daemon.hint_server import followed_node
from store_daemon.leases import Lease, LeaseId
from store_daemon.sessions import Session
from store_daemon.store import BlockStore

MAX_CLIENT_CHARS = 256
MAX_LEASES_PER_CALL = 65536
_REQUESTS = {int(method): request for method, (request, _) in METHODS.items()}
_POLICIES = {int(policy): policy for policy in AcquirePolicy}


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What this life of the daemon says of itself."""

    node_id: NodeId
    incarnation: Incarnation
    transport: TransportAddress | None = None
    """Where engines on other hosts reach the pool; None: they do not."""


class Servicer:
    """Answers every method. Only `wait` awaits; all others run through in one go.

    Args:
        seq: number of the newest event.
        on_engines: told when the set of announced engines changed.
        on_drain: an operator asked the daemon to end.
    """

    def __init__(
        self,
        store: BlockStore,
        identity: NodeIdentity,
        settings: DaemonSection,
        seq: Callable[[], int],
        on_engines: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        self.store = store
        self._identity = identity
        self._settings = settings
        self._seq = seq
        self._on_engines = on_engines
        self._on_drain = on_drain
        self._started = time.monotonic()
        calls: dict[Method, Callable[[Session, Message], Message]] = {
            Method.PROBE: self._probe,
            Method.ACQUIRE: self._acquire,
            Method.RELEASE: self._release,
            Method.STAGE: self._stage,
            Method.COMMIT: self._commit,
            Method.ABORT: self._abort,
            Method.HEARTBEAT: self._heartbeat,
            Method.PREFETCH: self._prefetch,
            Method.CANCEL_PREFETCH: self._cancel_prefetch,
            Method.STATUS: lambda session, request: self.status(),
            Method.CHECK: lambda session, request: self.check(),
            Method.DRAIN: self._drain,
        }
        # By number: an enum's own hash is slow.
        self._calls = {int(method): call for method, call in calls.items()}

    def reconfigure(self, settings: DaemonSection) -> None:
        """What sessions are told from now on."""
        self._settings = settings

    # ---- sessions ----

    def open_session(self, payload: bytes) -> Session:
        """The session a HELLO asks for.

        Raises:
            InvalidRequestError, LayoutMismatchError: the client must change what it asks for.
            DrainingError: no new sessions.
        """
        request = parse(Method.HELLO, payload)
        assert isinstance(request, store_pb2.HelloRequest)
        if request.protocol != PROTOCOL:
            raise LayoutMismatchError(
                f"client speaks protocol {request.protocol}, this daemon {PROTOCOL}; update one"
            )
        namespace = Namespace.from_json(request.namespace_json) if request.namespace_json else None
        engine = engine_from_wire(request.engine) if request.HasField("engine") else None
        client = request.client[:MAX_CLIENT_CHARS]
        session = self.store.open_session(client, namespace, request.part, engine)
        if engine is not None:
            self._on_engines()
        return session

    def describe_session(self, session: Session) -> bytes:
        """The answer to HELLO."""
        namespace = session.namespace
        transport = self._identity.transport if session.is_remote else None
        return store_pb2.HelloResponse(
            node_id=self._identity.node_id,
            incarnation=self._identity.incarnation,
            session_id=session.id,
            namespace_id=namespace.id if namespace is not None else b"",
            pool_bytes=self.store.holdings.pool.size_bytes,
            part_bytes=session.part_bytes if namespace is not None else 0,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            lease_seconds=self._settings.lease_seconds,
            version=__version__,
            transport=transport.transport if transport else "",
            transport_address=transport.address if transport else "",
        ).SerializeToString()

    def end_session(self, session: Session) -> None:
        """The client hung up."""
        self.store.end_session(session)
        if session.engine is not None:
            self._on_engines()

    def cut_session(self, session: Session) -> None:
        """We hung up on the client."""
        self.store.cut_session(session)
        if session.engine is not None:
            self._on_engines()

    # ---- calls ----

    def call(self, session: Session, method: Method, payload: bytes) -> bytes:
        """Answer any method but HELLO and WAIT. Raises EmberError."""
        return self._calls[int(method)](session, parse(method, payload)).SerializeToString()

    async def wait(self, session: Session, payload: bytes) -> bytes:
        """Answer WAIT. Raises EmberError."""
        request = parse(Method.WAIT, payload)
        assert isinstance(request, store_pb2.WaitRequest)
        seconds = _seconds(request.timeout_seconds, "timeout_seconds")
        lease = await self.store.wait(
            session, LeaseId(request.lease_id), request.from_block, seconds, request.until_block
        )
        self._show(session, lease)
        start = request.from_block
        places = _places(lease, session.part, start)
        return store_pb2.WaitResponse(
            usable_blocks=lease.usable,
            ready_blocks=lease.ready,
            offsets=places.offsets,
            checksums=places.checksums,
            sources=bytes(lease.sources[start : lease.ready]),
            needed_from=lease.needs.starts[session.part],
            seconds_to_complete=self.store.lender.estimates.seconds_to_complete(lease),
        ).SerializeToString()

    def status(self) -> store_pb2.StatusResponse:
        store, pins = self.store, self.store.holdings.pins
        return store_pb2.StatusResponse(
            node_id=self._identity.node_id,
            incarnation=self._identity.incarnation,
            state=self.state,
            uptime_seconds=time.monotonic() - self._started,
            tiers=[
                store_pb2.TierStatus(
                    tier=int(state.tier),  # type: ignore[arg-type]
                    capacity_bytes=state.capacity_bytes,
                    used_bytes=state.used_bytes,
                    blocks=state.blocks,
                    state=state.state,
                )
                for state in store.tier_states()
            ],
            engines=[
                engine_to_wire(session.engine)
                for session in store.sessions.values()
                if session.engine is not None
            ],
            sessions=len(store.sessions),
            leases=len(store.lender.leases),
            staged_blocks=store.staged_blocks,
            seq=self._seq(),
            counters={
                **{name: float(count) for name, count in store.holdings.counters.items()},
                **{f"fault_{name}": float(count) for name, count in faults.acted().items()},
                **dict(status_facts(store, time.monotonic())),
            },
            version=__version__,
            drives=[
                store_pb2.DriveStatus(
                    path=str(drive.path),
                    drive_id=drive.drive_id or "",
                    state=drive.state,
                    capacity_bytes=drive.capacity_bytes,
                    used_bytes=drive.used_bytes,
                    written_bytes_total=drive.written_bytes_total,
                    failed_reads=drive.failed_reads,
                    failed_writes=drive.failed_writes,
                )
                for drive in store.drive_states()
            ],
            pins=store_pb2.PinStatus(
                hard_blocks=len(pins.hard),
                soft_blocks=len(pins.soft),
                hard_bytes=pins.hard_bytes,
                limit_bytes=pins.limit_bytes,
            ),
        )

    def check(self) -> store_pb2.CheckResponse:
        return store_pb2.CheckResponse(problems=self.store.problems())

    @property
    def state(self) -> str:
        return "draining" if self.store.is_draining else "serving"

    # ---- one method each ----

    def _probe(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.ProbeRequest)
        probed = self.store.probe(session, hashes_from_wire(request.hashes))
        return store_pb2.ProbeResponse(hit_blocks=probed.hit_blocks, tiers=probed.tiers)

    def _acquire(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.AcquireRequest)
        lease = self.store.acquire(
            session,
            hashes_from_wire(request.hashes),
            _policy(request.policy),
            _seconds(request.deadline_seconds, "deadline_seconds"),
            _seconds(request.recompute_seconds_per_block, "recompute_seconds_per_block") or None,
        )
        if lease is None:
            return store_pb2.AcquireResponse()
        self._show(session, lease)
        places = _places(lease, session.part, 0)
        if places.are_unsummed:
            self.store.lender.learn_checksums(lease)
        return store_pb2.AcquireResponse(
            lease_id=lease.id,
            expires_in_seconds=self._settings.lease_seconds,
            usable_blocks=lease.usable,
            ready_blocks=lease.ready,
            offsets=places.offsets,
            checksums=places.checksums,
            sources=bytes(lease.sources),
            needed_from=lease.needs.starts[session.part],
            seconds_to_complete=self.store.lender.estimates.seconds_to_complete(lease),
        )

    def _show(self, session: Session, lease: Lease) -> None:
        if session.is_remote:
            self.store.lender.peer_ranges.allow_ready(lease, session.part)

    def _release(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.ReleaseRequest)
        if len(request.lease_ids) > MAX_LEASES_PER_CALL:
            raise InvalidRequestError(f"release of {len(request.lease_ids)} leases in one call")
        self.store.release(session, request.lease_ids)
        return common_pb2.Empty()

    def _stage(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.StageRequest)
        staged = self.store.stage(
            session,
            hashes_from_wire(request.hashes),
            parent_from_wire(request.parent),
            salt_id_from_wire(request.salt_id),
        )
        return store_pb2.StageResponse(
            stage_id=staged.stage_id, states=staged.states, offsets=u64s_to_wire(staged.offsets)
        )

    def _commit(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.CommitRequest)
        faults.hit(faults.BEFORE_COMMIT)
        committed = self.store.commit(
            session,
            request.stage_id,
            hashes_from_wire(request.hashes),
            u64s_from_wire(request.checksums),
        )
        faults.hit(faults.BEFORE_ACK)
        return store_pb2.CommitResponse(committed_blocks=committed)

    def _abort(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.AbortRequest)
        self.store.abort(session, request.stage_id)
        return common_pb2.Empty()

    def _heartbeat(self, session: Session, request: Message) -> Message:
        self.store.heartbeat(session)
        return store_pb2.HeartbeatResponse(draining=self.store.is_draining)

    def _prefetch(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.PrefetchRequest)
        scheduled = self.store.prefetch(
            session,
            hashes_from_wire(request.hashes),
            _seconds(request.deadline_seconds, "deadline_seconds"),
            followed_node(request),
        )
        return store_pb2.PrefetchResponse(
            scheduled_blocks=scheduled.blocks, prefetch_id=scheduled.prefetch_id
        )

    def _cancel_prefetch(self, session: Session, request: Message) -> Message:
        assert isinstance(request, store_pb2.CancelPrefetchRequest)
        self.store.cancel_prefetch(session, request.prefetch_id)
        return common_pb2.Empty()

    def _drain(self, session: Session, request: Message) -> Message:
        self._on_drain()
        return common_pb2.Empty()


def parse(method: Method, payload: bytes) -> Message:
    """The request of a method. Raises InvalidRequestError when the bytes are not one."""
    try:
        return _REQUESTS[int(method)].FromString(payload)
    except DecodeError as error:
        raise InvalidRequestError(f"{method.name} request is malformed: {error}") from None


def error_detail(error: EmberError) -> bytes:
    return common_pb2.ErrorDetail(
        code=error.code, type=type(error).__name__, message=str(error)
    ).SerializeToString()


def _policy(value: int) -> AcquirePolicy:
    policy = _POLICIES.get(value)
    if policy is None:
        raise InvalidRequestError(f"acquire policy {value} is unknown")
    return policy


def _seconds(value: float, name: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise InvalidRequestError(f"{name} {value} must be a finite number, 0 or more")
    return value


@dataclass(frozen=True, slots=True)
class _Places:
    """Packed, of some ready blocks: where the session's part lies, and its checksum."""

    offsets: bytes
    checksums: bytes
    are_unsummed: bool
    """Whether some checksum is not known yet."""


def _places(lease: Lease, part: int, start: int) -> _Places:
    """Of the ready blocks from `start` on; zeros for those that are not needed."""
    first = max(start, lease.needs.starts[part])
    unneeded = bytes(8 * max(0, min(first, lease.ready) - start))
    slots = [block.slots[part] for block in lease.blocks[first : lease.ready]]  # type: ignore[union-attr]
    checksums = [slot.checksum for slot in slots]  # type: ignore[union-attr]
    return _Places(
        unneeded + u64s_to_wire([slot.offset for slot in slots]),  # type: ignore[union-attr]
        unneeded + u64s_to_wire(checksums),
        UNKNOWN_CHECKSUM in checksums,
    )
