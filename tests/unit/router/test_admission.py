"""Full engines: who waits, in which order, for how long, and what the refused are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from router.admission import AdmissionLimits
from router.load import LoadLedger
from tests.helpers.fake_engine import (
    COMPLETION,
    FakeEngine,
    FakeRequest,
    Script,
    answer,
    hang,
)
from tests.helpers.router_client import Got, RunningRouter, connected, request, running_router

PATH = "/v1/completions"


def prompt(number: int, model: str = "m") -> dict[str, object]:
    return {"model": model, "prompt": [number]}


def gated(gate: asyncio.Semaphore) -> Script:
    """Answer one request for each release of the gate."""

    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await gate.acquire()
        return await answer(COMPLETION)(request, writer)

    return script


async def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def asked_in_turn(router: RunningRouter, *asks: tuple[int, str]) -> list[asyncio.Task[Got]]:
    """Send these one after the other, each when the one before stands in line."""
    tasks = []
    for number, priority in asks:
        before = len(router.router.admission)
        headers = {"X-Emberkv-Priority": priority}
        tasks.append(asyncio.ensure_future(request(router.port, PATH, prompt(number), headers)))
        await until(lambda before=before: len(router.router.admission) > before)  # type: ignore[misc]
        router.router.admission.check_integrity()
    return tasks


async def test_waiting_requests_are_served_by_class_and_then_in_order() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1) as router,
    ):
        engine.completion = gated(gate)
        first = asyncio.ensure_future(request(router.port, PATH, prompt(0)))
        await engine.was_asked()
        tasks = await asked_in_turn(
            router, (1, "low"), (2, "normal"), (3, "high"), (4, "normal"), (5, "high")
        )
        metrics = (await request(router.port, "/metrics")).body
        assert b'emberkv_router_waiting_requests{priority="high"} 2.0' in metrics
        for done in range(1, 7):
            gate.release()
            await until(lambda done=done: len(engine.requests) >= min(done + 1, 6))  # type: ignore[misc]
        answers = await asyncio.gather(first, *tasks)
        assert {got.status for got in answers} == {200}
        assert [seen.json["prompt"][0] for seen in engine.requests] == [0, 3, 5, 2, 4, 1]
        assert router.counter("waited_seconds_count") == 5


async def test_several_places_freed_at_once_are_all_taken() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=8) as router,
    ):
        engine.completion = gated(gate)
        tasks = [asyncio.ensure_future(request(router.port, PATH, prompt(i))) for i in range(24)]
        await until(lambda: engine.active == 8 and len(router.router.admission) == 16)
        for _ in range(8):
            gate.release()
        await until(lambda: len(engine.requests) == 16)
        assert engine.active == 8
        for _ in range(16):
            gate.release()
        assert {got.status for got in await asyncio.gather(*tasks)} == {200}


async def test_who_waits_too_long_is_told_when_to_come_again() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1, queue_seconds=0.2) as router,
    ):
        engine.completion = hang()
        async with connected(router.port) as client:
            client.post(PATH, prompt(0))
            await engine.was_asked()
            got = await request(router.port, PATH, prompt(1))
            assert got.status == 429
            assert got.json["error"]["type"] == "rate_limit_error"
            assert "no engine had room for 0.2 s" in got.json["error"]["message"]
            assert int(got.headers["retry-after"]) >= 1
            assert router.counter("refused_requests_total", why="queue_timeout") == 1
            assert len(router.router.admission) == 0
        await router.settled()


async def test_a_full_line_takes_a_higher_class_and_sends_its_last_away() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1, queue_requests=2) as router,
    ):
        engine.completion = gated(gate)
        first = asyncio.ensure_future(request(router.port, PATH, prompt(0)))
        await engine.was_asked()
        kept, displaced = await asked_in_turn(router, (1, "normal"), (2, "low"))
        equal = await request(router.port, PATH, prompt(3), {"X-Emberkv-Priority": "low"})
        assert equal.status == 429
        assert router.counter("refused_requests_total", why="queue_full") == 1
        urgent = asyncio.ensure_future(request(router.port, PATH, {**prompt(4), "priority": -1}))
        gone = await displaced
        assert gone.status == 429
        assert "higher class" in gone.json["error"]["message"]
        assert router.counter("refused_requests_total", why="displaced") == 1
        for _ in range(3):
            gate.release()
        assert {got.status for got in await asyncio.gather(first, kept, urgent)} == {200}
        assert [seen.json["prompt"][0] for seen in engine.requests] == [0, 4, 1]


async def test_a_line_made_shorter_stays_so_once_those_beyond_have_left() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1, queue_requests=3) as router,
    ):
        engine.completion = gated(gate)
        first = asyncio.ensure_future(request(router.port, PATH, prompt(0)))
        await engine.was_asked()
        tasks = await asked_in_turn(router, *((number, "normal") for number in (1, 2, 3)))
        admission = router.router.admission
        admission.set_limits(AdmissionLimits(1, 10.0, 1, 60))
        for left in (2, 1):
            gate.release()
            await until(lambda left=left: len(admission) == left)  # type: ignore[misc]
            admission.check_integrity()
            assert (await request(router.port, PATH, prompt(9))).status == 429
        for _ in range(2):
            gate.release()
        assert {got.status for got in await asyncio.gather(first, *tasks)} == {200}


async def test_a_client_that_goes_away_leaves_the_line_at_once() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1) as router,
    ):
        engine.completion = gated(gate)
        first = asyncio.ensure_future(request(router.port, PATH, prompt(0)))
        await engine.was_asked()
        async with connected(router.port) as leaving:
            leaving.post(PATH, prompt(1), {"X-Emberkv-Priority": "high"})
            await until(lambda: len(router.router.admission) == 1)
            (patient,) = await asked_in_turn(router, (2, "low"))
        await until(lambda: len(router.router.admission) == 1)
        gate.release()
        gate.release()
        assert [got.status for got in await asyncio.gather(first, patient)] == [200, 200]
        assert [seen.json["prompt"][0] for seen in engine.requests] == [0, 2]
        assert router.counter("aborts_total") == 1


async def test_clients_leaving_at_random_moments_hold_up_nobody() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=2, queue_requests=64) as router,
    ):

        async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(0.004)
            return await answer(COMPLETION)(request, writer)

        engine.completion = slow

        async def leave(number: int) -> None:
            async with connected(router.port) as client:
                client.post(PATH, prompt(number), {"X-Emberkv-Priority": "high"})
                await asyncio.sleep(0.001 * (number % 17))

        async def stay(number: int) -> int:
            return (await request(router.port, PATH, prompt(number))).status

        leaving = asyncio.gather(*(leave(number) for number in range(40)))
        statuses = await asyncio.gather(*(stay(number) for number in range(40)))
        await leaving
        assert set(statuses) <= {200, 429}
        await router.settled()
        await until(lambda: len(router.router.admission) == 0)
        router.router.check_integrity()
        assert (await request(router.port, PATH, prompt(99))).status == 200


async def test_the_line_of_one_model_does_not_hold_up_another() -> None:
    async with (
        FakeEngine("m").serving() as busy,
        FakeEngine("n").serving() as idle,
        running_router(busy.url, idle.url, max_inflight_per_engine=1) as router,
    ):
        busy.completion = hang()
        async with connected(router.port) as one, connected(router.port) as two:
            one.post(PATH, prompt(0))
            await busy.was_asked()
            two.post(PATH, prompt(1))
            await until(lambda: len(router.router.admission) == 1)
            assert (await request(router.port, PATH, prompt(2, "n"))).status == 200
        await router.settled()


async def test_an_engine_that_comes_back_serves_those_in_line() -> None:
    async with (
        FakeEngine().serving() as full,
        FakeEngine().serving() as away,
        running_router(full.url, away.url, max_inflight_per_engine=1) as router,
    ):
        await away.stop()
        await until(lambda: len(router.router.engines.serving("m")) == 1)
        full.completion = hang()
        async with connected(router.port) as client:
            client.post(PATH, prompt(0))
            await full.was_asked()
            waiting = asyncio.ensure_future(request(router.port, PATH, prompt(1)))
            await until(lambda: len(router.router.admission) == 1)
            await away.start()
            got = await asyncio.wait_for(waiting, 30)
            assert got.status == 200
            assert got.headers["x-emberkv-engine"] == away.url
        await router.settled()


async def test_an_engine_with_too_many_tokens_to_prefill_is_full() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_queued_tokens_per_engine=100, queue_requests=0) as router,
    ):
        engine.completion = hang()
        async with connected(router.port) as client:
            client.post(PATH, {"model": "m", "prompt": list(range(150))})  # idle: any length goes
            await engine.was_asked()
            got = await request(router.port, PATH, prompt(1))
            assert got.status == 429
            assert "100 tokens to prefill" in got.json["error"]["message"]
        await router.settled()


async def test_a_priority_that_is_none_is_a_mistake_of_the_client() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(router.port, PATH, prompt(1), {"X-Emberkv-Priority": "urgent"})
        assert got.status == 400
        assert got.json["error"]["code"] == "invalid_priority"
        assert not engine.requests


@pytest.mark.parametrize(("mean", "wanted"), [(4.0, 2), (40.0, 20), (4000.0, 60), (0.01, 1)])
async def test_retry_after_is_the_pace_of_the_engines(mean: float, wanted: int) -> None:
    """Two charges that last `mean` seconds each free a place every mean / 2 seconds."""
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        now = 0.0
        ledger = router.router.ledger
        ledger._clock = lambda: now  # time passes by hand below
        with ledger.charge(engine.url, 0) as charge:
            now = mean
            charge.finished()
        with ledger.charge(engine.url, 0), ledger.charge(engine.url, 0):
            assert router.router.admission.retry_after_seconds("m") == wanted


def test_the_mean_time_follows_the_newest_requests() -> None:
    now = 0.0
    ledger = LoadLedger(lambda: now)

    def run(seconds: float) -> None:
        nonlocal now
        with ledger.charge("a", 1) as charge:
            now += seconds
            charge.finished()

    assert ledger.releases_per_second("a") == 0
    for _ in range(50):
        run(2.0)
    with ledger.charge("a", 1):
        assert ledger.releases_per_second("a") == pytest.approx(0.5)
    for _ in range(100):
        run(0.5)
    with ledger.charge("a", 1):
        assert ledger.releases_per_second("a") == pytest.approx(2.0, rel=0.01)
    with ledger.charge("a", 1):  # one that failed tells nothing
        now += 1000
    with ledger.charge("a", 1):
        assert ledger.releases_per_second("a") == pytest.approx(2.0, rel=0.01)
    ledger.forget("a")
    assert ledger.releases_per_second("a") == 0
    ledger.check_integrity()
