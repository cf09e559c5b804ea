"""Real engines behind the router, one of them stopped in the middle of a stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.router_client import RunningRouter, connected, request, running_router
from tests.helpers.torch_engine_process import TorchEngineProcess
from tests.helpers.waiting import until

pytestmark = pytest.mark.process
PATH = "/v1/completions"
PROMPT = list(range(20, 40))
LONG = {"max_model_len": 20_000, "num_blocks": 6000}
STREAM = {"model": "ember-tiny", "prompt": PROMPT, "max_tokens": 15_000, "stream": True}
SHORT = {"model": "ember-tiny", "prompt": PROMPT, "max_tokens": 2}


def is_healthy(running: RunningRouter, engine: TorchEngineProcess) -> bool:
    return any(e.url == engine.url and e.health.is_healthy for e in running.router.engines)


async def test_a_stream_whose_engine_stops_ends_in_an_error_and_the_other_engine_serves_on(
    tmp_path: Path,
) -> None:
    with (
        TorchEngineProcess(tmp_path, "engine-a", LONG) as first,
        TorchEngineProcess(tmp_path, "engine-b", LONG) as second,
    ):
        async with running_router(first.url, second.url, idle_seconds=1.0) as running:
            await until(lambda: is_healthy(running, first) and is_healthy(running, second))
            async with connected(running.port) as client, timeout(150):
                client.post(PATH, STREAM)
                await client.reader.readuntil(b"data: ")
                workers = (await request(running.port, "/workers")).json["workers"]
                (busy,) = [w["url"] for w in workers if w["load"]["active_requests"]]
                stopped = first if busy == first.url else second
                stopped.pause()
                try:
                    rest = await client.reader.read()
                    assert b"upstream_error" in rest
                    assert b"[DONE]" not in rest
                    await running.settled()
                    await until(lambda: not is_healthy(running, stopped))
                    for _ in range(3):
                        assert (await request(running.port, PATH, SHORT)).status == 200
                finally:
                    stopped.resume()
            await until(lambda: is_healthy(running, stopped))
            # Its stream was given up, so it has room and time for others.
            answer = await asyncio.to_thread(stopped.complete, PROMPT)
            assert answer["usage"]["completion_tokens"] == 1
