"""t(i): terms, stopping points, ties."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.types import EngineHit, NodeHit, NodeId
from router.candidates import (
    Asked,
    Candidate,
    CostPolicy,
    LeastLoadPolicy,
    Preferences,
    RoundRobinPolicy,
    short_list,
)
from router.scoring import (
    NOTHING,
    Holding,
    Load,
    OwnHit,
    Speeds,
    estimate,
    holding_from,
    own_hit,
    queue_seconds,
)

SPEEDS = Speeds(1000.0, 10_000.0, 4_000.0, 2_000.0, 0.1, 0.05)
PREFERENCES = Preferences(0.8, 2, 0.001, 0.1)
COST = CostPolicy(PREFERENCES)
tokens = st.integers(0, 5000)
holdings = st.builds(Holding, tokens, tokens, tokens, tokens)
loads = st.builds(Load, st.integers(0, 50), st.integers(0, 50_000))


def test_without_a_hit_the_whole_prompt_is_computed() -> None:
    terms = estimate(2000, NOTHING, Load(), SPEEDS)
    assert (terms.queue_seconds, terms.fetch_seconds, terms.prefill_seconds) == (0.0, 0.0, 2.0)


def test_each_tier_costs_what_its_speed_says() -> None:
    terms = estimate(2000, Holding(0, 1000, 400, 0), Load(2, 500), SPEEDS)
    assert terms.fetch_seconds == pytest.approx(0.1 + 0.1)
    assert terms.prefill_seconds == pytest.approx(0.6)
    assert terms.queue_seconds == pytest.approx(0.5 + 0.1)
    assert terms.total_seconds == pytest.approx(1.4)


def test_what_was_done_of_the_first_request_is_taken_off_but_never_more() -> None:
    queued = Load(2, 1500, 0, 1000, 0, 0.4)
    assert queue_seconds(queued, SPEEDS) == pytest.approx(0.1 + 1.5 - 0.4)
    stopped = Load(2, 1500, 0, 1000, 0, 1e9)
    assert queue_seconds(stopped, SPEEDS) == pytest.approx(0.1 + 0.5)


def test_long_contexts_cost_more_where_the_quadratic_term_is_known() -> None:
    quadratic = Speeds(1000.0, 1e4, 1e4, 1e4, 0.1, 0.0, 1e-6)
    terms = estimate(2000, Holding(1000), Load(1, 100, 10**6), quadratic)
    assert terms.prefill_seconds == pytest.approx(1.0 + 1000 * 1500 * 1e-6)
    assert terms.queue_seconds == pytest.approx(0.1 + 1.0)


def test_a_short_peer_stretch_is_recomputed_and_a_long_one_fetched() -> None:
    short = estimate(1100, Holding(0, 1000, 0, 100), Load(), SPEEDS)
    long = estimate(3000, Holding(0, 1000, 0, 2000), Load(), SPEEDS)
    assert short.used.peer_tokens == 0
    assert long.used.peer_tokens == 2000


def test_a_tier_slower_than_computing_is_left_alone() -> None:
    slow = Speeds(1000.0, 10_000.0, 500.0, 2_000.0, 0.1, 0.05)
    terms = estimate(1000, Holding(0, 0, 800, 0), Load(), slow)
    assert terms.used == Holding()
    assert terms.prefill_seconds == 1.0


def test_a_full_hit_still_computes_one_token() -> None:
    assert estimate(64, Holding(64), Load(), SPEEDS).uncached_tokens == 1


@given(st.integers(1, 20_000), holdings, loads)
def test_the_estimate_is_the_least_over_all_stopping_points(
    prompt: int, holding: Holding, load: Load
) -> None:
    here = Holding(holding.hbm_tokens, holding.dram_tokens, holding.ssd_tokens)
    local = holding.dram_tokens / 10_000 + holding.ssd_tokens / 4_000
    options = [(0.0, Holding(holding.hbm_tokens)), (local, here)]
    if holding.peer_tokens:
        options.append((local + 0.1 + holding.peer_tokens / 2_000, holding))
    best = min(
        fetch + max(1, prompt - used.node_tokens - used.peer_tokens) / 1000
        for fetch, used in options
    )
    terms = estimate(prompt, holding, load, SPEEDS)
    assert terms.total_seconds == pytest.approx(best + queue_seconds(load, SPEEDS))


def test_what_lies_over_another_is_counted_once() -> None:
    own = OwnHit(10, 0, 8)
    assert holding_from(own, 14, 5, 4) == Holding(20, 12, 8, 16)
    assert holding_from(own, 3, 0, 4) == Holding(0, 32, 8, 0)
    assert holding_from(OwnHit(), 3, 1, 4) == Holding(4, 0, 0, 8)


def test_a_prediction_fills_only_what_events_have_not_told() -> None:
    told = OwnHit(10, 4, 5)
    assert holding_from(told, 0, 0, 1) == Holding(4, 5, 1, 0)
    assert holding_from(told, 0, 3, 1) == Holding(4, 5, 1, 0)
    assert holding_from(told, 0, 6, 1) == Holding(6, 3, 1, 0)
    assert holding_from(told, 14, 12, 1) == Holding(12, 0, 0, 2)


def test_an_engines_own_hit_has_its_nodes_in_it_unless_that_is_followed_elsewhere() -> None:
    node = NodeHit(NodeId("a"), 6, 4, 2)
    whole = EngineHit("e", 0, "u", NodeId("a"), 8, 3, 3, 2)
    alone = EngineHit("e", 0, "u", NodeId("a"), 3, 3, 0, 0)
    assert own_hit(None, None) == OwnHit()
    assert own_hit(node, None) == OwnHit(6, 0, 4)
    assert own_hit(node, whole) == own_hit(None, whole) == OwnHit(8, 3, 3)
    assert own_hit(node, alone) == OwnHit(6, 3, 1)


@given(*[st.integers(0, 50)] * 4, st.integers(0, 150))
def test_a_holding_is_as_long_as_the_longest_of_its_parts(
    hbm: int, dram: int, ssd: int, other: int, predicted: int
) -> None:
    found = holding_from(OwnHit(hbm + dram + ssd, hbm, dram), other, predicted, 1)
    assert found.hbm_tokens == max(hbm, predicted)
    assert found.node_tokens == max(hbm + dram + ssd, predicted)
    assert found.node_tokens + found.peer_tokens == max(hbm + dram + ssd, predicted, other)


def candidate(
    url: str, held: int = 0, active: int = 0, queued: int = 0, speeds: Speeds = SPEEDS
) -> Candidate:
    return Candidate(url, Load(active, queued), Holding(dram_tokens=held), speeds)


def test_the_short_list_is_the_near_best_and_the_least_loaded() -> None:
    engines = [
        candidate("best", 1000, 5, 900),
        candidate("near", 850, 5, 900),
        candidate("some", 500, 5, 900),
        candidate("idle", 0),
        candidate("calm", 0, 1),
    ]
    assert [item.url for item in short_list(engines, PREFERENCES)] == [
        "best",
        "near",
        "idle",
        "calm",
    ]


def test_all_equally_idle_engines_are_listed() -> None:
    engines = [candidate(f"e{i}") for i in range(5)]
    assert len(short_list(engines, PREFERENCES)) == 5


def test_the_longest_hit_wins_until_its_queue_costs_more() -> None:
    rng = Random(1)
    calm = [candidate("hit", 1000, 1, 100), candidate("idle")]
    full = [candidate("hit", 1000, 1, 3000), candidate("idle")]
    assert COST.pick(Asked(1500), calm, rng).url == "hit"
    assert COST.pick(Asked(1500), full, rng).url == "idle"


def test_a_miss_goes_to_the_idle_engine_however_much_it_holds() -> None:
    engines = [candidate("busy", 0, 3, 4000), candidate("idle", 0)]
    assert COST.pick(Asked(100), engines, Random(0)).url == "idle"


def test_without_hits_equal_engines_share_evenly() -> None:
    engines = [candidate(f"e{i}") for i in range(4)]
    rng = Random(7)
    spread = Counter(COST.pick(Asked(100), engines, rng).url for _ in range(400))
    assert min(spread.values()) > 60


def test_ties_go_to_fewer_active_requests() -> None:
    speeds = Speeds(1000.0, 10_000.0, 4_000.0, 2_000.0, 0.1, 0.0)
    engines = [
        candidate("three", active=3, speeds=speeds),
        candidate("one", active=1, speeds=speeds),
    ]
    assert {COST.pick(Asked(10), engines, Random(i)).url for i in range(10)} == {"one"}


def test_a_sibling_waits_for_the_prefill_rather_than_repeat_it_elsewhere() -> None:
    computing = Candidate("a", Load(1, 2000), Holding(hbm_tokens=2000), SPEEDS)
    idle = [candidate(f"idle{i}") for i in range(7)]
    assert COST.pick(Asked(2010), [computing, *idle], Random(0)).url == "a"


def test_round_robin_takes_turns_and_skips_who_is_missing() -> None:
    policy = RoundRobinPolicy()
    engines = [candidate("b"), candidate("a"), candidate("c")]
    turns = []
    for given_engines in (engines, engines, engines[:2], engines):
        url = policy.pick(Asked(1), given_engines, Random(0)).url
        policy.routed(url)
        turns.append(url)
    assert turns == ["a", "b", "a", "b"]


def test_least_load_ignores_what_is_cached() -> None:
    engines = [candidate("hit", 10_000, 1), candidate("idle")]
    assert LeastLoadPolicy().pick(Asked(10_001), engines, Random(0)).url == "idle"


@given(st.lists(st.tuples(tokens, loads), min_size=1, max_size=8), st.integers(0, 100))
def test_the_pick_is_never_beaten_by_more_than_a_tie_among_the_listed(
    shapes: list[tuple[int, Load]], seed: int
) -> None:
    engines = [
        Candidate(f"e{i}", load, Holding(dram_tokens=held), SPEEDS)
        for i, (held, load) in enumerate(shapes)
    ]
    picked = COST.pick(Asked(6000), engines, Random(seed))
    listed = short_list(engines, PREFERENCES)
    assert picked in listed
    times = {e.url: estimate(6000, e.holding, e.load, SPEEDS).total_seconds for e in listed}
    assert times[picked.url] <= max(1.1 * min(times.values()), min(times.values()) + 0.001) + 1e-9
