"""Rates: one burst, then the pace; debt is waited for; the rate may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_daemon.tiers.token_bucket import BURST_SECONDS, TokenBucket


def test_no_limit_never_waits_and_leaves_no_debt_when_one_is_set() -> None:
    bucket = TokenBucket(0, 5.0)
    bucket.spend(1 << 40, 6.0)
    assert bucket.delay(6.0) == 0.0
    bucket.per_second = 100
    assert bucket.delay(7.0) == 0.0


def test_debt_is_paid_off_at_the_rate() -> None:
    bucket = TokenBucket(100, 0.0)
    bucket.spend(100, 0.0)
    assert bucket.delay(0.0) == 0.0
    bucket.spend(250, 0.0)
    assert bucket.delay(0.0) == pytest.approx(2.5)
    assert bucket.delay(1.5) == pytest.approx(1.0)
    assert bucket.delay(2.5) == pytest.approx(0.0)
    bucket.per_second = 1000
    bucket.spend(500, 2.5)
    assert bucket.delay(2.5) == pytest.approx(0.5)
    bucket.per_second = 0
    assert bucket.delay(2.5) == 0.0


def test_time_that_stands_still_or_runs_back_gives_nothing() -> None:
    bucket = TokenBucket(10, 100.0)
    bucket.spend(30, 100.0)
    assert bucket.delay(50.0) == pytest.approx(2.0)


@given(
    rate=st.integers(1, 1000),
    pieces=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    idle=st.floats(0, 100),
)
def test_whoever_waits_as_told_never_exceeds_rate_burst_and_last_piece(
    rate: int, pieces: list[int], idle: float
) -> None:
    bucket = TokenBucket(rate, 0.0)
    now, spent = idle, 0
    for piece in pieces:
        now += bucket.delay(now)
        assert spent <= rate * (now - idle + BURST_SECONDS) * (1 + 1e-9) + 1e-6
        bucket.spend(piece, now)
        spent += piece
