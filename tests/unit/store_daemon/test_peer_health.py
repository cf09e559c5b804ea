"""Breaker and bandwidth of a peer, with a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from store_daemon.peer_health import BreakerState, HealthLimits, PeerHealth


@pytest.fixture
def health() -> Iterator[PeerHealth]:
    health = PeerHealth(HealthLimits(assumed_bytes_per_second=1000.0))
    yield health
    health.check_integrity()


def fail_times(health: PeerHealth, count: int, now: float) -> None:
    for _ in range(count):
        health.begin(now)
        health.fail(now)


def test_breaker_opens_at_the_third_failure_in_a_row_only(health: PeerHealth) -> None:
    fail_times(health, 2, 0.0)
    health.begin(0.0)
    health.succeed()
    fail_times(health, 2, 0.0)
    assert health.may_try(0.0)
    fail_times(health, 1, 0.0)
    assert (health.state(4.9), health.may_try(4.9)) == (BreakerState.OPEN, False)


def test_half_open_breaker_lets_one_trial_through_and_believes_it(health: PeerHealth) -> None:
    fail_times(health, 3, 0.0)
    assert health.state(5.0) is BreakerState.HALF_OPEN
    health.begin(5.0)
    assert not health.may_try(5.0)
    health.fail(5.5)
    assert not health.may_try(10.4)
    health.begin(10.5)
    health.succeed()
    assert health.state(10.5) is BreakerState.CLOSED


def test_abandoned_trial_leaves_room_for_another(health: PeerHealth) -> None:
    fail_times(health, 3, 0.0)
    health.begin(5.0)
    health.abandon()
    assert health.may_try(5.0)


def test_estimate_starts_optimistic_follows_what_was_measured_and_forgets(
    health: PeerHealth,
) -> None:
    assert 500 / health.bytes_per_second(0.0) == 0.5
    health.measured(100, 1.0, 0.0)
    assert 500 / health.bytes_per_second(1.0) == 5.0
    health.measured(200, 1.0, 1.0)
    assert 130 / health.bytes_per_second(1.0) == pytest.approx(1.0)
    assert 500 / health.bytes_per_second(31.1) == 0.5
