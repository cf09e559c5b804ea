"""Learned speeds: found, robust, bounded, forgotten; and taken from real traffic."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.candidates import Asked, Candidate, CostPolicy, Preferences
from router.scoring import NOTHING, Load, Speeds, attention_pairs
from router.speeds import LearningLimits, SpeedBook
from router.stretches import Worked
from tests.helpers.fake_engine import SSE_HEAD as HEAD
from tests.helpers.fake_engine import FakeEngine, FakeRequest, answer, chunk, hang, stream
from tests.helpers.router_client import connected, request, running_router
from tests.helpers.waiting import until_asked

GUESSES = Speeds(5000.0, 200_000.0, 40_000.0, 30_000.0, 0.0, 0.02)
LIMITS = LearningLimits()
PATIENT = LearningLimits(max_age_seconds=1e9)
"""For simulated engines whose prompts take minutes."""
NEGLIGIBLE_SECONDS = 0.005


class Fleet:
    """Engines that behave as told, and a book that watches them."""

    def __init__(self, seed: int = 0, limits: LearningLimits = PATIENT) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.book = SpeedBook(GUESSES, limits, lambda: self.now)

    def run(self, url: str, true: Speeds, requests: int, outliers: float = 0.0) -> None:
        """So many prompts of random lengths without hits, at up to four at once."""
        while requests > 0:
            batch = min(requests, self.rng.randint(1, 4))
            requests -= batch
            watches = [self.book.watch(url) for _ in range(batch)]
            for watched in watches:
                prompt = self.rng.randint(200, 20_000)
                cached = self.rng.choice([0, prompt // 2])  # in HBM
                work = Worked(prompt - cached, attention_pairs(prompt - cached, prompt))
                seconds = true.work_seconds(work.computed_tokens, work.attention_pairs)
                seconds *= self.rng.uniform(0.95, 1.05)
                if self.rng.random() < outliers:
                    seconds *= self.rng.choice([0.1, 10.0])
                self.now += seconds
                watched.answered()
                watched.told(work)
                watched.__exit__(None, None, None)
            self.now += self.rng.random()
        self.book.refresh()
        self.book.check_integrity()


def speeds(prefill: float, quadratic: float = 0.0) -> Speeds:
    return Speeds(prefill, 1e5, 1e5, 1e5, 0.0, 0.02, quadratic)


def close(book: SpeedBook, url: str, true: Speeds, off: float) -> bool:
    """Whether prompts of all lengths are estimated well, which is what counts.

    A few milliseconds do not: among prompts of seconds, noise hides what a short one takes.
    """
    for prompt in (500, 4000, 16_000):
        pairs = attention_pairs(prompt, prompt)
        found, wanted = (s.work_seconds(prompt, pairs) for s in (book.of(url), true))
        is_off = not wanted / (1 + off) <= found <= wanted * (1 + off)
        if is_off and abs(found - wanted) > NEGLIGIBLE_SECONDS:
            return False
    return True


@settings(max_examples=40)
@example(prefill=57677.0, quadratic=5e-08, seed=1)
@given(st.floats(50, 200_000), st.sampled_from([0.0, 1e-9, 1e-8, 5e-8]), st.integers(0, 1000))
def test_an_engines_prefill_is_found_within_a_quarter(
    prefill: float, quadratic: float, seed: int
) -> None:
    fleet = Fleet(seed)
    true = speeds(prefill, quadratic)
    fleet.run("e", true, 100)
    assert close(fleet.book, "e", true, 0.25), fleet.book.of("e")


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_one_wild_measurement_in_ten_changes_little(seed: int) -> None:
    fleet = Fleet(seed)
    true = speeds(8000, 1e-8)
    fleet.run("e", true, 120, outliers=0.05)
    assert close(fleet.book, "e", true, 0.5), fleet.book.of("e")


@settings(max_examples=25)
@given(st.floats(3, 50), st.integers(0, 1000))
def test_a_slow_engine_is_found_slow_and_recovers(factor: float, seed: int) -> None:
    fleet = Fleet(seed)
    quick, slow = speeds(20_000), speeds(20_000 / factor)
    policy = CostPolicy(Preferences(0.8, 2, 0.001, 0.1))

    def picks(rng: Random) -> set[str]:
        engines = [Candidate(url, Load(), NOTHING, fleet.book.of(url)) for url in "ab"]
        return {policy.pick(Asked(8000), engines, rng).url for _ in range(20)}

    fleet.run("a", quick, 80)
    fleet.run("b", slow, 80)
    assert picks(Random(seed)) == {"a"}
    fleet.run("b", quick, 160)
    assert close(fleet.book, "b", quick, 0.25)


def test_an_engine_that_gets_nothing_since_it_was_slow_is_tried_again() -> None:
    fleet = Fleet(limits=LIMITS)
    fleet.run("b", speeds(1000), 60)
    assert fleet.book.of("b").prefill_tokens_per_second < 1500
    fleet.now += LIMITS.max_age_seconds + 1
    fleet.run("a", speeds(20_000), 60)
    assert fleet.book.counts("b").prefill == 0
    assert fleet.book.of("b") == fleet.book.of("never seen")
    assert fleet.book.of("b").prefill_tokens_per_second == pytest.approx(20_000, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_equal_engines_share_what_comes_one_at_a_time(seed: int) -> None:
    """They are measured a little differently, which must not send everything to one of them."""
    fleet = Fleet(seed)
    for url in "abc":
        fleet.run(url, speeds(20_000 * fleet.rng.uniform(0.93, 1.07), 1e-9), 60)
    policy = CostPolicy(Preferences(0.8, 2, 0.001, 0.1))
    engines = [Candidate(url, Load(), NOTHING, fleet.book.of(url)) for url in "abc"]
    rng = Random(seed)
    spread = Counter(policy.pick(Asked(4000), engines, rng).url for _ in range(300))
    assert min(spread[url] for url in "abc") > 50


def test_first_guesses_count_until_there_are_enough_samples() -> None:
    book = SpeedBook(GUESSES, LIMITS, lambda: 0.0)
    book.watch("e").__exit__(None, None, None)
    for _ in range(LIMITS.least_samples - 1):
        book.learn("e", Worked(1000, 500_000), 1.0)
    book.refresh()
    assert book.of("e") == GUESSES
    book.learn("e", Worked(1000, 500_000), 1.0)
    assert book.of("e") == GUESSES, "sums are done by refresh alone"
    book.refresh()
    assert book.of("e").prefill_tokens_per_second == pytest.approx(1000)
    assert book.counts("e").prefill == LIMITS.least_samples
    book.forget("e")
    assert book.of("e") == GUESSES
    book.learn("e", Worked(1000, 500_000), 1.0)
    assert book.counts("e").prefill == 0


@pytest.mark.parametrize("tier", ["dram", "ssd", "peer"])
@pytest.mark.parametrize("true", [2_000.0, 50_000.0, 900_000.0])
def test_a_tiers_speed_is_found_from_what_its_fetches_took(tier: str, true: float) -> None:
    book, rng = SpeedBook(GUESSES, LIMITS, lambda: 0.0), Random(3)
    book.watch("e").__exit__(None, None, None)
    for _ in range(20):
        fetched = rng.randint(2000, 30_000)
        seconds = (16 / 5000 + fetched / true) * rng.uniform(0.95, 1.05)
        book.learn("e", Worked(16, 16 * fetched, **{f"{tier}_tokens": fetched}), seconds)
    book.refresh()
    assert getattr(book.of("e"), f"{tier}_tokens_per_second") == pytest.approx(true, rel=0.3)
    others = {"dram", "ssd", "peer"} - {tier}
    for other in others:
        name = f"{other}_tokens_per_second"
        assert getattr(book.of("e"), name) == getattr(GUESSES, name)
    assert book.of("e").prefill_tokens_per_second == GUESSES.prefill_tokens_per_second


def test_a_slow_fetch_is_never_taken_for_a_slow_prefill() -> None:
    book = SpeedBook(GUESSES, LIMITS, lambda: 0.0)
    book.watch("e").__exit__(None, None, None)
    for _ in range(40):
        book.learn("e", Worked(1000, 10**6, ssd_tokens=900), 60.0)  # both kinds: tells neither
    book.refresh()
    assert book.of("e") == GUESSES
    assert book.unclear == 40


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**15),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.one_of(st.floats(-10, 1e9), st.sampled_from([0.0, 1e-12, 1e300])),
)
def test_absurd_measurements_are_counted_and_never_believed(
    computed: int, pairs: int, dram: int, peer: int, seconds: float
) -> None:
    book = SpeedBook(GUESSES, LIMITS, lambda: 0.0)
    book.watch("e").__exit__(None, None, None)
    for _ in range(2 * LIMITS.least_samples):
        book.learn("e", Worked(computed, pairs, dram, 0, peer), seconds)
    book.refresh()
    book.check_integrity()
    assert book.taken + book.absurd + book.unclear == 2 * LIMITS.least_samples


def usage_event(prompt: int, cached: int) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": cached, "dram_tokens": 0},
    }
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


EVENTS = [b'data: {"choices":[{"text":"x"}]}\n\n', usage_event(900, 0), b"data: [DONE]\n\n"]
BODY = {"model": "m", "prompt": list(range(900)), "stream": True}


async def test_streams_teach_an_engines_speed_and_explain_and_metrics_show_it() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:

        async def prefill_first(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(0.03)
            return await stream(EVENTS)(request, writer)

        engine.completion = prefill_first
        for _ in range(10):
            assert (await request(router.port, "/v1/completions", BODY)).status == 200
        await router.settled()

        shown: dict[str, Any] = {}

        async def is_learnt() -> bool:
            """After the next sync it is not the assumed speed any more."""
            shown.update((await request(router.port, "/route/explain", BODY)).json["engines"][0])
            return bool(shown["speeds"]["prefill_tokens_per_second"] != 5000.0)

        await until_asked(is_learnt)
        assert shown["speeds"]["samples"] == {"prefill": 10, "dram": 0, "ssd": 0, "peer": 0}
        # Sleeping is never too short; a loaded machine may make it much longer.
        assert 100 < shown["speeds"]["prefill_tokens_per_second"] <= 900 / 0.03
        text = (await request(router.port, "/metrics")).body.decode()
        assert f'emberkv_router_speed_samples{{engine="{engine.url}",kind="prefill"}} 10.0' in text
        assert 'emberkv_router_measured_stretches_total{why="taken"} 10.0' in text


async def test_aborted_failed_and_silent_requests_teach_nothing() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        speeds = router.router.speeds
        engine.completion = hang(HEAD + chunk(EVENTS[0]))
        async with connected(router.port) as client:
            client.post("/v1/completions", BODY)
            await client.read_head()
        await router.settled()
        engine.completion = answer({"error": {}}, 500)
        await request(router.port, "/v1/completions", BODY)
        engine.completion = stream([EVENTS[0], EVENTS[2]])  # no usage
        await request(router.port, "/v1/completions", BODY)
        usage = {"prompt_tokens": 900, "completion_tokens": 5}
        details = {"prompt_tokens_details": {"cached_tokens": 0}}
        engine.completion = answer({"usage": {**usage, **details}})  # a whole answer of five tokens
        await request(router.port, "/v1/completions", BODY)
        await router.settled()
        assert speeds.counts(engine.url).prefill == 0
        assert speeds.taken == speeds.absurd == speeds.unclear == 0
        # A whole answer of one token ends with its prefill.
        engine.completion = answer({"usage": {**usage, "completion_tokens": 1, **details}})
        await request(router.port, "/v1/completions", BODY)
        await router.settled()
        assert speeds.taken == 1
