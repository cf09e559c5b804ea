"""SIGHUP to a router process: a changed file is taken over, a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.fake_engine import FakeEngine, hang
from tests.helpers.router_client import request
from tests.helpers.router_process import RouterProcess, router_process

pytestmark = pytest.mark.process
PATH = "/admin/policy"


async def policy_becomes(router: RouterProcess, wanted: str) -> None:
    async with timeout(60):
        while True:
            if (await request(router.port, PATH)).json["policy"] == wanted:
                return
            await asyncio.sleep(0.02)


async def test_sighup_takes_over_what_may_change_and_a_wrong_file_changes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "emberkv.yaml"

    async with FakeEngine().serving() as engine:

        def write(**changed: object) -> None:
            section = {"engines": [{"url": engine.url}], **changed}
            file.write_text(json.dumps({"router": section}))  # JSON is YAML

        write(policy="least_load")
        async with router_process(tmp_path, config=file) as router:
            await policy_becomes(router, "least_load")
            write(policy="no_such_policy")
            os.kill(router.process.pid, signal.SIGHUP)
            await asyncio.sleep(0.3)
            assert (await request(router.port, PATH)).json["policy"] == "least_load"
            write(policy="lmetric", max_inflight_per_engine=1, retries=1)
            os.kill(router.process.pid, signal.SIGHUP)
            await policy_becomes(router, "lmetric")
            got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1]})
            assert got.status == 200
            ordered = await request(router.port, PATH, {"policy": "consistent_hash"})
            assert ordered.json["policy"] == "consistent_hash"


async def test_engines_of_the_file_come_and_go_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "emberkv.yaml"

    def write(*engines: FakeEngine) -> None:
        section = {"engines": [{"url": engine.url} for engine in engines]}
        file.write_text(json.dumps({"router": section}))

    async def engines_become(router: RouterProcess, *engines: FakeEngine) -> None:
        wanted = {(engine.url, "healthy") for engine in engines}
        async with timeout(60):
            while True:
                workers = (await request(router.port, "/workers")).json["workers"]
                if {(worker["url"], worker["state"]) for worker in workers} == wanted:
                    return
                await asyncio.sleep(0.02)

    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        write(one)
        fast = ("router.health_interval_seconds=0.1",)
        async with router_process(tmp_path, *fast, config=file) as router:
            await engines_become(router, one)
            write(one, two)
            os.kill(router.process.pid, signal.SIGHUP)
            await engines_become(router, one, two)
            one.completion = hang()
            prompt = {"model": "m", "prompt": [1]}
            waiting = []
            async with timeout(60):
                while not one.active:  # until one of them went there
                    waiting.append(
                        asyncio.ensure_future(request(router.port, "/v1/completions", prompt))
                    )
                    await asyncio.sleep(0.05)
            write(two)
            os.kill(router.process.pid, signal.SIGHUP)
            await engines_become(router, two)
            assert one.active == 1, "what it was answering goes on"
            for _ in range(4):
                got = await request(router.port, "/v1/completions", prompt)
                assert got.headers["x-emberkv-engine"] == two.url
            assert one.aborts == 0
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
