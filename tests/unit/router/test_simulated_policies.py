"""What each policy's choices lead to on traces, simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks._traces import conversations
from benchmarks.routing import workload_of
from client_sdk.cli.trace import default_trace_path
from router.candidates import Asked, Candidate
from router.preferences import first_speeds
from router.scoring import Holding, Load
from router.simulation.comparison import (
    POLICIES,
    Setting,
    at_load,
    one_store_hit_rate,
    simulate,
)
from router.simulation.outcome import Outcome
from router.simulation.rivals import DynamoPolicy
from router.simulation.workload import Workload, best_hit_rate, read_workload

SMALL = 1_500_000


def outcome(workload: Workload, name: str, setting: Setting) -> Outcome:
    return simulate(at_load(workload, setting), setting, name)


def test_on_mooncakes_trace_max_hit_collapses_and_cost_keeps_all_engines_busy() -> None:
    """All its conversations share their first block, so the longest hit is always the same node."""
    workload, setting = read_workload(default_trace_path()), Setting()
    found = {name: outcome(workload, name, setting) for name in POLICIES}
    assert found["max_hit"].imbalance > 7.9
    assert found["cost"].imbalance < 1.25
    # The first requests come together: what is computed for one of them hits for no other yet.
    assert found["cost"].oracle_share >= 0.95
    assert found["cost"].p90_seconds < found["round_robin"].p90_seconds
    assert found["cost"].p90_seconds < found["consistent_hash"].p90_seconds
    assert found["max_hit"].p90_seconds > 10 * found["cost"].p90_seconds
    assert {item.requests for item in found.values()} == {150}
    assert not any(item.failed or item.retried or item.cut_short for item in found.values())


def test_on_conversations_cost_keeps_hits_and_balance_and_a_pool_brings_the_rest() -> None:
    workload = workload_of(conversations(500))
    apart = Setting(tokens_per_node=SMALL, is_pooled=False)
    alone = {
        name: outcome(workload, name, apart)
        for name in ("cost", "round_robin", "least_load", "max_hit")
    }
    pooled = outcome(workload, "cost", replace(apart, is_pooled=True))
    assert pooled.oracle_share >= 0.95
    assert pooled.imbalance <= 1.05
    assert pooled.pulled_share > 0
    assert all(item.pulled_share == 0 for item in alone.values())
    assert alone["cost"].hit_rate > alone["round_robin"].hit_rate + 0.1
    assert alone["cost"].hit_rate > alone["least_load"].hit_rate + 0.1
    assert alone["cost"].p90_seconds < min(
        alone[name].p90_seconds for name in ("round_robin", "least_load", "max_hit")
    )
    assert pooled.p90_seconds <= alone["cost"].p90_seconds


def test_one_store_of_the_clusters_size_finds_what_its_order_of_use_keeps() -> None:
    workload = workload_of(conversations(60))
    best = best_hit_rate(workload.arrivals)
    rates = [
        one_store_hit_rate(workload, Setting(2, tokens)) for tokens in (64_000, 256_000, 5_000_000)
    ]
    assert 0 < rates[0] < rates[1] < rates[2] == best


@pytest.mark.parametrize("name", POLICIES)
def test_equal_seeds_give_equal_outcomes(name: str) -> None:
    setting = Setting(tokens_per_node=256_000)
    workload = workload_of(conversations(60))
    assert outcome(workload, name, setting) == outcome(workload, name, setting)


def test_dynamos_formula_adds_prefill_less_credit_and_the_blocks_that_decode() -> None:
    speeds = first_speeds(Setting().router)
    decoding = {"a": 3}
    policy, rng = DynamoPolicy(decoding), random.Random(0)

    def engine(url: str, queued: int, here: int, elsewhere: int) -> Candidate:
        holding = Holding(dram_tokens=here, peer_tokens=elsewhere)
        return Candidate(url, Load(1, queued), holding, speeds)

    # a: (1024 + 5120 - 2560) / 512 + 3 = 10; b: (0 + 5120 - 0.5 * 512) / 512 = 9.5
    engines = [engine("a", 1024, 2560, 0), engine("b", 0, 0, 512)]
    assert policy.pick(Asked(5120), engines, rng).url == "b"
    decoding["a"] = 2  # 9 < 9.5
    assert policy.pick(Asked(5120), engines, rng).url == "a"
