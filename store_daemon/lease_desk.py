"""Lends blocks to other daemons: by gRPC, and sooner at the transport's port.

Whoever asks at the transport's port shows a ticket that only gRPC gives, so who may not call the
one may not ask the other either. It travels in the clear, as the blocks' bytes do.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYetError

from google.protobuf.message import DecodeError

from emberkv_proto.convert import (
    hashes_from_wire,
    namespace_id_from_wire,
    salt_ids_to_wire,
    u64s_to_wire,
)
from emberkv_proto.errors import (
    AccessDeniedError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    UnknownLeaseError,
)
from emberkv_proto.v1 import store_pb2
from store_daemon.ports import PeerGrant, PeerStore
from store_daemon.transport.base import Lent

MAX_LEASE_SECONDS = 120.0
MAX_WAIT_SECONDS = 30.0
MAX_NODE_ID_BYTES = 253
ANSWER_SECONDS = 30.0
"""For the store's answer to a thread of the transport's, behind whatever the loop does first."""
TICKET_BYTES = 16


async def lend(store: PeerStore, request: store_pb2.PeerAcquireRequest) -> PeerGrant:
    """Check what a daemon asks, and ask the store. Raises EmberError."""
    hashes = hashes_from_wire(request.hashes)
    seconds = request.lease_seconds
    if not hashes:
        raise InvalidRequestError("peer acquire without hashes")
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_LEASE_SECONDS):
        raise InvalidRequestError(f"lease_seconds {seconds} is not in 0..{MAX_LEASE_SECONDS}")
    if not 0 < len(request.requester) <= MAX_NODE_ID_BYTES:
        raise InvalidRequestError("requester must be a node id")
    if not 0 <= request.wait_seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequestError(
            f"wait_seconds {request.wait_seconds} is not in 0..{MAX_WAIT_SECONDS}"
        )
    return await store.peer_acquire(
        namespace_id_from_wire(request.namespace_id),
        hashes,
        seconds,
        request.requester,
        request.wait_seconds,
        request.ready_only,
    )


def grant_to_wire(grant: PeerGrant) -> store_pb2.PeerAcquireResponse:
    """All but where the owner's pool can be read."""
    return store_pb2.PeerAcquireResponse(
        lease_id=grant.lease_id,
        usable_blocks=grant.usable_blocks,
        parts=grant.parts,
        offsets=u64s_to_wire([part.offset for part in grant.ranges]),
        lengths=u64s_to_wire([part.length for part in grant.ranges]),
        checksums=u64s_to_wire(grant.checksums),
        salt_ids=salt_ids_to_wire(grant.salt_ids),
    )


class LeaseDesk:
    """Answers the transport's threads from the store's event loop, on which it is made and closed.

    Raises from `lend` as `Lend`: AccessDeniedError without the ticket of this life,
    InvalidRequestError, what the store raises, DeadlineError, UnavailableError once closed.
    """

    def __init__(self, store: PeerStore) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: set[Future[PeerGrant]] = set()
        self.is_closed = False

    def lend(self, raw: bytes, first_blocks: int) -> Lent:
        """Implements `transport.base.Lend`, in a thread of the transport's."""
        try:
            request = store_pb2.PeerAcquireRequest.FromString(raw)
        except DecodeError:
            raise InvalidRequestError("a lease request cannot be parsed") from None
        if not hmac.compare_digest(request.ticket, self.ticket):
            raise AccessDeniedError("a lease request without the ticket of this daemon's life")
        grant = self._ask(request)
        first = grant.ranges[: min(first_blocks, grant.usable_blocks) * grant.parts]

        def give_back() -> None:
            self._loop.call_soon_threadsafe(self._release, grant.lease_id)

        return Lent(grant_to_wire(grant).SerializeToString(), grant.lease_id, first, give_back)

    def close(self) -> None:
        """Lend no more; whoever waits for an answer gets none. Before its transport shuts down,
        which waits for those threads."""
        with self._lock:
            self.is_closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def check_integrity(self) -> None:
        """Assert that nobody waits for an answer that has come."""
        with self._lock:
            assert not (self.is_closed and any(not future.done() for future in self._waiting))

    def _ask(self, request: store_pb2.PeerAcquireRequest) -> PeerGrant:
        with self._lock:
            if self.is_closed:
                raise UnavailableError("the daemon is shutting down")
            future = asyncio.run_coroutine_threadsafe(lend(self._store, request), self._loop)
            self._waiting.add(future)
        try:
            return future.result(ANSWER_SECONDS)
        except CancelledError:
            raise UnavailableError("the daemon is shutting down") from None
        except NotYetError:
            if not future.cancel():  # its answer came just now
                return future.result()
            raise DeadlineError(f"the store did not answer in {ANSWER_SECONDS} s") from None
        finally:
            with self._lock:
                self._waiting.discard(future)

    def _release(self, lease_id: int) -> None:
        try:
            self._store.peer_release(lease_id)
        except UnknownLeaseError:
            return  # it has ended by its clock meanwhile, or with the store
