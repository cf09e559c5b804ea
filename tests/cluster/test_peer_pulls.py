"""Pulls between two real nodes: gRPC and TCP between two event loops, real bytes in two pools."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import Incarnation, NodeId
from store_daemon.failed_fetches import FailedFetches
from store_daemon.peer_health import HealthLimits
from store_daemon.peers import PullLimits
from store_daemon.ports import Followed
from store_daemon.pull_plan import PullCosts
from tests.helpers.peer_doubles import (
    chain,
    small_namespace,
    took_at_most,
)
from tests.helpers.peer_node import PeerNode, peer_node
from tests.helpers.ports import refusing_port
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


async def test_pull_lands_the_whole_run_byte_for_byte(here: Here) -> None:
    assert await here.pull() == BLOCKS
    assert list(here.target.landed) == here.hashes
    counters = here.puller.counters
    block_bytes = sum(NAMESPACE.part_bytes(part) for part in range(NAMESPACE.parts))
    assert (counters.pulls, counters.pulled_blocks) == (1, BLOCKS)
    assert counters.pulled_bytes == BLOCKS * block_bytes
    assert not here.failures


async def test_run_ends_where_the_peer_has_no_more(here: Here) -> None:
    more = chain(NAMESPACE, BLOCKS + 5)
    here.index.holds("peer", here.owner.grpc_address, more)  # the index says too much
    landed = await here.puller.pull(NAMESPACE, None, more, here.target, 30.0)
    assert landed == BLOCKS


async def test_room_for_less_lands_less(here: Here) -> None:
    here.target.room_blocks = 7
    assert await here.pull() == 7
    here.target.is_full = True
    assert await here.pull(1) == 0
    assert here.failures == {"no_room": 1}


async def test_nobody_or_only_ourselves_or_a_node_that_is_not_ok_is_no_pull(here: Here) -> None:
    other = chain(NAMESPACE, 3, seed=1)
    assert await here.puller.pull(NAMESPACE, None, other, here.target, 1.0) == 0
    here.index.holds("here", here.owner.grpc_address, other)
    assert await here.puller.pull(NAMESPACE, None, other, here.target, 1.0) == 0
    here.index.states[NodeId("peer")] = "suspect"
    here.clock.skip(1)  # nodes are looked up anew
    assert await here.pull() == 0
    assert (here.puller.counters.unheld, here.puller.counters.pulls) == (3, 0)


async def test_index_away_is_a_miss(here: Here) -> None:
    here.index.is_away = True
    assert await here.pull() == 0
    assert here.failures == {"index": 1}


async def test_stale_index_row_is_a_miss(here: Here) -> None:
    other = chain(NAMESPACE, 3, seed=1)
    here.index.holds("peer", here.owner.grpc_address, other)
    assert await here.puller.pull(NAMESPACE, None, other, here.target, 30.0) == 0
    assert here.failures == {"stale_index": 1}


async def test_peer_that_knows_another_namespace_is_a_miss_without_blame(here: Here) -> None:
    stranger = small_namespace(part_bytes=9000)
    for _ in range(4):
        assert await here.puller.pull(stranger, None, here.hashes, here.target, 30.0) == 0
    assert here.failures == {"refused": 4}
    assert await here.pull() == BLOCKS


async def test_lying_peer_keeps_the_blocks_before_the_lie_and_loses_trust(here: Here) -> None:
    here.owner.store.lies = {here.hashes[9]}
    assert await here.pull() == 9
    assert here.failures == {"checksum": 1}
    here.owner.store.lies = set(here.hashes)
    for _ in range(2):
        assert await here.puller.pull(NAMESPACE, None, here.hashes[20:], here.target, 30.0) == 0
    queries = here.owner.store.granted
    assert await here.puller.pull(NAMESPACE, None, here.hashes[20:], here.target, 30.0) == 0
    assert here.owner.store.granted == queries, "an open breaker still asked the peer"
    here.owner.store.lies = set()
    here.clock.skip(OPEN_SECONDS + 1)
    assert await here.puller.pull(NAMESPACE, None, here.hashes[20:], here.target, 30.0) == 20


async def test_dead_peer_is_a_quick_miss_and_opens_the_breaker(here: Here) -> None:
    with refusing_port() as port:
        here.index.addresses[NodeId("peer")] = f"127.0.0.1:{port}"
        for _ in range(3):
            assert await here.pull() == 0
        assert here.failures == {"unavailable": 3}, "not by the deadline"
        unheld = here.puller.counters.unheld
        assert await here.pull() == 0
    assert here.puller.counters.unheld == unheld + 1


def remember_failures(here: Here) -> None:
    here.puller._failed = FailedFetches(block_seconds=OPEN_SECONDS, peer_seconds=OPEN_SECONDS)


async def test_block_that_a_peer_did_not_give_is_not_asked_for_again_at_once(here: Here) -> None:
    remember_failures(here)
    other = chain(NAMESPACE, 3, seed=1)
    here.index.holds("peer", here.owner.grpc_address, other)
    for _ in range(3):
        assert await here.puller.pull(NAMESPACE, None, other, here.target, 30.0) == 0
    assert here.failures == {"stale_index": 1}, "the peer was asked again"
    assert here.puller.counters.unheld == 2
    assert await here.pull() == BLOCKS, "other blocks may be asked for"
    here.clock.skip(OPEN_SECONDS + 1)
    assert await here.puller.pull(NAMESPACE, None, other, here.target, 30.0) == 0
    assert here.failures == {"stale_index": 2}


async def test_dead_peer_is_not_contacted_by_the_second_request_for_whatever_block(
    here: Here,
) -> None:
    remember_failures(here)
    with refusing_port() as port:
        here.index.addresses[NodeId("peer")] = f"127.0.0.1:{port}"
        assert await here.pull() == 0
        for first in range(1, 5):
            wanted = here.hashes[first:]
            assert await here.puller.pull(NAMESPACE, None, wanted, here.target, 30.0) == 0
    assert here.failures == {"unavailable": 1}
    assert here.puller.counters.pulls == 1
    here.index.addresses[NodeId("peer")] = here.owner.grpc_address
    here.clock.skip(OPEN_SECONDS + 1)
    assert await here.pull() == BLOCKS


async def test_another_holder_is_asked_when_the_best_one_failed(here: Here) -> None:
    remember_failures(here)
    wanted = [*here.hashes, *chain(NAMESPACE, 1, seed=5)]
    with refusing_port() as port:
        here.index.holds("gone", f"127.0.0.1:{port}", wanted)
        assert await here.puller.pull(NAMESPACE, None, wanted, here.target, 30.0) == BLOCKS
    assert here.failures == {"unavailable": 1}
    assert here.puller.counters.pulls == 2


async def test_silent_peer_ends_with_the_deadline(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, never answers
        here.index.addresses[NodeId("peer")] = f"127.0.0.1:{listener.getsockname()[1]}"
        with took_at_most(30):
            assert await here.pull(deadline=0.4) == 0
    assert here.failures == {"deadline": 1}


async def test_transport_that_is_down_is_a_miss(here: Here) -> None:
    here.owner.transport.shutdown()
    assert await here.pull() == 0
    assert set(here.failures) == {"unavailable"}


async def test_slow_peer_ends_with_the_deadline_and_keeps_the_prefix(here: Here) -> None:
    go_on = here.owner.store.hold_reads(here.hashes[12:])
    with took_at_most(20):
        landed = await here.pull(deadline=2.0)
    assert 0 < landed < BLOCKS
    assert here.failures == {"deadline": 1}
    go_on.set()
    assert await here.puller.pull(NAMESPACE, None, here.hashes[landed:], here.target, 30.0) > 0


async def test_pull_that_cannot_be_in_time_is_not_begun(here: Here) -> None:
    slow = HealthLimits(assumed_bytes_per_second=1.0)
    here.puller._health_limits = slow
    assert await here.pull(deadline=5.0) == 0
    assert here.failures == {"too_slow": 1}
    assert here.owner.store.granted == 0


async def test_lease_that_the_owner_ended_is_a_miss_without_blame(here: Here) -> None:
    here.owner.store.may_read_hook = lambda: here.owner.store.leases.update(
        dict.fromkeys(here.owner.store.leases, ())
    )
    assert await here.pull() == 0
    assert here.failures == {"lease": 1}


async def test_cancellation_in_mid_pull_joins_the_threads_before_the_room_closes(
    here: Here,
) -> None:
    go_on = here.owner.store.hold_reads(here.hashes[12:])
    pulling = asyncio.create_task(here.pull())
    await here.has_landed_some()
    pulling.cancel()
    with took_at_most(30), pytest.raises(asyncio.CancelledError):
        await pulling
    assert here.target.open_rooms == 0
    go_on.set()
    here.target.check()
    assert await here.puller.pull(NAMESPACE, None, here.hashes[30:], here.target, 30.0) == 10


async def test_close_in_mid_pull_ends_it_as_a_miss(here: Here) -> None:
    go_on = here.owner.store.hold_reads(here.hashes[12:])
    pulling = asyncio.create_task(here.pull())
    await here.has_landed_some()
    with took_at_most(20):
        await here.puller.close()
        assert 0 < await pulling < BLOCKS
    go_on.set()
    assert await here.pull() == 0


async def test_pulls_of_one_block_are_shared(here: Here) -> None:
    landed = await asyncio.gather(*(here.pull() for _ in range(5)))
    assert landed == [BLOCKS] * 5
    assert here.puller.counters.pulled_blocks == BLOCKS
    assert here.owner.store.granted == 1


async def test_shared_pull_goes_on_alone_where_the_chains_part(here: Here) -> None:
    branch = here.hashes[:10] + chain(NAMESPACE, 5, seed=2)
    here.owner.store.put(branch[10:])
    here.index.holds("peer", here.owner.grpc_address, branch)
    both = await asyncio.gather(
        here.pull(20), here.puller.pull(NAMESPACE, None, branch, here.target, 30.0)
    )
    assert both == [20, 15]
    assert here.target.parents == [None, here.hashes[9]]


async def test_waiter_tries_by_itself_when_the_first_puller_was_cancelled(here: Here) -> None:
    go_on = here.owner.store.hold_reads(here.hashes)
    first = asyncio.create_task(here.pull())
    await until(lambda: here.owner.store.granted == 1)
    second = asyncio.create_task(here.pull())
    await asyncio.sleep(0.05)
    first.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == BLOCKS


async def test_restarted_owner_is_pulled_from_under_its_new_incarnation(here: Here) -> None:
    assert await here.pull(5) == 5
    with peer_node(NAMESPACE, incarnation=4) as reborn:
        reborn.store.put(here.hashes)
        here.index.addresses[NodeId("peer")] = reborn.grpc_address
        here.clock.skip(1)
        assert await here.puller.pull(NAMESPACE, None, here.hashes[5:], here.target, 30.0) == 35
        await assert_no_lease_is_left(reborn)


async def test_what_one_owner_lacks_comes_from_another(here: Here) -> None:
    with peer_node(NAMESPACE) as second:
        second.store.put(here.hashes)
        here.owner.store.forget(here.hashes[15:])  # and the index does not know it yet
        here.index.holds("second", second.grpc_address, here.hashes[:30])
        assert await here.pull() == 30
        assert list(here.target.landed) == here.hashes[:30]
        assert here.puller.counters.from_peer.keys() == {NodeId("peer"), NodeId("second")}
        await assert_no_lease_is_left(second)


async def test_owner_that_has_it_in_dram_goes_before_one_that_has_more_of_it_on_ssd(
    here: Here,
) -> None:
    limits = PullLimits(costs=PullCosts(ssd_bytes_per_second=1e6, setup_seconds=0.0))
    here.puller._limits = limits
    here.index.ssd_only = {NodeId("peer")}
    with peer_node(NAMESPACE) as second:
        second.store.put(here.hashes[:30])
        here.index.holds("second", second.grpc_address, here.hashes[:30])
        assert await here.pull() == BLOCKS
        block_bytes = sum(NAMESPACE.part_bytes(part) for part in range(NAMESPACE.parts))
        assert here.puller.counters.from_peer == {
            NodeId("second"): 30 * block_bytes,
            NodeId("peer"): 10 * block_bytes,
        }
        await assert_no_lease_is_left(second)


def small_windows(here: Here, blocks: int) -> None:
    here.puller._limits = PullLimits(
        nodes_seconds=0.01,
        lease_bytes=1,
        least_lease_blocks=blocks,
        failed_block_seconds=0.0,
        failed_peer_seconds=0.0,
        longest_wait_seconds=0.1,
    )


async def test_long_run_is_leased_in_windows_the_next_one_while_the_last_is_read(
    here: Here,
) -> None:
    small_windows(here, 6)
    store = here.owner.store

    def wait_for_the_next_lease() -> None:
        deadline = time.monotonic() + 30
        while len(store.leases) < 2 and store.granted < 7:
            assert time.monotonic() < deadline, "nothing is leased ahead"
            time.sleep(0.001)

    store.may_read_hook = wait_for_the_next_lease
    assert await here.pull() == BLOCKS
    assert list(here.target.landed) == here.hashes
    assert here.target.parents == [None, *here.hashes[5:BLOCKS:6]][: len(here.target.parents)]
    assert store.granted == 7
    assert here.puller.counters.pulls == 1


async def test_window_that_was_leased_ahead_is_given_back_when_the_pull_fails(here: Here) -> None:
    small_windows(here, 6)
    here.owner.store.lies = {here.hashes[3]}
    assert await here.pull() == 3
    assert here.failures == {"checksum": 1}
    await assert_no_lease_is_left(here.owner)


async def test_who_wants_the_end_of_a_run_in_flight_waits_for_it(here: Here) -> None:
    go_on = here.owner.store.hold_reads(here.hashes[12:])
    first = asyncio.create_task(here.pull())
    await here.has_landed_some()
    tail = here.hashes[20:]
    second = asyncio.create_task(
        here.puller.pull(NAMESPACE, here.hashes[19], tail, here.target, 30.0)
    )
    await asyncio.sleep(0.05)
    assert not second.done()
    go_on.set()
    assert await second == len(tail)
    assert await first == BLOCKS
    assert here.puller.counters.pulled_blocks == BLOCKS, "a block came twice"
    assert here.puller.counters.shared_blocks == len(tail)
    assert here.owner.store.granted == 1


async def follow(here: Here, patience: float = 20.0, deadline: float = 30.0) -> int:
    followed = Followed(NodeId("peer"), patience)
    return await here.puller.follow(followed, NAMESPACE, None, here.hashes, here.target, deadline)


async def test_followed_node_s_blocks_come_while_it_makes_them(here: Here) -> None:
    here.owner.store.forget(here.hashes)
    following = asyncio.create_task(follow(here))
    for first in range(0, BLOCKS, 10):
        here.owner.store.put(here.hashes[first : first + 10])
        deadline = time.monotonic() + 30
        while len(here.target.landed) < first + 10:
            assert time.monotonic() < deadline, "what was made did not come"
            await asyncio.sleep(0.005)
    assert await following == BLOCKS
    assert here.puller.counters.followed_blocks == BLOCKS
    assert here.index.queries == 0
    assert not here.failures


async def test_followed_node_that_makes_no_more_is_left_after_its_patience(here: Here) -> None:
    small_windows(here, 8)
    here.owner.store.forget(here.hashes[12:])
    with took_at_most(30):
        assert await follow(here, patience=2.0) == 12
    assert here.failures == {"unfollowable": 1}


async def test_followed_node_that_is_not_known_or_dead_is_a_miss(here: Here) -> None:
    followed = Followed(NodeId("nobody"), 5.0)
    with took_at_most(30):
        landed = await here.puller.follow(followed, NAMESPACE, None, here.hashes, here.target, 30.0)
        assert landed == 0
        with refusing_port() as port:
            here.index.addresses[NodeId("peer")] = f"127.0.0.1:{port}"
            here.clock.skip(1)
            assert await follow(here) == 0
    # A dead one is tried until its breaker opens: it may just be starting again.
    assert here.failures == {"unfollowable": 2, "unavailable": 3}


async def test_node_in_another_life_is_asked_whatever_its_breaker_says(here: Here) -> None:
    alive = here.index.addresses[NodeId("peer")]
    with refusing_port() as port:
        here.index.addresses[NodeId("peer")] = f"127.0.0.1:{port}"
        assert await follow(here) == 0
    here.index.addresses[NodeId("peer")] = alive
    here.clock.skip(1)
    assert await follow(here) == 0, "its breaker is open"
    here.index.incarnations[NodeId("peer")] = Incarnation(2)
    here.clock.skip(1)
    assert await follow(here) == BLOCKS
    here.puller.check_integrity()


async def test_nothing_is_kept_of_a_node_that_no_index_knows_any_more(here: Here) -> None:
    assert await here.pull(4) == 4
    assert (len(here.puller._connections), len(here.puller._health)) == (1, 1)
    address = here.index.addresses.pop(NodeId("peer"))
    await asyncio.sleep(0.02)
    assert await here.pull() == 0
    assert (len(here.puller._connections), len(here.puller._health)) == (0, 0)
    here.index.addresses[NodeId("peer")] = address
    await asyncio.sleep(0.02)
    more = here.hashes[4:]
    assert await here.puller.pull(NAMESPACE, here.hashes[3], more, here.target, 30.0) == len(more)


async def test_followed_node_that_has_just_come_back_is_tried_again(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = here.puller._leases._client.acquire, [UnavailableError("refused")] * 2

    async def acquire(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return await plain(*arguments)

    monkeypatch.setattr(here.puller._leases._client, "acquire", acquire)
    assert await follow(here) == BLOCKS
    assert here.failures == {"unavailable": 2}
    here.puller.check_integrity()


async def test_pull_waits_for_blocks_that_are_followed(here: Here) -> None:
    here.owner.store.forget(here.hashes[10:])
    following = asyncio.create_task(follow(here))
    await asyncio.sleep(0.05)
    wanted = here.hashes[10:]
    pulling = asyncio.create_task(
        here.puller.pull(NAMESPACE, here.hashes[9], wanted, here.target, 30.0)
    )
    await asyncio.sleep(0.05)
    assert not pulling.done()
    here.owner.store.put(wanted)
    assert await pulling == len(wanted)
    assert await following == BLOCKS
    assert here.puller.counters.pulled_blocks == BLOCKS


async def test_two_that_follow_the_same_prompt_both_see_all_of_it_come(here: Here) -> None:
    here.owner.store.forget(here.hashes)
    first = asyncio.create_task(follow(here))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(follow(here))
    await asyncio.sleep(0.05)
    assert not second.done()
    here.owner.store.put(here.hashes)
    assert (await first, await second) == (BLOCKS, BLOCKS)
    assert here.puller.counters.pulled_blocks == BLOCKS, "a block came twice"
    assert not here.failures


async def test_follower_goes_on_alone_when_the_one_before_it_is_called_off(here: Here) -> None:
    here.owner.store.forget(here.hashes)
    first = asyncio.create_task(follow(here))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(follow(here))
    await asyncio.sleep(0.05)
    here.owner.store.put(here.hashes[:10])
    await until(lambda: len(here.target.landed) >= 10)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    here.owner.store.put(here.hashes[10:])
    assert await second == BLOCKS
    assert here.puller.counters.pulled_blocks == BLOCKS


async def test_prompt_of_more_blocks_than_one_pull_takes_is_followed_to_its_end(
    here: Here,
) -> None:
    here.puller._limits = replace(here.puller._limits, blocks_per_pull=16)
    assert await follow(here) == BLOCKS
    assert here.puller.counters.followed_blocks == BLOCKS


async def test_close_ends_what_is_followed(here: Here) -> None:
    here.owner.store.forget(here.hashes)
    following = asyncio.create_task(follow(here, patience=9.0))
    await asyncio.sleep(0.1)
    with took_at_most(30):
        await here.puller.close()
        assert await following == 0
