"""Each policy's choice by itself, and all of them on traces in the simulator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._routing import (
    Cluster,
    Outcome,
    Simulation,
    best_hit_rate,
    offered_tokens_per_second,
)
from benchmarks._traces import Request, conversations, read_trace
from client_sdk.cli.trace import default_trace_path
from router.candidates import (
    Asked,
    Candidate,
    ConsistentHashPolicy,
    LMetricPolicy,
    MaxHitPolicy,
    Preferences,
    make_policy,
)
from router.scoring import Holding, Load, Speeds

SPEEDS = Speeds(1000.0, 10_000.0, 4_000.0, 2_000.0, 0.1, 0.05)
PREFERENCES = Preferences(0.8, 2, 0.001, 0.1)
NAMES = ("cost", "least_load", "round_robin", "max_hit", "consistent_hash", "lmetric")


def candidate(url: str, held: int = 0, active: int = 0, queued: int = 0) -> Candidate:
    return Candidate(url, Load(active, queued), Holding(dram_tokens=held), SPEEDS)


shapes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=6
)


@pytest.mark.parametrize("name", NAMES)
@given(shapes, st.one_of(st.none(), st.integers(0, 2**64 - 1)), st.integers(0, 9))
def test_every_policy_picks_one_of_those_it_is_given(
    name: str, found: list[tuple[int, int, int]], affinity: int | None, seed: int
) -> None:
    engines = [candidate(f"e{i}", *shape) for i, shape in enumerate(found)]
    picked = make_policy(name, PREFERENCES).pick(Asked(6000, affinity), engines, Random(seed))
    assert picked in engines


def test_max_hit_goes_to_the_longest_hit_however_long_its_queue_is() -> None:
    engines = [candidate("hit", 501, 50, 10**6), candidate("near", 500), candidate("idle")]
    assert MaxHitPolicy().pick(Asked(600), engines, Random(0)).url == "hit"
    equal = [candidate("a", 500, 2), candidate("b", 500, 1)]
    assert MaxHitPolicy().pick(Asked(600), equal, Random(0)).url == "b"


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    many_short = candidate("batch", 900, 9, 0)  # (100 + 0) * 10
    one_long = candidate("queue", 0, 0, 200)  # (1000 + 200) * 1
    assert LMetricPolicy().pick(Asked(1000), [many_short, one_long], Random(0)).url == "batch"
    longer = candidate("batch", 900, 12, 0)
    assert LMetricPolicy().pick(Asked(1000), [longer, one_long], Random(0)).url == "queue"


def test_equal_beginnings_go_together_and_only_a_lost_engines_share_moves() -> None:
    engines = [candidate(f"http://e{i}") for i in range(8)]
    policy, rng = ConsistentHashPolicy(), Random(0)
    before = {key: policy.pick(Asked(1, key), engines, rng).url for key in range(4000)}
    spread = Counter(before.values())
    assert min(spread.values()) > 0.7 * 500
    assert max(spread.values()) < 1.3 * 500
    lost = engines[3].url
    for key, url in before.items():
        after = policy.pick(Asked(1, key), [e for e in engines if e.url != lost], rng).url
        assert (after == url) == (url != lost)


def test_without_a_beginning_the_shortest_queue_is_taken() -> None:
    engines = [candidate("busy", 0, 1, 100), candidate("idle")]
    assert ConsistentHashPolicy().pick(Asked(1), engines, Random(0)).url == "idle"


def outcome(name: str, requests: list[Request], blocks: int, *, is_pooled: bool) -> Outcome:
    """Eight nodes, a little faster than what a cache for all would leave to compute."""
    needed = offered_tokens_per_second(requests) * (1 - best_hit_rate(requests))
    speeds = Speeds(1.15 * needed / 8, 200_000.0, 40_000.0, 30_000.0, 0.003, 0.02)
    cluster = Cluster(8, blocks, is_pooled, speeds)
    return Simulation(cluster, make_policy(name, PREFERENCES)).run(requests)


def test_on_mooncakes_trace_max_hit_collapses_and_cost_keeps_all_engines_busy() -> None:
    """All its conversations share their first block, so the longest hit is always the same node."""
    requests = list(read_trace(Path(default_trace_path())).requests)
    best = best_hit_rate(requests)
    found = {name: outcome(name, requests, 5859, is_pooled=True) for name in NAMES}
    assert found["max_hit"].imbalance > 7.9
    assert found["cost"].imbalance < 1.15
    assert found["cost"].hit_rate >= 0.97 * best
    assert found["cost"].p90_seconds < found["round_robin"].p90_seconds
    assert found["cost"].p90_seconds < found["consistent_hash"].p90_seconds
    assert found["max_hit"].p90_seconds > 10 * found["cost"].p90_seconds


def test_on_conversations_cost_keeps_hits_and_balance_and_a_pool_brings_the_rest() -> None:
    requests = list(conversations(500).requests)
    best = best_hit_rate(requests)
    alone = {name: outcome(name, requests, 3000, is_pooled=False) for name in NAMES}
    pooled = outcome("cost", requests, 3000, is_pooled=True)
    assert pooled.hit_rate >= 0.97 * best
    assert pooled.imbalance <= 1.05
    assert alone["cost"].hit_rate > alone["round_robin"].hit_rate + 0.1
    assert alone["cost"].hit_rate > alone["least_load"].hit_rate + 0.1
    assert alone["cost"].p90_seconds < min(
        alone[name].p90_seconds for name in ("round_robin", "least_load", "max_hit")
    )
    assert pooled.p90_seconds <= alone["cost"].p90_seconds


def test_equal_seeds_give_equal_outcomes() -> None:
    requests = list(conversations(60).requests)
    once = outcome("cost", requests, 500, is_pooled=False)
    assert once == outcome("cost", requests, 500, is_pooled=False)
