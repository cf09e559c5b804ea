"""A few runs of the transport campaign; `make transport-campaign` runs hundreds."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from tests.process.transport_campaign import Blow, run_campaign

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("kind", "runs"), [("tcp", 4), ("ucx", 5), ("ucx-read", 3)])
def test_no_byte_comes_late_and_nothing_hangs_or_leaks_whoever_is_killed_or_stopped(
    kind: str, runs: int
) -> None:
    if kind != "tcp" and find_spec("nixl_cu12") is None:
        pytest.skip("nixl_cu12 is not installed: pip install --no-deps nixl-cu12==1.5.1")
    verdicts = run_campaign(kind, seed=3, runs=runs)
    assert verdicts.runs == runs
    assert verdicts.good > 0
    assert verdicts.problems == []


def test_blows_follow_from_the_seed_and_hit_both_sides_in_every_way() -> None:
    blows = [Blow.of(random.Random(number), has_agents=True) for number in range(200)]
    assert blows == [Blow.of(random.Random(number), has_agents=True) for number in range(200)]
    assert len({(blow.victim, blow.deed) for blow in blows}) == 8
    plain = [Blow.of(random.Random(number), has_agents=False) for number in range(200)]
    assert {blow.deed for blow in plain} == {"kill", "stop"}
