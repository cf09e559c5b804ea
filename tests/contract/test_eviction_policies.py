"""What holds whatever the policy: leaves go first, what is held stays, the same calls give the same
victims, and a policy that breaks is replaced."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.policies import POLICIES, EvictionPolicy
from store_daemon.policies.lru import LruPolicy
from tests.helpers.evictions import EvictionDouble
from tests.helpers.store import chain, small_namespace

STEPS = 3000


@pytest.fixture(params=sorted(POLICIES))
def make(request: pytest.FixtureRequest) -> Callable[[], EvictionDouble]:
    return lambda: EvictionDouble(POLICIES[request.param]())


def campaign(double: EvictionDouble, seed: int) -> list[BlockHash]:
    """Random chains in 40 slots, some held for a while; the order of the victims."""
    rng = random.Random(seed)
    victims: list[BlockHash] = []
    held: list[Block] = []
    for step in range(STEPS):
        double.now += rng.choice([0.1, 2.0])
        session = rng.randrange(12)
        blocks = double.request(double.hashes(session, rng.randint(1, 8), shared=2), capacity=40)
        victims += double.take_victims()
        if rng.random() < 0.2 and blocks:
            double.catalog.pin(blocks[-1])
            held.append(blocks[-1])
        if len(held) > 3:
            double.catalog.unpin([held.pop(rng.randrange(len(held)))])
        for block in held:
            assert block.in_dram, "a block was evicted while it was held"
        if step % 100 == 0:
            double.check()
    double.catalog.unpin(held)
    double.evict(1000)
    double.check()
    return victims + double.take_victims()


def test_leaves_go_first_and_what_is_held_stays(make: Callable[[], EvictionDouble]) -> None:
    double = make()
    victims = campaign(double, seed=1)
    assert len(victims) > STEPS // 2, "the campaign was never under pressure"
    assert not double.catalog.blocks, "something that may go was not found"
    assert double.failures == 0


def test_the_same_calls_give_the_same_victims(make: Callable[[], EvictionDouble]) -> None:
    assert campaign(make(), seed=2) == campaign(make(), seed=2)


def test_choosing_twice_names_the_same_block(make: Callable[[], EvictionDouble]) -> None:
    double = make()
    for session in range(5):
        double.request(double.hashes(session, 3), capacity=100)
        double.now += 5
    for _ in range(15):
        first = double.queue.oldest_of_all(double.catalog.is_evictable)
        assert first is not None
        again = double.queue.oldest(first.namespace.id, double.catalog.is_evictable)
        assert again is first
        assert double.queue.oldest_of_all(double.catalog.is_evictable) is first
        double.drop(first)
    assert double.queue.oldest_of_all(double.catalog.is_evictable) is None
    assert not len(double.queue)


def test_a_use_within_a_second_of_the_last_does_not_count(
    make: Callable[[], EvictionDouble],
) -> None:
    double = make()
    (block,) = double.request(double.hashes(0, 1), capacity=10)
    for _ in range(8):
        double.queue.touch([block])
        double.now += 0.1
    assert block.uses == 0
    double.now += 1.0
    double.queue.touch([block])
    assert block.uses == 1
    double.check()


def test_entries_that_count_no_more_do_not_pile_up(make: Callable[[], EvictionDouble]) -> None:
    double = make()
    (block,) = double.request(double.hashes(0, 1), capacity=10)
    for _ in range(5000):
        double.drop(block)
        (block,) = double.request(double.hashes(0, 1), capacity=10)
    assert double.queue.entries < 1100
    double.check()


def test_a_touch_of_a_block_on_ssd_only_moves_nothing(make: Callable[[], EvictionDouble]) -> None:
    double = make()
    (block,) = double.request(double.hashes(0, 1), capacity=10)
    double.keep_on_ssd(block)
    double.evict(1)
    double.now += 10
    double.queue.touch([block])
    double.check()
    double.land(block)
    double.check()
    assert double.queue.oldest_of_all(double.catalog.is_evictable) is block


def test_a_forged_chain_that_bites_its_own_tail_can_go(
    make: Callable[[], EvictionDouble],
) -> None:
    double = make()
    first, second, third = double.hashes(0, 3)
    for block_hash, parent in ((second, first), (third, second), (first, third)):
        double.store(block_hash, parent)
        double.check()
    assert double.evict(10) == 3
    assert not double.catalog.blocks
    assert double.failures == 0
    double.check()


class _Broken(EvictionPolicy):
    """Works like LRU in two lanes until a call of one kind comes for the `at`-th time."""

    lanes = 2

    def __init__(self, call: str, at: int = 10) -> None:
        self._call = call
        self._left = at

    def _note(self, call: str) -> None:
        if call == self._call:
            self._left -= 1
            if self._left <= 0:
                raise ZeroDivisionError("broken on purpose")

    def entered(self, block: Block) -> None:
        block.lane = block.hash[0] % 2
        if self._call == "stray":
            block.lane = 7
        self._note("entered")

    def touched(self, blocks: Sequence[Block]) -> None:
        self._note("touched")

    def left(self, block: Block) -> None:
        self._note("left")

    def order(self, block: Block) -> float:
        self._note("order")
        return block.access

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        self._note("choose")
        if self._call == "undecided":
            return None
        found = next(head for head in heads if head is not None)
        if self._call == "foreign":
            return Block(found.hash, found.namespace, None, [], [])
        return found


@pytest.mark.parametrize("call", ["entered", "touched", "left", "order", "choose"])
@pytest.mark.parametrize("at", range(1, 60, 7))
def test_no_candidate_is_lost_at_whatever_call_a_policy_breaks(call: str, at: int) -> None:
    double = EvictionDouble(_Broken(call, at))
    for session in range(70):
        double.now += 5
        double.request(double.hashes(session % 7, 4 + session % 3, shared=2), capacity=12)
        if double.failures:
            double.check()
    double.evict(1000)
    assert not double.catalog.blocks
    assert double.failures == 1
    double.check()


@pytest.mark.parametrize(
    "call", ["entered", "touched", "left", "order", "choose", "undecided", "foreign", "stray"]
)
def test_a_policy_that_breaks_is_replaced_by_lru_and_counted_once(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = EvictionDouble(_Broken(call)), EvictionDouble(LruPolicy())
    with caplog.at_level(logging.ERROR):
        for double in (broken, healthy):
            for session in range(20):
                double.now += 5
                double.request(double.hashes(session, 4), capacity=30)
            double.evict(1000)
            # All is gone and forgotten: from here on only the order of LRU can show.
            double.take_victims()
            for session in (1, 2, 3, 1, 4):
                double.now += 5
                double.request(double.hashes(session, 2), capacity=30)
            double.evict(1000)
            double.check()
    assert broken.failures == 1
    assert healthy.failures == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert broken.take_victims() == healthy.take_victims()


def test_a_policy_breaks_while_another_namespace_has_no_candidate_any_more() -> None:
    double = EvictionDouble(_Broken("choose", 2))
    double.request(double.hashes(0, 1), capacity=9)
    assert double.evict(9) == 1
    double.own = StoredNamespace.of(small_namespace(part_bytes=9000))
    double.request(chain(double.own.namespace, 3), capacity=9)
    assert double.evict(9) == 3
    assert double.failures == 1
    double.check()


@pytest.mark.parametrize("after", sorted(POLICIES))
def test_another_policy_takes_over_what_is_there(
    make: Callable[[], EvictionDouble], after: str
) -> None:
    double = make()
    rng = random.Random(3)
    for _ in range(200):
        double.now += 1.5
        double.request(double.hashes(rng.randrange(12), rng.randint(1, 8), 2), capacity=40)
    held = double.request(double.hashes(3, 4, 2), capacity=40)
    double.catalog.pin(held[-1])
    double.queue.use(POLICIES[after](), double.catalog.blocks.values())
    double.check()
    for _ in range(200):
        double.now += 1.5
        double.request(double.hashes(rng.randrange(12), rng.randint(1, 8), 2), capacity=40)
        assert held[-1].in_dram
    double.check()
    double.catalog.unpin([held[-1]])
    double.evict(1000)
    double.check()
    assert not double.catalog.blocks, "something that may go was not found"
    assert double.failures == 0


class BrokenAtStart(LruPolicy):
    def __init__(self, after: int) -> None:
        self._left = after

    def entered(self, block: Block) -> None:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("this policy is broken")


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_policy_that_breaks_while_it_takes_over_is_replaced(
    make: Callable[[], EvictionDouble], after: int
) -> None:
    double = make()
    for session in range(5):
        double.request(double.hashes(session, 4), capacity=100)
    double.queue.use(BrokenAtStart(after), double.catalog.blocks.values())
    assert double.failures == 1
    double.check()
    double.evict(1000)
    assert not double.catalog.blocks
