"""SIGHUP to a router process: a changed file is taken over, a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import request
from tests.helpers.router_process import RouterProcess, router_process

pytestmark = pytest.mark.process
PATH = "/admin/policy"


async def policy_becomes(router: RouterProcess, wanted: str) -> None:
    async with timeout(20):
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
