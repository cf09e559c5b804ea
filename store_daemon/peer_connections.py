"""The connections over which other nodes' pools are read: one for each node and life of it."""

from __future__ import annotations

from collections.abc import Container

from client_sdk.transport.base import Peer, TransportAddress
from emberkv_proto.types import NodeId
from store_daemon.transport.base import Transport


class PeerConnections:
    """Opens them when they are first needed. Belongs to one event loop; close it there."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[NodeId, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def to(self, node_id: NodeId, source: TransportAddress) -> Peer:
        """Raises EmberError when there can be none."""
        peer = self.known(node_id, source)
        if peer is not None:
            return peer
        self._drop(node_id)  # to an earlier life of it
        peer = self._peers[node_id] = self._transport.connect(source)
        return peer

    def known(self, node_id: NodeId, source: TransportAddress) -> Peer | None:
        """The one there is already."""
        peer = self._peers.get(node_id)
        return peer if peer is not None and peer.address == source else None

    def retain(self, node_ids: Container[NodeId]) -> None:
        """Close those to all other nodes."""
        for node_id in [node_id for node_id in self._peers if node_id not in node_ids]:
            self._drop(node_id)

    def close(self) -> None:
        for node_id in list(self._peers):
            self._drop(node_id)

    def _drop(self, node_id: NodeId) -> None:
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            self._transport.close(peer)
