"""A real Envoy with deploy/envoy/envoy.yaml before real sockets: modes, fallback, aborts, 429."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.types import EngineInfo, NamespaceId, NodeId
from tests.helpers.envoy import configuration, envoy_binary, running_envoy
from tests.helpers.fake_engine import COMPLETION, SSE_HEAD, FakeEngine, chunk, hang, stream
from tests.helpers.router_client import (
    HandIndex,
    HandNode,
    RunningRouter,
    connected,
    request,
    running_router,
)
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        envoy_binary() is None,
        reason="NO ENVOY HERE: nothing of this file was tested; run `make test-envoy`",
    ),
]

DUPLEX = "FULL_DUPLEX_STREAMED"
MODES: Mapping[str, Mapping[str, str]] = {
    "as in the file": {},
    "head": {"request_body_mode": "NONE"},
    "buffered, watched": {"response_body_mode": "STREAMED"},
    "duplex": {"request_body_mode": DUPLEX, "request_trailer_mode": "SEND"},
    "duplex both ways": {
        "request_body_mode": DUPLEX,
        "request_trailer_mode": "SEND",
        "response_body_mode": DUPLEX,
    },
}
JSON = {"Content-Type": "application/json"}
PROMPT = {"model": "m", "prompt": [1, 2, 3]}
STREAM = {**PROMPT, "stream": True}
EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(5)] + [b"data: [DONE]\n\n"]


async def free(router: RunningRouter) -> None:
    """Wait until no stream and no charge is left."""
    await until(lambda: not router.inflight() and not router.router.ext_proc.streams)


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_routes_streams_and_aborts(mode: str, tmp_path: Path) -> None:
    big = {"model": "m", "prompt": list(range(40_000))}
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, ext_proc_port=0) as router,
    ):
        config = configuration(router.router.ext_proc_port, [a.port, b.port], MODES[mode])
        async with running_envoy(tmp_path, config) as envoy:
            # A client cannot say where it goes.
            wish = {**JSON, "x-gateway-destination-endpoint": "192.0.2.1:80"}
            for body in (PROMPT, big):
                got = await request(envoy.port, "/v1/completions", body, wish)
                assert (got.status, got.json) == (200, COMPLETION), got
                assert got.headers["x-emberkv-engine"] in (a.url, b.url)
                await free(router)
            requests = a.requests + b.requests
            assert [item.json for item in requests] in ([PROMPT, big], [big, PROMPT])
            if MODES[mode].get("response_body_mode"):
                assert router.counter("delivered_hit_tokens_total", source="all") == 16

            for engine in (a, b):
                engine.completion = stream(EVENTS, pause_seconds=0.05)
            async with connected(envoy.port) as client:
                client.post("/v1/completions", STREAM, JSON)
                head = await client.read_head()
                assert head.headers["content-type"] == "text/event-stream"
                assert head.headers["x-engine-own"] == "kept"
                for event in EVENTS:  # each as soon as it was sent, before the next one was
                    wanted = chunk(event)
                    assert (
                        await asyncio.wait_for(client.reader.readexactly(len(wanted)), 30) == wanted
                    )
                assert await client.reader.readexactly(5) == b"0\r\n\r\n"
            await free(router)

            for sent in (b"", SSE_HEAD + chunk(EVENTS[0])):
                for engine in (a, b):
                    engine.completion = hang(sent)
                    engine.aborted.clear()
                async with connected(envoy.port) as client:
                    client.post("/v1/completions", STREAM, JSON)
                    await until(lambda: a.active + b.active > 0)
                    if sent:
                        await client.read_head()
                    assert router.inflight() == 1
                aborts = [asyncio.ensure_future(engine.aborted.wait()) for engine in (a, b)]
                done, rest = await asyncio.wait(aborts, timeout=30, return_when="FIRST_COMPLETED")
                assert done, "the engine works on for nobody"
                for waiting in rest:
                    waiting.cancel()
                await free(router)


async def test_envoy_goes_down_the_list_when_an_engine_is_dead(tmp_path: Path) -> None:
    slow = {"health_interval_seconds": 600}  # the router does not notice by itself
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, ext_proc_port=0, **slow) as router,
    ):
        config = configuration(router.router.ext_proc_port, [a.port, b.port], {})
        async with running_envoy(tmp_path, config) as envoy:
            await a.stop()
            for _ in range(12):
                got = await request(envoy.port, "/v1/completions", PROMPT, JSON)
                assert got.status == 200
                assert got.headers["x-emberkv-engine"] == b.url
                await free(router)
            assert len(b.requests) == 12
            # Envoy told who answered, so the breaker opened and the rest went there at once.
            assert router.counter("retries_total", why="envoy") == 3
            told = {"engine": a.url, "kind": "passed_over"}
            assert router.counter("upstream_errors_total", **told) == 3
        await a.start()


async def test_a_full_fleet_answers_429_and_an_empty_one_503(tmp_path: Path) -> None:
    limits = {"max_inflight_per_engine": 1, "queue_requests": 0}
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, **limits) as router,
    ):
        config = configuration(router.router.ext_proc_port, [a.port], {})
        async with running_envoy(tmp_path, config) as envoy:
            a.completion = hang(SSE_HEAD)
            async with connected(envoy.port) as client:
                client.post("/v1/completions", STREAM, JSON)
                await client.read_head()
                got = await request(envoy.port, "/v1/completions", PROMPT, JSON)
                assert got.status == 429
                assert int(got.headers["retry-after"]) >= 1
                assert got.json["error"]["type"] == "rate_limit_error"
            await free(router)
            router.router.engines.get(a.url).health.refused(router.router.ledger.now())  # type: ignore[union-attr]
            got = await request(envoy.port, "/v1/completions", PROMPT, JSON)
            assert (got.status, got.json["error"]["type"]) == (503, "service_unavailable")
            await free(router)


async def test_a_burst_of_streams_and_disconnects_leaves_nothing_behind(tmp_path: Path) -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, ext_proc_port=0) as router,
    ):
        for engine in (a, b):
            engine.completion = stream(EVENTS, pause_seconds=0.02)

        async def one(number: int) -> int:
            async with connected(envoy.port) as client:
                client.post("/v1/completions", STREAM, JSON)
                if number % 4 == 0:
                    await asyncio.sleep(0.002 * (number % 60))
                    return 0  # gone, at some moment
                return (await client.read()).status

        mode = {"request_body_mode": DUPLEX, "request_trailer_mode": "SEND"}
        config = configuration(router.router.ext_proc_port, [a.port, b.port], mode)
        async with running_envoy(tmp_path, config) as envoy:
            for _ in range(4):
                statuses = await asyncio.gather(*map(one, range(60)))
                assert sorted(set(statuses)) == [0, 200]
            await free(router)
            assert min(len(a.requests), len(b.requests)) > 40
            assert router.counter("ext_proc_errors_total", kind="internal") == 0


async def test_prompts_reach_the_engine_that_holds_them(tmp_path: Path) -> None:
    """The choice is the router's own: what it predicts by the body counts behind Envoy too."""
    namespace = NamespaceId(bytes(32))
    async with FakeEngine().serving() as a, FakeEngine().serving() as b:
        nodes = [
            HandNode(NodeId(node), engines=(EngineInfo(node, engine.url, "m", namespace, 16),))
            for node, engine in (("na", a), ("nb", b))
        ]
        async with running_router(index=HandIndex(*nodes), ext_proc_port=0) as router:
            config = configuration(router.router.ext_proc_port, [a.port, b.port], {})
            async with running_envoy(tmp_path, config) as envoy:
                prompt = {"model": "m", "prompt": list(range(512))}
                explained: list[Any] = []
                for _ in range(6):
                    got = await request(envoy.port, "/v1/completions", prompt, JSON)
                    explained.append(
                        (got.headers["x-emberkv-engine"], got.headers["x-emberkv-hit-tokens"])
                    )
                    await free(router)
                assert len({engine for engine, _ in explained}) == 1
                assert [hit for _, hit in explained] == ["0"] + ["512"] * 5
                assert json.loads((a.requests + b.requests)[0].body) == prompt
