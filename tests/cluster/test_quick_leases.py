"""Leases at the owner's transport port, with the first bytes behind them, and owners guessed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from emberkv_proto.types import BlockHash, Incarnation, NodeId
from tests.helpers.peer_node import PeerNode, peer_node
from tests.helpers.pulling_node import (
    BLOCKS,
    NAMESPACE,
    OPEN_SECONDS,
    Here,
    assert_no_lease_is_left,
    pulling_node,
)
from tests.helpers.waiting import until


@pytest.fixture
def owner() -> Iterator[PeerNode]:
    with peer_node(NAMESPACE) as node:
        yield node


@pytest.fixture
async def here(owner: PeerNode) -> AsyncIterator[Here]:
    async with pulling_node(owner) as node:
        yield node


async def pull(here: Here, first: int, count: int) -> int:
    """So many blocks from there on."""
    hashes: list[BlockHash] = here.hashes[first : first + count]
    parent = here.hashes[first - 1] if first else None
    return await here.puller.pull(NAMESPACE, parent, hashes, here.target, 30.0)


async def acquainted(here: Here) -> None:
    """Two pulls of four blocks, by the index's word: the third one may guess."""
    assert await pull(here, 0, 4) == 4
    assert await pull(here, 4, 4) == 4
    await assert_no_lease_is_left(here.owner)


def guesses(here: Here) -> tuple[int, int]:
    return here.puller.counters.guesses, here.puller.counters.wrong_guesses


async def test_the_first_lease_of_an_owner_goes_by_grpc_and_the_next_pulls_are_quick(
    here: Here,
) -> None:
    assert await pull(here, 0, 4) == 4
    assert here.puller.quick_leases == 0
    assert await pull(here, 4, 10) == 10
    assert here.puller.quick_leases == 1
    assert guesses(here) == (0, 0)
    assert list(here.target.landed) == here.hashes[:14]
    assert not here.failures


async def test_the_owner_of_the_last_pulls_is_asked_before_the_index(here: Here) -> None:
    await acquainted(here)
    here.index.is_away = True
    assert await pull(here, 8, 20) == 20
    assert guesses(here) == (1, 0)
    assert not here.failures
    assert here.index.queries == 2


async def test_an_owner_counts_for_what_landed_though_the_pull_was_called_off(here: Here) -> None:
    assert await pull(here, 0, 4) == 4
    go_on = here.owner.store.hold_reads(here.hashes[9:])
    pulling = asyncio.create_task(pull(here, 4, 12))
    await until(lambda: len(here.target.landed) == 8)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    go_on.set()
    here.index.is_away = True
    assert await pull(here, 8, 8) == 8
    assert guesses(here) == (1, 0)


async def test_what_a_guessed_owner_lacks_comes_from_the_one_that_the_index_names(
    here: Here,
) -> None:
    with peer_node(NAMESPACE) as second:
        await acquainted(here)
        here.owner.store.forget(here.hashes[12:])
        second.store.put(here.hashes)
        here.index.holds("second", second.grpc_address, here.hashes)
        here.index.held[NodeId("peer")].clear()
        here.clock.skip(1)  # the nodes are asked for anew
        assert await pull(here, 8, BLOCKS - 8) == BLOCKS - 8
        assert guesses(here) == (1, 0)
        assert set(here.puller.counters.from_peer) == {NodeId("peer"), NodeId("second")}
        await assert_no_lease_is_left(second)


async def test_a_wrong_guess_costs_a_question_and_no_trust(here: Here) -> None:
    with peer_node(NAMESPACE) as second:
        await acquainted(here)
        here.owner.store.forget(here.hashes)
        second.store.put(here.hashes)
        here.index.holds("second", second.grpc_address, here.hashes)
        here.index.held[NodeId("peer")].clear()
        here.clock.skip(1)
        assert await pull(here, 8, 4) == 4
        assert await pull(here, 12, 4) == 4
        assert guesses(here) == (1, 1)
        assert not here.failures
        await assert_no_lease_is_left(second)


async def test_what_a_guessed_owner_has_on_its_drive_is_the_index_s_choice(here: Here) -> None:
    await acquainted(here)
    here.owner.store.ready_blocks = 3
    assert await pull(here, 8, 20) == 20
    assert guesses(here) == (1, 0)
    assert here.index.queries == 3
    here.owner.store.ready_blocks = 0
    assert await pull(here, 28, 4) == 4
    assert guesses(here) == (2, 1)
    assert not here.failures


async def test_an_owner_that_others_are_asking_is_not_guessed(here: Here) -> None:
    await acquainted(here)
    go_on = here.owner.store.hold_reads(here.hashes[8:12])
    first = asyncio.create_task(pull(here, 8, 4))
    await until(lambda: here.target.open_rooms == 1)
    assert await pull(here, 12, 8) == 8
    go_on.set()
    assert await first == 4
    assert guesses(here) == (1, 0)


async def test_no_more_guesses_are_under_way_at_a_time_than_there_are_threads(here: Here) -> None:
    await acquainted(here)
    here.owner.loop.call_soon_threadsafe(_sleep_a_little)
    pulls = [asyncio.create_task(pull(here, first, 4)) for first in range(8, BLOCKS, 4)]
    for _ in range(10):
        await asyncio.sleep(0)
        here.puller.check_integrity()
    assert await asyncio.gather(*pulls) == [4] * len(pulls)
    assert guesses(here)[0] == len(pulls)


async def test_of_pulls_that_guess_an_owner_on_trial_one_goes_there(here: Here) -> None:
    await acquainted(here)
    health = here.puller._health_of(NodeId("peer"))
    for _ in range(3):
        health.fail(here.clock() - OPEN_SECONDS)
    go_on = here.owner.store.hold_reads(here.hashes[8:16])
    pulls = [asyncio.create_task(pull(here, first, 4)) for first in (8, 12)]
    await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
    go_on.set()
    assert sorted(await asyncio.gather(*pulls)) == [0, 4]
    assert guesses(here) == (2, 0)
    assert await pull(here, 16, 8) == 8


async def test_pull_of_several_windows_goes_on_by_grpc(here: Here) -> None:
    await acquainted(here)
    before, leases = here.puller.counters.pulls, here.owner.store.granted
    here.puller._limits = replace(here.puller._limits, most_lease_blocks=10)
    assert await pull(here, 8, 30) == 30
    assert here.puller.counters.pulls == before + 1
    assert here.owner.store.granted == leases + 3
    assert here.puller.quick_leases == 2


async def test_room_for_less_than_what_comes_behind_the_lease_lands_that(here: Here) -> None:
    await acquainted(here)
    here.target.room_blocks = 2
    assert await pull(here, 8, 20) == 2
    here.target.room_blocks = 1 << 30
    assert await pull(here, 10, 20) == 20


async def test_no_room_leaves_no_lease_and_no_connection_behind(here: Here) -> None:
    await acquainted(here)
    here.target.is_full = True
    assert await pull(here, 8, 20) == 0
    assert here.failures == {"no_room": 1}
    here.target.is_full = False
    await assert_no_lease_is_left(here.owner)
    assert await pull(here, 8, 20) == 20


async def test_a_lie_in_the_first_bytes_is_found(here: Here) -> None:
    await acquainted(here)
    here.owner.store.lies.add(here.hashes[10])
    assert await pull(here, 8, 20) == 2
    assert here.failures == {"checksum": 1}


async def test_an_owner_in_a_new_life_is_asked_by_grpc(here: Here) -> None:
    await acquainted(here)
    with peer_node(NAMESPACE, incarnation=4) as reborn:
        reborn.store.put(here.hashes)
        here.index.addresses[NodeId("peer")] = reborn.grpc_address
        here.index.incarnations[NodeId("peer")] = Incarnation(4)
        here.clock.skip(60)
        leases = here.owner.store.granted
        assert await pull(here, 8, 20) == 20
        assert here.owner.store.granted == leases, "the old life was asked"
        await assert_no_lease_is_left(reborn)


async def test_an_owner_whose_transport_has_gone_is_asked_by_grpc(here: Here) -> None:
    await acquainted(here)
    here.owner.transport.shutdown()
    assert await pull(here, 8, 20) == 0
    assert guesses(here) == (1, 1)
    assert here.failures == {"unavailable": 1}, "by gRPC there is a lease, and then no bytes"


async def test_an_owner_that_does_not_answer_a_guess_is_asked_again_as_the_index_says(
    here: Here,
) -> None:
    await acquainted(here)
    here.puller._limits = replace(here.puller._limits, guess_seconds=0.0)
    assert await pull(here, 8, 20) == 20
    assert guesses(here) == (1, 1)


async def test_first_bytes_that_do_not_come_are_read_like_the_rest(here: Here) -> None:
    await acquainted(here)
    transfers = here.puller._transfers
    transfers.limits = replace(transfers.limits, first_seconds=0.05)
    go_on = here.owner.store.hold_reads(here.hashes[8:12])
    asyncio.get_running_loop().call_later(0.5, go_on.set)
    assert await pull(here, 8, 20) == 20
    assert guesses(here) == (1, 0)
    assert not here.failures


async def test_no_thread_to_ask_or_to_read_with_is_no_fault_of_the_owner(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    await acquainted(here)
    quick, transfers = here.puller._leases._quick, here.puller._transfers
    with monkeypatch.context() as patched:
        patched.setattr(quick._threads, "submit", submit)
        assert await pull(here, 8, 4) == 4
        patched.setattr(transfers._threads, "submit", submit)
        for _ in range(4):
            assert await pull(here, 12, 4) == 0
    assert here.failures == {"busy_here": 4}
    assert await pull(here, 12, 8) == 8
    assert guesses(here)[1] == 0


async def test_cancelled_while_the_first_bytes_come_nothing_is_written_later(here: Here) -> None:
    await acquainted(here)
    go_on = here.owner.store.hold_reads(here.hashes[9:])
    pulling = asyncio.create_task(pull(here, 8, 20))
    await until(lambda: here.target.open_rooms == 1)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    here.target.check()
    go_on.set()
    await assert_no_lease_is_left(here.owner)


async def test_cancelled_while_the_lease_is_asked_for_it_is_given_back(here: Here) -> None:
    await acquainted(here)
    leases = here.owner.store.granted
    here.owner.loop.call_soon_threadsafe(_sleep_a_little)
    pulling = asyncio.create_task(pull(here, 8, 20))
    await until(lambda: here.puller.counters.guesses == 1)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await until(lambda: here.owner.store.granted == leases + 1)
    await assert_no_lease_is_left(here.owner)


async def test_close_while_the_first_bytes_come_ends_the_pull_as_a_miss(here: Here) -> None:
    await acquainted(here)
    go_on = here.owner.store.hold_reads(here.hashes[9:])
    pulling = asyncio.create_task(pull(here, 8, 20))
    await until(lambda: here.target.open_rooms == 1)
    await here.puller.close()
    assert await pulling == 0
    go_on.set()


def _sleep_a_little() -> None:
    time.sleep(0.2)
