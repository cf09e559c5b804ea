"""The in-flight ledger, predicted chains and the breaker."""

from __future__ import annotations

from random import Random

import pytest

from emberkv_proto.errors import IntegrityError
from router.health import BreakerLimits, Health, HealthState
from router.load import LoadLedger
from router.predicted import PredictedChains
from router.scoring import Load


def test_a_charge_counts_at_once_and_is_gone_after_the_block() -> None:
    ledger = LoadLedger(lambda: 0.0)
    with ledger.charge("a", 100) as charge:
        assert ledger.load("a") == Load(1, 100, first_tokens=100)
        charge.prefilled()
        charge.prefilled()
        assert ledger.load("a") == Load(1, 0)
        ledger.check_integrity()
    assert ledger.load("a") == Load()
    assert ledger.total_requests() == 0
    ledger.check_integrity()


def test_a_charge_is_released_by_an_error_too() -> None:
    ledger = LoadLedger(lambda: 0.0)
    with pytest.raises(RuntimeError), ledger.charge("a", 100):
        raise RuntimeError
    assert ledger.load("a") == Load()


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    ledger = LoadLedger(lambda: 0.0)
    charge = ledger.charge("a", 5)
    other = ledger.charge("a", 7)
    charge.release()
    with pytest.raises(IntegrityError, match="twice"):
        charge.release()
    assert ledger.load("a") == Load(1, 7, first_tokens=7)
    other.release()
    ledger.check_integrity()


def test_the_first_in_the_queue_counts_from_when_it_could_begin() -> None:
    now = 10.0
    ledger = LoadLedger(lambda: now)
    one = ledger.charge("a", 100, 1000)
    now = 11.0
    two = ledger.charge("a", 30, 300)
    three = ledger.charge("a", 5)
    assert ledger.load("a") == Load(3, 135, 1300, 100, 1000, 1.0)
    now = 12.0
    three.release()  # it was not the first: the first is no further back
    assert ledger.load("a") == Load(2, 130, 1300, 100, 1000, 2.0)
    one.prefilled()
    now = 12.5
    assert ledger.load("a") == Load(2, 30, 300, 30, 300, 0.5)
    two.prefilled()
    assert ledger.load("a") == Load(2)
    now = 20.0
    late = ledger.charge("a", 7)
    assert ledger.load("a") == Load(3, 7, 0, 7, 0, 0.0)
    for charge in (one, two, late):
        ledger.check_integrity()
        charge.release()


def test_random_charges_and_releases_always_add_up() -> None:
    ledger, rng, live = LoadLedger(lambda: 0.0), Random(3), []
    for _ in range(2000):
        step = rng.random()
        if step < 0.5 or not live:
            live.append(ledger.charge(rng.choice("abc"), rng.randrange(1000)))
        elif step < 0.7:
            rng.choice(live).prefilled()
        else:
            live.pop(rng.randrange(len(live))).release()
        ledger.check_integrity()
        assert ledger.total_requests() == len(live)


def test_a_routed_chain_counts_until_its_time_is_over() -> None:
    predicted = PredictedChains(3.0)
    predicted.note("a", [1, 2, 3], now=10.0)
    assert predicted.hit_blocks("a", [1, 2, 9], 11.0) == 2
    assert predicted.hit_blocks("b", [1, 2, 3], 11.0) == 0
    predicted.note("a", [1, 2, 5], now=12.0)
    assert predicted.hit_blocks("a", [1, 2, 3], 12.9) == 3
    assert predicted.hit_blocks("a", [1, 2, 3], 13.5) == 2
    predicted.check_integrity()
    predicted.expire(15.0)
    assert predicted.hit_blocks("a", [1, 2, 5], 15.0) == 0
    predicted.check_integrity()


def test_a_forgotten_engine_has_nothing_and_its_old_notes_do_no_harm() -> None:
    predicted = PredictedChains(3.0)
    predicted.note("a", [1, 2], now=0.0)
    predicted.forget("a")
    predicted.note("a", [1], now=1.0)
    predicted.expire(3.5)
    assert predicted.hit_blocks("a", [1, 2], 3.5) == 1
    predicted.check_integrity()


def test_predicted_prefixes_match_a_plain_walk() -> None:
    predicted, rng = PredictedChains(3.0), Random(5)
    trunk = list(range(1, 40))
    notes: dict[str, list[tuple[float, list[int]]]] = {"a": [], "b": [], "c": []}
    for step in range(300):
        now = step * 0.05
        split, branch = rng.randrange(40), rng.randrange(1, 6)
        tail = [10_000 * branch + 100 * split + i for i in range(split, 40)]  # as chained hashes
        chain = trunk[:split] + tail
        wanted = {}
        for url, own in notes.items():
            alive = {key for at, keys in own if at + 3.0 > now for key in keys}
            wanted[url] = next((i for i, key in enumerate(chain) if key not in alive), len(chain))
            assert predicted.hit_blocks(url, chain, now) == wanted[url]
        found = dict(predicted.hits(chain, now))
        assert found == {url: blocks for url, blocks in wanted.items() if blocks}
        if rng.random() < 0.5:
            url = rng.choice("abc")
            predicted.note(url, chain, now)
            notes[url].append((now, chain))
        predicted.check_integrity()


LIMITS = BreakerLimits(failures=3, open_seconds=2.0)


def healthy() -> Health:
    health = Health(LIMITS, 0.0)
    health.probe_succeeded(0.0)
    return health


def test_an_engine_is_no_candidate_before_its_first_good_probe() -> None:
    health = Health(LIMITS, 0.0)
    assert not health.is_healthy
    health.refused(1.0)
    assert health.state is HealthState.UNKNOWN
    assert health.may_probe(1.0)
    health.probe_succeeded(2.0)
    assert health.is_healthy


def test_three_failures_in_a_row_open_and_a_good_probe_after_the_pause_closes() -> None:
    health = healthy()
    for now in (1.0, 1.1):
        health.request_failed(now)
    assert health.is_healthy
    health.request_failed(1.2)
    assert health.state is HealthState.OPEN
    assert not health.may_probe(3.1)
    assert health.may_probe(3.3)
    health.probe_failed(3.3)
    assert not health.may_probe(5.0)
    health.probe_succeeded(5.4)
    assert health.is_healthy
    health.check_integrity()


def test_good_probes_do_not_hide_failing_requests() -> None:
    health = healthy()
    for now in (1.0, 2.0, 3.0):
        health.request_failed(now)
        health.probe_succeeded(now) if now < 3 else None
    assert health.state is HealthState.OPEN


def test_a_success_between_failures_starts_the_count_anew() -> None:
    health = healthy()
    for now in range(10):
        health.request_failed(now)
        health.request_failed(now)
        health.request_succeeded()
    assert health.is_healthy


def test_a_refused_connection_opens_at_once() -> None:
    health = healthy()
    health.refused(1.0)
    assert health.state is HealthState.OPEN
    assert health.since == 1.0
