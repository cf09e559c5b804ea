"""One connection for each node and life of it; nothing stays open for those that are gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from client_sdk.transport.base import Peer, TransportAddress
from emberkv_proto.types import Incarnation, NodeId
from store_daemon.peer_connections import PeerConnections
from store_daemon.transport.base import Transport

A, B = NodeId("a"), NodeId("b")


@dataclass(eq=False)
class Line:
    address: TransportAddress


@dataclass
class Lines:
    """What a transport has open."""

    open: list[Line] = field(default_factory=list)

    def connect(self, source: TransportAddress) -> Line:
        self.open.append(Line(source))
        return self.open[-1]

    def close(self, line: Line) -> None:
        self.open.remove(line)


def address(life: int) -> TransportAddress:
    return TransportAddress("tcp", "127.0.0.1:1", Incarnation(life))


def connections(lines: Lines) -> PeerConnections:
    return PeerConnections(cast(Transport, lines))


def test_a_node_keeps_its_connection_until_it_has_another_life() -> None:
    lines = Lines()
    to = connections(lines).to
    first = to(A, address(1))
    assert to(A, address(1)) is first
    second = to(A, address(2))
    assert second is not first
    assert lines.open == [cast(Peer, second)]


def test_those_of_nodes_that_are_gone_are_closed() -> None:
    lines = Lines()
    kept = connections(lines)
    kept.to(A, address(1))
    stays = kept.to(B, address(1))
    kept.retain({B})
    assert (lines.open, len(kept)) == ([stays], 1)
    kept.close()
    assert (lines.open, len(kept)) == ([], 0)
