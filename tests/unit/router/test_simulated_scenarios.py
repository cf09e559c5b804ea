"""What must not happen when many come at once, nobody comes, nodes go or come; each judged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from router.config import RouterSection
from router.simulation.cluster import Outage, Simulation, Troubles
from router.simulation.comparison import Setting, policy_maker
from router.simulation.outcome import Outcome, imbalance
from router.simulation.workload import Arrival, Workload, arrival

NODES = 8
BLOCK_SECONDS = 0.125
ROUTER = RouterSection(prefill_tokens_per_second=512 / BLOCK_SECONDS)


def simulated(
    requests: Sequence[Arrival], troubles: Troubles | None = None, blocks: int = 2000
) -> tuple[Simulation, Outcome]:
    shape = Setting(NODES, blocks * 512, router=ROUTER).shape()
    simulation = Simulation(shape, policy_maker("cost", ROUTER), 1, troubles)
    return simulation, simulation.run(Workload("w", requests))


def request(seconds: float, blocks: Sequence[int], output: int = 50) -> Arrival:
    return arrival(seconds, blocks, 512 * len(blocks), output)


def poisson(count: int, per_second: float, prefix: int, tail: int, seed: int = 3) -> list[Arrival]:
    """All begin with the same `prefix` blocks, and go on with `tail` blocks of their own."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for number in range(count):
        now += rng.expovariate(per_second)
        own = range(10_000 + number * tail, 10_000 + (number + 1) * tail)
        requests.append(request(now, (*range(prefix), *own)))
    return requests


def test_herd_siblings_that_come_at_once_compute_their_beginning_once_a_node_at_most() -> None:
    prefix, tail, siblings = 80, 4, 64
    herd = [
        request(
            number * 1e-4, (*range(prefix), *range(10_000 + tail * number, 10_004 + tail * number))
        )
        for number in range(siblings)
    ]
    simulation, outcome = simulated(herd)
    blocks = siblings * (prefix + tail)
    computed = (1 - outcome.hit_rate) * blocks
    assert computed <= NODES * prefix + siblings * tail + 1
    # All nodes computing it and sharing the siblings would be the quickest.
    quickest = (prefix + siblings / NODES * tail) * BLOCK_SECONDS
    assert max(simulation.tally.waits) <= 1.5 * quickest


def test_idle_engines_get_what_comes_in_turn_and_nobody_waits() -> None:
    simulation, outcome = simulated([request(10 * n, (n,)) for n in range(400)])
    assert simulation.tally.waits == pytest.approx([BLOCK_SECONDS] * 400)
    assert min(simulation.tally.work) > 0.6 * 50 * BLOCK_SECONDS
    assert outcome.imbalance < 1.4


def test_a_dead_node_costs_those_it_had_one_retry_and_nobody_an_answer() -> None:
    requests = poisson(1200, 36, prefix=0, tail=1)  # 0.56 of what eight can do, 0.64 of seven
    simulation, outcome = simulated(requests, Troubles(outages=(Outage(2, 10.0),)))
    assert outcome.failed == 0
    assert outcome.requests + outcome.cut_short >= 1200
    assert outcome.retried <= 1 + 12, "those it had, and one that found out"
    assert not simulation.engines[2].health.is_healthy
    assert imbalance([work for node, work in enumerate(simulation.tally.work) if node != 2]) < 1.1
    assert outcome.p99_seconds < 12 * BLOCK_SECONDS


def test_a_hot_prefix_is_copied_as_far_as_its_load_asks_and_keeps_engines_busy() -> None:
    """Computing it takes 8 s; the requests upon it need four engines, once it is there."""
    simulation, outcome = simulated(poisson(1500, 10, prefix=64, tail=2))
    hot = request(0, range(64)).keys
    copies = sum(engine.store.hit_blocks(hot) == 64 for engine in simulation.engines)
    assert copies >= 5, "fewer could not serve them"
    assert outcome.oracle_share > 0.99
    assert outcome.p90_seconds < 4.0, "half of what computing it anew would take"


def test_a_seldom_asked_prefix_stays_where_it_is() -> None:
    """One node can serve them all, and does; a second copy would displace what others need."""
    simulation, outcome = simulated(poisson(200, 0.5, prefix=64, tail=2))
    hot = request(0, range(64)).keys
    copies = sum(engine.store.hit_blocks(hot) == 64 for engine in simulation.engines)
    assert copies <= 2
    assert outcome.p90_seconds < 1.5
    assert outcome.hit_rate > 0.95


def test_a_new_node_gets_work_at_once_and_not_more_than_the_others() -> None:
    joins = 20.0
    requests = poisson(2400, 40, prefix=8, tail=1)
    simulation, outcome = simulated(requests, Troubles(outages=(Outage(5, 0.0, joins),)))
    seconds = requests[-1].seconds
    others = [work for node, work in enumerate(simulation.tally.work) if node != 5]
    share = simulation.tally.work[5] / (seconds - joins) / (sum(others) / 7 / seconds)
    assert 0.4 < share < 1.2
    assert outcome.failed == outcome.retried == 0
    assert outcome.oracle_share > 0.99
    later = sorted(simulation.tally.waits[-1400:])
    assert later[-14] < 8 * BLOCK_SECONDS, "nobody waited for it to compute the beginning"


def test_when_half_of_the_nodes_die_retries_are_no_storm() -> None:
    """Queues are long when it happens: a retry goes where there is room, within the budget."""
    burst = [request(9.9, (n,)) for n in range(120)]
    requests = sorted(poisson(1200, 30, 0, 1) + burst, key=lambda item: item.seconds)
    gone = tuple(Outage(node, 10.0, 14.0) for node in range(4))
    simulation, outcome = simulated(requests, Troubles(outages=gone))
    assert 40 <= outcome.retried <= 100
    assert outcome.failed <= 4, "who met three dead engines before anybody knew"
    assert imbalance(simulation.tally.work[4:]) < 1.1
    assert all(engine.health.is_healthy for engine in simulation.engines)
    assert max(simulation.tally.waits[-300:]) < 1.0, "it recovered"
