"""Each policy's choice by itself; what they lead to on traces: test_simulated_policies.py."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.candidates import (
    Asked,
    Candidate,
    ConsistentHashPolicy,
    CostPolicy,
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


def test_a_second_copy_is_made_only_where_it_saves_more_than_it_displaces() -> None:
    """1000 tokens: computed in a second, brought from the other node in 0.6."""
    there = Holding(peer_tokens=1000)

    def picked(queued: int, factor: float) -> str:
        engines = [candidate("holds", 1000, 1, queued), Candidate("idle", Load(), there, SPEEDS)]
        policy = CostPolicy(Preferences(0.8, 2, 0.001, 0.0, factor))
        return policy.pick(Asked(1001), engines, Random(0)).url

    assert picked(400, 0.0) == "holds"  # 0.05 + 0.4 + 0.1 before 0.6
    assert picked(500, 0.0) == "idle"
    assert picked(500, 0.5) == "holds"
    assert picked(900, 0.5) == "holds"  # 1.05 before 1.1
    assert picked(1000, 0.5) == "idle"


def test_one_more_copy_of_what_many_hold_counts_for_little() -> None:
    """Four hold 800 tokens, one of them 1000: a copy is 200 + 800 / 4 = 400 tokens, 0.4 s."""
    new = Candidate("new", Load(), Holding(peer_tokens=1000), SPEEDS)

    def picked(queued: int) -> str:
        holders = [candidate(f"h{n}", 800, 9, 9999) for n in range(3)]
        owner = candidate("owner", 1000, 1, queued)
        policy = CostPolicy(Preferences(0.8, 2, 0.001, 0.0, 1.0))
        return policy.pick(Asked(1001), [*holders, owner, new], Random(0)).url

    assert picked(840) == "owner"  # 0.15 + 0.84 before 0.6 + 0.4
    assert picked(860) == "new"


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
