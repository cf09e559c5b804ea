"""The simulator that judges the policies is itself right."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks._kvcache_simulator import fifo_hit_rate
from benchmarks._traces import Request, Trace, conversations, read_trace
from benchmarks.eviction import best_hit_rate, policy_hit_rate
from store_daemon.policies import POLICIES
from store_daemon.policies.lru import LruPolicy

EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_conversation_150.jsonl"


def singles(blocks: list[int]) -> Trace:
    """Each request one block; the first half is not measured, so it repeats nothing."""
    unrelated = [Request(10.0 * n, (1000 + n,)) for n in range(len(blocks))]
    return Trace("t", [*unrelated, *(Request(1e4 + 10 * n, (b,)) for n, b in enumerate(blocks))])


def test_lru_and_hindsight_on_a_sequence_by_hand() -> None:
    trace = singles([1, 2, 3, 1, 2, 3])
    assert policy_hit_rate(trace, LruPolicy(), 2) == 0
    assert best_hit_rate(trace, 2) == pytest.approx(100 * 2 / 6), "it keeps two of the three"
    assert policy_hit_rate(trace, LruPolicy(), 3) == pytest.approx(50)
    assert best_hit_rate(trace, 3) == pytest.approx(50)


def test_fifo_lets_the_oldest_go_whoever_follows_it() -> None:
    assert fifo_hit_rate(singles([1, 2, 1, 3, 1, 2]), 2) == pytest.approx(100 / 6), "only 1, 2, 1"
    assert fifo_hit_rate(singles([1, 2, 1, 3, 1, 2]), 3) == pytest.approx(50)


def test_hindsight_equals_the_best_of_all_choices() -> None:
    blocks = [1, 2, 3, 1, 4, 2, 1, 3, 2]

    def best(held: frozenset[int], at: int) -> int:
        if at == len(blocks):
            return 0
        hit = blocks[at] in held
        every = held | {blocks[at]}
        kept = itertools.combinations(every, min(2, len(every)))
        return hit + max(best(frozenset(choice), at + 1) for choice in kept)

    wanted = 100 * best(frozenset(), 0) / len(blocks)
    assert best_hit_rate(singles(blocks), 2) == pytest.approx(wanted)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("trace", [read_trace(EXCERPT), conversations(150)], ids=lambda t: t.name)
def test_no_policy_beats_hindsight_and_all_reach_it_with_room_for_everything(
    name: str, trace: Trace
) -> None:
    for capacity in (300, 100_000):
        best = best_hit_rate(trace, capacity)
        rate = policy_hit_rate(trace, POLICIES[name](), capacity)
        assert rate <= best
    assert rate == best


def test_the_generated_trace_is_the_same_each_time() -> None:
    assert conversations(50) == conversations(50)
