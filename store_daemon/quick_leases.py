"""Leases asked for at an owner's transport port: sooner than by gRPC, the first bytes right behind.

Only owners whose gRPC gave a ticket are asked so, and gRPC remains for everything that is not
answered: who gets None from here asks there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from client_sdk import faults
from client_sdk.transport.base import BusyHereError, Cancellation, Peer, TransportAddress
from emberkv_proto.errors import DeadlineError, EmberError, InvalidRequestError
from emberkv_proto.types import NodeId
from emberkv_proto.v1 import store_pb2
from store_daemon.peer_client import LeaseOwner, RemoteGrant, Wish, grant_from_wire, lease_request
from store_daemon.peer_connections import PeerConnections
from store_daemon.transport.base import LeaseReply, Transport

AT_ONCE = 4
"""Requests under way, a thread each; more go by gRPC."""


@dataclass(frozen=True, slots=True)
class _Known:
    address: str
    """Of its gRPC, where leases end: another one is another daemon."""
    source: TransportAddress
    ticket: bytes


class QuickLeases:
    """Belongs to one event loop; close it there."""

    def __init__(self, node_id: NodeId, transport: Transport, connections: PeerConnections) -> None:
        self._node_id = node_id
        self._transport = transport
        self._connections = connections
        self._known: dict[NodeId, _Known] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, "emberkv-lease")
        self._closing = Cancellation()
        self._asking: set[NodeId] = set()
        """One request each: more would keep connections from the reads of the first."""

    def learn(self, owner: LeaseOwner, remote: RemoteGrant) -> None:
        """What gRPC said of the way there."""
        if remote.ticket:
            self._known[owner.node_id] = _Known(owner.address, remote.source, remote.ticket)
        else:
            self._known.pop(owner.node_id, None)

    def retain(self, node_ids: Container[NodeId]) -> None:
        """Forget all other nodes."""
        self._known = {node: known for node, known in self._known.items() if node in node_ids}

    def may_ask(self, owner: LeaseOwner) -> bool:
        """Whether there is a way there, and no wait for it."""
        known = self._known.get(owner.node_id)
        if known is None or known.address != owner.address or self._is_asking(owner.node_id):
            return False
        peer = self._connections.known(owner.node_id, known.source)
        return peer is None or not self._transport.is_busy(peer)

    async def ask(
        self, owner: LeaseOwner, wish: Wish, timeout_seconds: float, *, ready_only: bool = False
    ) -> RemoteGrant | None:
        """Lease at an owner of which `may_ask` has just said yes; None: ask it by gRPC.

        Not to be cancelled: the lease may be given already. Raises BusyHereError where reads leave
        it no connection, DeadlineError, and what a fault point raises.
        """
        known = self._known[owner.node_id]
        request = lease_request(self._node_id, wish.namespace, wish.hashes, wish.lease_seconds)
        request.ready_only = ready_only
        request.ticket = known.ticket
        faults.hit(faults.PEER_LEASE)
        assert not self._is_asking(owner.node_id)
        self._asking.add(owner.node_id)
        try:
            peer = self._connections.to(owner.node_id, known.source)
            reply = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._ask, peer, request, wish.first_blocks, timeout_seconds
            )
        except DeadlineError:
            raise
        except RuntimeError as error:
            raise BusyHereError(f"no thread to ask with: {error}") from None
        except EmberError:
            # Of another life, gone, or of another mind: gRPC tells, and gives a new ticket.
            self._known.pop(owner.node_id, None)
            return None
        finally:
            self._asking.discard(owner.node_id)
        try:
            message = store_pb2.PeerAcquireResponse.FromString(reply.answer)
            grant = grant_from_wire(message, wish.namespace, len(wish.hashes))
        except (DecodeError, InvalidRequestError):
            if reply.first is not None:
                reply.first.abandon()
            self._known.pop(owner.node_id, None)
            return None
        return RemoteGrant(grant, known.source, known.ticket, reply.first)

    def _is_asking(self, node_id: NodeId) -> bool:
        return node_id in self._asking or len(self._asking) == AT_ONCE

    def cancel(self) -> None:
        """Make all requests under way fail soon."""
        self._closing.cancel()

    def close(self) -> None:
        """Join the threads. Nobody may be asking."""
        assert not self._asking, "closed while a lease is asked for"
        self._threads.shutdown()

    def check_integrity(self) -> None:
        """Assert the bound on requests, and that every way has its ticket."""
        assert len(self._asking) <= AT_ONCE
        assert all(known.ticket for known in self._known.values())

    def _ask(
        self,
        peer: Peer,
        request: store_pb2.PeerAcquireRequest,
        first_blocks: int,
        timeout_seconds: float,
    ) -> LeaseReply:
        return self._transport.ask_lease(
            peer, request.SerializeToString(), first_blocks, timeout_seconds, self._closing
        )
