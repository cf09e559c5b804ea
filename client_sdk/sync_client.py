"""The blocking client: what an engine's own thread uses.

A dead, stopped or slow daemon is an UnavailableError within the timeout, never a hang: the engine
treats it, and any other EmberError, as a miss.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from client_sdk.attached_pool import AttachedPool
from client_sdk.borrowed import Buffer, pack_hashes
from client_sdk.connection import ClientCounters, Connection
from client_sdk.get_pipeline import GetPipeline
from client_sdk.patience import DEFAULT_PATIENCE, Patience, check_seconds
from client_sdk.prefetch import HintedSource, Prefetch, prefetch_request
from client_sdk.put_pipeline import PutPipeline, PutResult
from client_sdk.session import Endpoint, RemoteAddress, Session, SessionEndpoint, Terms
from client_sdk.status import NodeStatus, status_from_wire
from client_sdk.sync_borrowed import Lease, StagedWrite
from emberkv_proto.errors import (
    EmberError,
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
    Tier,
)
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import Method

TIER_SETS = tuple(frozenset(tier for tier in Tier if bits >> tier & 1) for bits in range(256))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the node holds of a chain. No promise: only a lease keeps it there."""

    hit_blocks: int
    """Length of the usable prefix."""
    tiers: tuple[frozenset[Tier], ...]
    """For each asked block, where it is resident."""


class SyncClient:
    """An engine's session with its node's store daemon.

    Calls are serialised by a lock, so threads may share a client; a thread of its own that must
    not wait for others' calls takes a client of its own. After the first call a background thread
    sends heartbeats and re-opens a lost session, until `close`.
    """

    def __init__(
        self,
        socket_path: Path | str | RemoteAddress,
        namespace: Namespace,
        *,
        part: int = 0,
        engine: EngineInfo | None = None,
        client_name: str = "",
        timeout_seconds: float = 1.0,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """Does not connect: the daemon may be away.

        Args:
            socket_path: of this node's daemon; or a RemoteAddress, whose sessions map no
                pool (`RemoteClient` moves their bytes).
            part: this rank's part of each block, `group * shards + shard`.
            engine: told to the index through the daemon, so that routers find this engine.
            timeout_seconds: what one call costs at most, connecting included.
            patience: how long `acquire` lets the daemon bring blocks, unless it is told.

        Raises:
            InvalidRequestError: no such part, or a path that is too long for a socket.
        """
        self._part_bytes = namespace.part_bytes(part)
        endpoint: SessionEndpoint
        if isinstance(socket_path, RemoteAddress):
            from client_sdk.remote_session import RemoteEndpoint  # needs grpcio

            endpoint = RemoteEndpoint(
                socket_path.address, namespace, part, engine, client_name, socket_path.tls
            )
        else:
            endpoint = Endpoint(Path(socket_path), namespace, part, engine, client_name)
        self._connection = Connection(endpoint, check_seconds(timeout_seconds))
        self._timeout_seconds = timeout_seconds
        self._patience = patience
        self._block_tokens = namespace.block_tokens
        self._closing = threading.Event()
        self._beater: threading.Thread | None = None
        self._beater_lock = threading.Lock()

    @property
    def is_connected(self) -> bool:
        return self._connection.session is not None

    @property
    def is_draining(self) -> bool:
        """Whether the daemon said, at the last heartbeat, that it takes no new work."""
        return self._connection.is_draining

    @property
    def counters(self) -> ClientCounters:
        return self._connection.counters

    @property
    def node_id(self) -> NodeId:
        """Raises UnavailableError when there is no session."""
        return self._terms().node_id

    @property
    def incarnation(self) -> Incarnation:
        """Raises UnavailableError when there is no session."""
        return self._terms().incarnation

    @property
    def part_bytes(self) -> int:
        """Payload bytes of this session's part. Raises UnavailableError without a session."""
        return self._terms().part_bytes

    def connect(self) -> None:
        """Open the session now.

        Raises:
            UnavailableError: no daemon there, or it does not answer; names the path and the fix.
            AccessDeniedError, LayoutMismatchError, InvalidRequestError: it will not have us.
        """
        self._keep_beating()
        self._connection.connect()

    def prefault(self, timeout_seconds: float) -> int:
        """Spare this session's first copies their page faults: see `AttachedPool.prefault`.

        Returns how many bytes of the pool are mapped now. All sessions of this process with the
        daemon share them, until it has another pool.

        Raises:
            UnavailableError: no session can be had.
        """
        deadline = time.monotonic() + check_seconds(timeout_seconds)
        self._keep_beating()
        pool = self._connection.connect().pool
        return pool.prefault(deadline)

    @property
    def pool(self) -> AttachedPool:
        """The session's, as this process maps it. Raises UnavailableError without a session."""
        return self._session().pool

    def probe(self, hashes: Sequence[BlockHash]) -> ProbeResult:
        """How much of a chain the node holds. Pins nothing."""
        self._keep_beating()
        answer = self._connection.call(
            Method.PROBE,
            store_pb2.ProbeRequest(hashes=pack_hashes(hashes)),
            store_pb2.ProbeResponse,
        )
        return ProbeResult(answer.hit_blocks, tuple(TIER_SETS[bits] for bits in answer.tiers))

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        policy: AcquirePolicy = AcquirePolicy.TIMEOUT,
        deadline_seconds: float | None = None,
        recompute_seconds_per_block: float | None = None,
    ) -> Lease:
        """Lease the longest usable prefix of a chain; a miss is a lease over no block.

        Returns at once with what is in DRAM; the rest becomes ready while `Lease.wait` waits.
        `deadline_seconds` bounds how long the daemon goes on bringing blocks; by default the
        client's `patience` does. With `recompute_seconds_per_block`, what the engine needs to
        compute a block, the lease is no longer than is worth waiting for, and shrinks when the
        daemon finds its SSD or peers slower than that.
        """
        self._keep_beating()
        if deadline_seconds is None:
            tokens = len(hashes) * self._block_tokens
            deadline_seconds = self._patience.deadline_seconds(policy, tokens)
        request = store_pb2.AcquireRequest(
            hashes=pack_hashes(hashes),
            policy=int(policy),  # type: ignore[arg-type]
            deadline_seconds=check_seconds(deadline_seconds),
            recompute_seconds_per_block=check_seconds(recompute_seconds_per_block or 0.0),
        )
        return self._connection.borrow(
            Method.ACQUIRE,
            request,
            store_pb2.AcquireResponse,
            lambda session, answer, sent_at: Lease(
                self._connection, session, len(hashes), answer, sent_at
            ),
        )

    def stage(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
    ) -> StagedWrite:
        """Ask for slots to write blocks into; `parent` is the hash before `hashes[0]`.

        New blocks count against the quota of `salt_id` (see `emberkv_proto.hashing.salt_id`); None:
        nobody's.
        """
        self._keep_beating()
        request = store_pb2.StageRequest(
            hashes=pack_hashes(hashes),
            parent=pack_hashes([parent] if parent else []),
            salt_id=salt_id or b"",
        )
        return self._connection.borrow(
            Method.STAGE,
            request,
            store_pb2.StageResponse,
            lambda session, answer, sent_at: StagedWrite(
                self._connection, session, hashes, answer, sent_at
            ),
        )

    def put(
        self,
        hashes: Sequence[BlockHash],
        buffer: Buffer,
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
        checksums: Sequence[int] | None = None,
    ) -> PutResult:
        """Write the blocks of a chain out of one buffer of as many: stage, copy and commit.

        Goes batch by batch, with the daemon's work beside the copies, and is the fastest way in.
        Checksums are computed here unless the caller has them; `UNKNOWN_CHECKSUM` leaves that of a
        block to the daemon (see `StagedWrite.commit_unsummed`). The buffer is not to be changed
        before this returns, and free to be used afterwards.

        Raises:
            InvalidRequestError: the buffer, or the checksums, are not those of so many blocks.
            EmberError: what failed, and how many blocks are committed all the same.
        """
        self._keep_beating()
        return PutPipeline(
            self._connection, self._part_bytes, hashes, buffer, parent, salt_id, checksums
        ).run()

    def get(
        self,
        hashes: Sequence[BlockHash],
        buffer: Buffer,
        *,
        policy: AcquirePolicy = AcquirePolicy.TIMEOUT,
        deadline_seconds: float | None = None,
    ) -> int:
        """Copy the longest prefix of a chain that can be had into one buffer of as many blocks.

        Returns how many blocks: acquires, waits, copies and releases batch by batch, with the
        daemon's work beside the copies, and is the fastest way out. Only full blocks: where a hit
        needs just a window of the chain, `acquire` tells which.

        Raises:
            InvalidRequestError: no such buffer, or a hit that needs a window only.
            EmberError: what failed; what is in the buffer is of no use.
        """
        self._keep_beating()
        if deadline_seconds is None:
            tokens = len(hashes) * self._block_tokens
            deadline_seconds = self._patience.deadline_seconds(policy, tokens)
        return GetPipeline(
            self._connection,
            self._part_bytes,
            hashes,
            buffer,
            policy,
            check_seconds(deadline_seconds),
        ).run()

    def prefetch(self, hashes: Sequence[BlockHash], deadline_seconds: float) -> int:
        """Have missing blocks brought into DRAM meanwhile; return how many were scheduled."""
        return self.start_prefetch(hashes, deadline_seconds).scheduled_blocks

    def start_prefetch(
        self,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        source: HintedSource | None = None,
    ) -> Prefetch:
        """As `prefetch`, to be cancelled when the request goes elsewhere.

        `source`: a node on which the chain is being computed. What is missing is taken from it,
        block by block as it comes; without, from where the index says it is.
        """
        self._keep_beating()
        return self._connection.borrow(
            Method.PREFETCH,
            prefetch_request(hashes, deadline_seconds, source),
            store_pb2.PrefetchResponse,
            lambda session, answer, sent_at: Prefetch(self._connection, session, answer),
        )

    def heartbeat(self) -> None:
        """Renew leases and stages; the background thread does so every heartbeat_seconds."""
        self._keep_beating()
        self._connection.heartbeat()

    def status(self) -> NodeStatus:
        self._keep_beating()
        return status_from_wire(
            self._connection.call(
                Method.STATUS, store_pb2.StatusRequest(), store_pb2.StatusResponse
            )
        )

    def close(self) -> None:
        """End the session with its leases and stages, and the background thread. Idempotent.

        Slots of a staged write that is still open stay this process's until it is left: another
        thread may be copying into them.
        """
        self._closing.set()
        self._connection.close()
        with self._beater_lock:
            beater, self._beater = self._beater, None
        if beater is not None and beater is not threading.current_thread():
            beater.join(2 * self._timeout_seconds + 1.0)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check_integrity(self) -> None:
        self._connection.check_integrity()
        assert not (self._closing.is_set() and self._beater), "closed with a heartbeat thread"

    def _terms(self) -> Terms:
        return self._session().terms

    def _session(self) -> Session:
        session = self._connection.session
        if session is None:
            raise UnavailableError(f"not connected to {self._connection.endpoint.where}")
        return session

    def _keep_beating(self) -> None:
        if self._beater is not None and self._beater.is_alive():
            return
        with self._beater_lock:
            if self._closing.is_set() or (self._beater is not None and self._beater.is_alive()):
                return
            self._beater = threading.Thread(
                target=self._beat_until_closed, name="emberkv-heartbeat", daemon=True
            )
            self._beater.start()

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(self._connection.seconds_to_beat):
            with contextlib.suppress(EmberError):  # counted already; the next beat tries again
                self._connection.keep_alive()


class OperatorClient:
    """Status, check and drain over the daemon's own socket; opens no namespace, maps nothing."""

    def __init__(self, socket_path: Path | str, *, timeout_seconds: float = 5.0) -> None:
        self._connection = Connection(
            Endpoint(Path(socket_path), client_name="operator"), check_seconds(timeout_seconds)
        )

    def connect(self) -> None:
        """Raises UnavailableError or AccessDeniedError; both name the path and the fix."""
        self._connection.connect()

    def status(self) -> NodeStatus:
        return status_from_wire(
            self._ask().call(Method.STATUS, store_pb2.StatusRequest(), store_pb2.StatusResponse)
        )

    def check(self) -> list[str]:
        """Have the daemon check its invariants; return what it found wrong."""
        answer = self._ask().call(Method.CHECK, store_pb2.CheckRequest(), store_pb2.CheckResponse)
        return list(answer.problems)

    def drain(self) -> None:
        """Have the daemon refuse new work and finish what it has."""
        self._ask().call(Method.DRAIN, store_pb2.DrainRequest(), common_pb2.Empty)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self) -> Connection:
        # An operator is a person: it connects at once and gets the plain error.
        self._connection.connect()
        return self._connection
