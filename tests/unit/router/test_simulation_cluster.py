"""The simulated cluster keeps time, caches and books as it says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from router.candidates import Asked, Candidate, Policy
from router.config import RouterSection
from router.simulation.agenda import Agenda
from router.simulation.cluster import Outage, Simulation, Troubles
from router.simulation.comparison import Setting, policy_maker
from router.simulation.outcome import Outcome, Tally, imbalance
from router.simulation.workload import Arrival, Workload, arrival

ROUTER = RouterSection(
    prefill_tokens_per_second=1024.0,
    dram_tokens_per_second=8192.0,
    peer_tokens_per_second=4096.0,
    peer_setup_seconds=0.5,
)
"""A block takes half a second to compute, a sixteenth from here, an eighth from elsewhere."""


class Scripted:
    """Sends each request to the engine whose number comes next."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = list(nodes)

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        node = self._nodes.pop(0)
        return next(item for item in candidates if item.url == f"http://node-{node:03}:8000")

    def routed(self, url: str) -> None:
        """Nothing is kept here."""


def scripted(*nodes: int) -> Scripted:
    return Scripted(nodes)


def simulated(
    policy: Policy, requests: Sequence[Arrival], nodes: int = 2, troubles: Troubles | None = None
) -> tuple[Simulation, Outcome]:
    def make(_: Mapping[str, int]) -> Policy:
        return policy

    shape = Setting(nodes, 16 * 512, router=ROUTER).shape()
    simulation = Simulation(shape, make, 1, troubles)
    return simulation, simulation.run(Workload("w", requests))


def request(seconds: float, blocks: Sequence[int], output: int = 0) -> Arrival:
    return arrival(seconds, blocks, 512 * len(blocks), output)


def test_an_engine_prefills_one_request_after_the_other() -> None:
    simulation, _ = simulated(
        scripted(0, 0, 0, 1), [request(0, (n, n + 10)) for n in range(3)] + [request(1, (9,))]
    )
    assert sorted(simulation.tally.waits) == pytest.approx([0.5, 1.0, 2.0, 3.0])
    assert simulation.tally.work == pytest.approx([3.0, 0.5])


def test_what_an_engine_has_when_it_begins_is_what_hits() -> None:
    """The second comes before anything is cached, but is begun after it is."""
    same = (1, 2, 3, 4)
    simulation, outcome = simulated(scripted(0, 0), [request(0, same), request(0.1, same)])
    a_token = 1 / 1024 + (4 * 512) / 8192
    assert simulation.tally.waits == pytest.approx([2.0, 1.9 + a_token])
    assert outcome.hit_rate == pytest.approx((4 * 512 - 1) / (8 * 512))


def test_with_a_pool_blocks_come_from_the_node_that_has_them() -> None:
    same = tuple(range(8))
    simulation, outcome = simulated(scripted(0, 1), [request(0, same), request(10, same)])
    pulled = 0.5 + 8 * 0.125 + 1 / 1024
    assert simulation.tally.waits == pytest.approx([4.0, pulled])
    assert outcome.pulled_share == pytest.approx(0.5)
    assert [engine.store.hit_blocks(simulation_keys(same)) for engine in simulation.engines] == [
        8,
        8,
    ]


def simulation_keys(blocks: Sequence[int]) -> tuple[int, ...]:
    return request(0, blocks).keys


def test_late_events_keep_the_router_from_knowing_and_daemons_from_pulling() -> None:
    same = tuple(range(8))
    late = Troubles(index_delay_seconds=100.0)
    simulation, outcome = simulated(scripted(0, 1), [request(0, same), request(10, same)], 2, late)
    assert outcome.hit_rate == 0
    assert [simulation.index_blocks(node) for node in range(2)] == [8, 8], "all came in the end"


def test_a_wrong_speed_changes_what_happens_and_not_what_the_router_believes() -> None:
    requests = [request(10 * n, (n,)) for n in range(20)]
    simulation, _ = simulated(scripted(*[0, 1] * 10), requests, 2, Troubles(speed_error=4.0))
    first, second, *rest = simulation.tally.waits
    assert rest == pytest.approx([first, second] * 9)
    assert first != pytest.approx(0.5, rel=0.01)
    assert 1 / first + 1 / second == pytest.approx(4.0), "together they are as quick as believed"


def test_who_waits_on_a_node_that_dies_is_sent_elsewhere_and_its_cache_is_gone() -> None:
    cost = policy_maker("cost", ROUTER)
    shape = Setting(2, 16 * 512, router=ROUTER).shape()
    requests = [
        request(0, (1, 2)),
        request(0, (3, 4)),
        request(0.5, (1, 2, 5)),
        request(20, (1, 2)),
    ]
    outage = Outage(0, 0.75, 10.0)
    simulation = Simulation(shape, cost, 1, Troubles(outages=(outage,)))
    outcome = simulation.run(Workload("w", requests))
    assert (outcome.requests, outcome.failed) == (4, 0)
    assert outcome.retried >= 1
    assert max(simulation.tally.waits) > 0.75
    assert [engine.is_up for engine in simulation.engines] == [True, True]
    assert [engine.health.is_healthy for engine in simulation.engines] == [True, True]
    for node, engine in enumerate(simulation.engines):
        assert simulation.index_blocks(node) == len(engine.store)


def test_a_request_that_was_answered_in_part_is_cut_short_and_not_repeated() -> None:
    outage = Troubles(outages=(Outage(0, 5.0),))
    _, outcome = simulated(scripted(0), [request(0, (1,), output=1000)], 2, outage)
    assert (outcome.cut_short, outcome.retried, outcome.requests) == (1, 0, 1)


def test_with_nobody_left_requests_fail_and_are_counted() -> None:
    outage = Troubles(outages=(Outage(0, 5.0),))
    _, outcome = simulated(scripted(0), [request(0, (1,)), request(9, (2,))], 1, outage)
    assert (outcome.requests, outcome.failed, outcome.good_share) == (2, 1, 0.5)


def test_things_happen_in_order_and_those_of_one_time_in_the_order_they_were_put_down() -> None:
    agenda, seen = Agenda(), []
    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        agenda.at(seconds, lambda name=name: seen.append((agenda.now, name)))
    agenda.run_until(1.5)
    assert (seen, agenda.now) == ([(1.0, "first"), (1.0, "second")], 1.5)
    agenda.at(0.0, lambda: seen.append((agenda.now, "overdue")))
    agenda.run_until(float("inf"))
    assert seen[2:] == [(1.5, "overdue"), (2.0, "late")]


def test_an_outcome_counts_what_is_good_of_all_that_came() -> None:
    tally = Tally([3.0, 1.0], [float(n) for n in range(1, 11)], 1000, 300, 100, failed=10)
    outcome = tally.outcome(0.4, 5.0, 20.0)
    assert outcome.oracle_share == pytest.approx(0.75)
    assert (outcome.imbalance, outcome.pulled_share) == (1.5, 0.1)
    assert (outcome.good_share, outcome.goodput) == (0.25, 0.25)
    assert (outcome.p50_seconds, outcome.requests) == (5.5, 20)
    assert imbalance([0.0, 0.0]) == 1.0


def test_an_unknown_share_of_nothing_is_whole() -> None:
    assert replace(Tally([1.0], [1.0], 1), hit_tokens=0).outcome(0.0, 1.0, 1.0).oracle_share == 1
