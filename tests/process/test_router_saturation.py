"""A saturated router as a process: classes, deadline, a client that leaves, and what it counts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.fake_engine import COMPLETION, FakeEngine, FakeRequest, answer
from tests.helpers.router_client import connected, request
from tests.helpers.router_process import RouterProcess, router_process

pytestmark = pytest.mark.process
PATH = "/v1/completions"


async def line_has(router: RouterProcess, wanted: int) -> None:
    async with timeout(60):
        while True:
            text = (await request(router.port, "/metrics")).body.decode()
            waiting = re.findall(r"emberkv_router_waiting_requests\{.*\} (\S+)", text)
            if sum(map(float, waiting)) == wanted:
                return
            await asyncio.sleep(0.02)


async def test_a_saturated_router_serves_by_class_refuses_in_time_and_forgets_who_left(
    tmp_path: Path,
) -> None:
    gate = asyncio.Semaphore(0)

    async def gated(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await gate.acquire()
        return await answer(COMPLETION)(request, writer)

    async with FakeEngine().serving() as engine:
        engine.completion = gated
        settings = (
            f"router.engines=[{{url: '{engine.url}'}}]",
            "router.max_inflight_per_engine=1",
            "router.queue_seconds=30",
            "router.queue_requests=3",
        )
        async with router_process(tmp_path, *settings) as router:

            def ask(number: int, priority: str) -> asyncio.Task[int]:
                async def status() -> int:
                    got = await request(
                        router.port,
                        PATH,
                        {"model": "m", "prompt": [number]},
                        {"X-Emberkv-Priority": priority},
                    )
                    if got.status == 429:
                        assert 1 <= int(got.headers["retry-after"]) <= 60
                    return got.status

                return asyncio.ensure_future(status())

            tasks = [ask(0, "normal")]
            await engine.was_asked()
            async with connected(router.port) as leaving:
                leaving.post(PATH, {"model": "m", "prompt": [9]}, {"X-Emberkv-Priority": "high"})
                await line_has(router, 1)
            await line_has(router, 0)
            for place, (number, priority) in enumerate([(1, "low"), (2, "normal"), (3, "high")]):
                tasks.append(ask(number, priority))
                await line_has(router, place + 1)
            assert await ask(4, "low") == 429
            for _ in range(4):
                gate.release()
            assert await asyncio.gather(*tasks) == [200] * 4
            assert [seen.json["prompt"][0] for seen in engine.requests] == [0, 3, 2, 1]
            text = (await request(router.port, "/metrics")).body.decode()
            assert 'emberkv_router_refused_requests_total{why="queue_full"} 1.0' in text
            assert "emberkv_router_aborts_total 1.0" in text
            workers = (await request(router.port, "/workers")).json["workers"]
            assert [item["load"]["active_requests"] for item in workers] == [0]
