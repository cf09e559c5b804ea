"""Leases asked for ahead: each grant is taken or given back, whenever its pull ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from client_sdk.transport.base import TransportAddress
from emberkv_proto.types import BlockHash, Incarnation
from store_daemon.leases_ahead import LeasesAhead
from store_daemon.peer_client import RemoteGrant
from store_daemon.ports import PeerGrant

HASHES = [BlockHash(bytes([number]) * 32) for number in range(4)]
GRANT = RemoteGrant(PeerGrant(7, 4, 1, (), ()), TransportAddress("tcp", "a", Incarnation(1)))


@pytest.mark.parametrize("turns", range(6))
async def test_grant_that_comes_while_the_pull_is_cancelled_is_taken_or_given_back(
    turns: int,
) -> None:
    answer: asyncio.Future[RemoteGrant] = asyncio.get_running_loop().create_future()
    unused: list[asyncio.Task[RemoteGrant]] = []

    async def ask(window: Sequence[BlockHash]) -> RemoteGrant:
        assert window == HASHES
        return await answer

    leases = LeasesAhead(ask, HASHES, 4, unused.append)
    taking = asyncio.create_task(leases.next())
    for _ in range(3):
        await asyncio.sleep(0)
    answer.set_result(GRANT)
    for _ in range(turns):
        await asyncio.sleep(0)
    taking.cancel()
    (taken,) = await asyncio.gather(taking, return_exceptions=True)
    leases.close()
    given_back = [await task for task in unused]
    assert [grant for grant in (taken, *given_back) if grant is GRANT] == [GRANT]
