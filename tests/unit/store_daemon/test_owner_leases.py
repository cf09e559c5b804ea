"""What becomes of leases that are of no use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from client_sdk.transport.base import BusyHereError, TransportAddress
from emberkv_proto.types import Incarnation, NodeId
from store_daemon.owner_leases import OwnerLeases
from store_daemon.peer_client import LeaseOwner, RemoteGrant, Wish
from store_daemon.ports import PeerGrant
from tests.helpers.peer_doubles import chain, small_namespace

NAMESPACE = small_namespace()
OWNER = LeaseOwner(NodeId("peer"), "127.0.0.1:1")


class FirstThings:
    byte_count = 100

    def __init__(self) -> None:
        self.is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True


class Client:
    def __init__(self) -> None:
        self.released: list[int] = []

        self.lent = object()

    async def acquire(self, *_: object) -> object:
        return self.lent

    async def release(self, address: str, lease_id: int, timeout_seconds: float) -> None:
        assert address == OWNER.address
        self.released.append(lease_id)

    async def close(self) -> None:
        pass


class Liar:
    """Lends nothing, and sends bytes behind it."""

    def __init__(self, lease_id: int) -> None:
        self._lease_id = lease_id
        self.first = FirstThings()

    def may_ask(self, owner: LeaseOwner) -> bool:
        return True

    async def ask(self, *_: object, ready_only: bool) -> RemoteGrant:
        grant = PeerGrant(self._lease_id, 0, NAMESPACE.parts, (), ())
        source = TransportAddress("tcp", OWNER.address, Incarnation(1))
        return RemoteGrant(grant, source, b"ticket", self.first)  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("lease_id", [0, 7])
async def test_a_lease_of_nothing_holds_no_connection_and_is_given_back(lease_id: int) -> None:
    client: Any = Client()
    liar: Any = Liar(lease_id)
    leases = OwnerLeases(client, liar, 1.0, lambda reason, error: None)
    wish = Wish(NAMESPACE, chain(NAMESPACE, 2), 5.0, 2)
    assert await asyncio.wait_for(leases.ask_at_once(OWNER, wish, 5.0), 30) is None
    assert leases.quick_leases == 0
    await leases.close()
    assert liar.first.is_abandoned
    assert client.released == [lease_id] * bool(lease_id)


class NoConnection(Liar):
    async def ask(self, *_: object, ready_only: bool = False) -> RemoteGrant:
        raise BusyHereError("reads have them all")

    def learn(self, *_: object) -> None:
        pass


async def test_without_a_connection_a_lease_is_asked_for_by_grpc_and_none_is_guessed() -> None:
    quick: Any = NoConnection(0)
    client: Any = Client()
    leases = OwnerLeases(client, quick, 1.0, lambda reason, error: None)
    wish = Wish(NAMESPACE, chain(NAMESPACE, 2), 5.0, 2)
    assert await leases.ask(OWNER, wish, 5.0, is_first=True) is client.lent
    with pytest.raises(BusyHereError):
        await leases.ask_at_once(OWNER, wish, 5.0)
    await leases.close()
