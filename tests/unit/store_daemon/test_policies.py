"""Each policy's own promises, on sequences small enough to follow by hand."""

from __future__ import annotations

import pytest

from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash
from store_daemon.block import Block
from store_daemon.config import DramSection
from store_daemon.policies import POLICIES
from store_daemon.policies.arc import FREQUENT, RECENT, ArcPolicy
from store_daemon.policies.cost import CostPolicy
from store_daemon.policies.ghosts import Ghosts
from store_daemon.policies.lru import LruPolicy
from store_daemon.policies.reuse import ReusePolicy
from store_daemon.policies.s3fifo import MAIN, SMALL, S3FifoPolicy
from tests.helpers.evictions import EvictionDouble
from tests.helpers.store import small_namespace


def ask(double: EvictionDouble, sessions: list[int], capacity: int = 100) -> None:
    """One request of one block for each session, five seconds apart."""
    for session in sessions:
        double.now += 5
        double.request(double.hashes(session, 1), capacity)


def victims(double: EvictionDouble) -> list[int]:
    """Evict everything; the sessions in the order in which they went."""
    double.take_victims()
    double.evict(1000)
    double.check()
    names = {double.hashes(session, 1)[0]: session for session in range(40)}
    return [names[block_hash] for block_hash in double.take_victims()]


def block_of(double: EvictionDouble, session: int) -> Block:
    return double.catalog.blocks[double.hashes(session, 1)[0]]


def test_every_policy_of_the_settings_exists() -> None:
    allowed = DramSection.model_json_schema()["properties"]["policy"]["enum"]
    assert sorted(allowed) == sorted(POLICIES)


def test_lru_lets_go_in_the_order_of_the_last_access() -> None:
    double = EvictionDouble(LruPolicy())
    ask(double, [1, 2, 3, 1])
    assert victims(double) == [2, 3, 1]


def test_s3fifo_lets_blocks_used_once_pass_through_the_small_queue() -> None:
    double = EvictionDouble(S3FifoPolicy())
    ask(double, [1, 1, 1, 2, 3, 4])
    assert victims(double) == [2, 3, 4, 1], "1 was used twice again, so it moved to the main queue"


def test_s3fifo_puts_a_block_that_comes_back_into_the_main_queue() -> None:
    double = EvictionDouble(S3FifoPolicy())
    ask(double, [1, 2, 3], capacity=2)
    assert double.take_victims() == [double.hashes(1, 1)[0]]
    ask(double, [1], capacity=3)
    assert block_of(double, 1).lane == MAIN
    assert block_of(double, 3).lane == SMALL
    assert victims(double) == [2, 3, 1]


def test_s3fifo_gives_a_used_block_of_the_main_queue_another_round() -> None:
    double = EvictionDouble(S3FifoPolicy())
    ask(double, [1, 2, 3, 4])
    double.evict(4)
    ask(double, [1, 2, 3, 4])
    assert all(block_of(double, session).lane == MAIN for session in (2, 3, 4))
    ask(double, [2])
    assert victims(double) == [1, 3, 4, 2]


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    double = EvictionDouble(ArcPolicy())
    ask(double, [1, 1, 2, 2])
    ask(double, list(range(10, 30)), capacity=6)
    assert {1, 2} <= {s for s in range(40) if double.hashes(s, 1)[0] in double.catalog.blocks}
    assert block_of(double, 1).lane == FREQUENT
    assert block_of(double, 29).lane == RECENT
    double.check()


def test_arc_lets_recency_grow_when_its_ghosts_come_back_and_shrink_for_frequency() -> None:
    double = EvictionDouble(ArcPolicy())
    ask(double, [1, 1, 2, 2, 3, 4], capacity=4)
    ask(double, [5], capacity=4)
    assert double.take_victims() == [double.hashes(3, 1)[0]], "recency has no share yet"
    ask(double, [3], capacity=4)
    assert double.take_victims() == [double.hashes(4, 1)[0]]
    ask(double, [6], capacity=4)
    assert double.take_victims() == [double.hashes(1, 1)[0]], "recency has earned one block"
    ask(double, [1], capacity=4)
    assert double.take_victims() == [double.hashes(5, 1)[0]]
    ask(double, [7], capacity=4)
    assert double.take_victims() == [double.hashes(6, 1)[0]], "and has lost it again"
    double.check()


def test_cost_keeps_small_blocks_and_blocks_deep_in_their_chain() -> None:
    def worth(namespace: Namespace, depth: int) -> float:
        double = EvictionDouble(CostPolicy(), namespace)
        return double.request(double.hashes(0, depth + 1), capacity=100)[depth].rank

    assert worth(small_namespace(9000), 0) < worth(small_namespace(5000), 0)
    assert worth(small_namespace(5000), 0) < worth(small_namespace(5000), 30)


def test_cost_lets_what_is_not_used_any_more_sink() -> None:
    double = EvictionDouble(CostPolicy())
    ask(double, [1, 1, 1])
    ask(double, list(range(10, 20)), capacity=4)
    assert double.hashes(1, 1)[0] not in double.catalog.blocks
    ask(double, [2, 2, 3, 4])
    assert victims(double)[-1] == 2


def test_ghosts_forget_the_oldest_first() -> None:
    ghosts = Ghosts()
    first, second, third = (BlockHash(bytes([number]) * 32) for number in range(3))
    for block_hash in (first, second, third, first):
        ghosts.add(block_hash)
    ghosts.trim(2)
    assert [ghosts.take(h) for h in (second, third, first)] == [False, True, True]
    assert len(ghosts) == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ghosts_stay_bounded_under_a_stream_of_new_blocks(name: str) -> None:
    double = EvictionDouble(POLICIES[name]())
    for session in range(400):
        double.now += 5
        double.request(double.hashes(session, 2), capacity=10)
        double.check()


def test_reuse_learns_that_conversations_come_back_and_single_requests_do_not() -> None:
    learned, lru = EvictionDouble(ReusePolicy()), EvictionDouble(LruPolicy())
    hits = {}
    for double in (learned, lru):
        single = 1000
        count = 0
        for turn in range(100):
            for conversation in range(6):
                double.now += 5
                chain = double.hashes(conversation, 1 + turn % 30)
                count += sum(block_hash in double.catalog.blocks for block_hash in chain)
                double.request(chain, capacity=200)
            for _ in range(12):
                double.now += 5
                single += 1
                double.request(double.hashes(single, 12), capacity=200)
        double.check()
        hits[double] = count
    assert hits[learned] > 1.3 * hits[lru]


class _Counting(LruPolicy):
    def __init__(self) -> None:
        self.calls = 0

    def order(self, block: Block) -> float:
        self.calls += 1
        return super().order(block)


def test_a_victim_costs_the_same_with_many_blocks_as_with_few() -> None:
    cost = {}
    for sessions in (20, 2000):
        policy = _Counting()
        double = EvictionDouble(policy)
        for session in range(sessions):
            double.request(double.hashes(session, 1), capacity=10_000)
        double.queue.touch(list(double.catalog.blocks.values())[:5])
        policy.calls = 0
        double.evict(15)
        cost[sessions] = policy.calls
    assert cost[2000] == cost[20]
