"""A router as a process finds out which of two engines is slow, and sends where it is quick."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.fake_engine import FakeEngine, FakeRequest, Script, stream
from tests.helpers.router_client import request
from tests.helpers.router_process import router_process

pytestmark = pytest.mark.process
USAGE = {
    "prompt_tokens": 2000,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0},
}
EVENTS = [
    b'data: {"choices":[{"text":"x"}]}\n\n',
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]
BODY = {"model": "m", "prompt": list(range(2000)), "stream": True}


def prefilling(seconds: float) -> Script:
    async def script(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(seconds)
        return await stream(EVENTS)(request, writer)

    return script


async def test_a_slow_engine_is_found_slow_and_avoided(tmp_path: Path) -> None:
    async with FakeEngine().serving() as quick, FakeEngine().serving() as slow:
        quick.completion, slow.completion = prefilling(0.0), prefilling(1.0)
        engines = f"router.engines=[{{url: '{quick.url}'}}, {{url: '{slow.url}'}}]"
        async with router_process(tmp_path, engines) as router:

            async def ask() -> str:
                got = await request(router.port, "/v1/completions", BODY)
                assert got.status == 200
                return got.headers["x-emberkv-engine"]

            # Bursts, so that both engines are asked before anything is known of them.
            async with timeout(150):
                while True:
                    await asyncio.gather(*(ask() for _ in range(6)))
                    shown = (await request(router.port, "/route/explain", BODY)).json
                    samples = [item["speeds"]["samples"]["prefill"] for item in shown["engines"]]
                    known = {
                        item["url"]: item["speeds"]["prefill_tokens_per_second"]
                        for item in shown["engines"]
                    }
                    if min(samples) >= 6 and known[slow.url] < known[quick.url] / 2:
                        break
            assert [await ask() for _ in range(5)] == [quick.url] * 5
