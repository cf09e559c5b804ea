"""The way of a request by callbacks: what has to wait, who leaves when, what nobody foresaw."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.relay import Relay
from router.trip import Trip
from router.upstream import UpstreamConnection
from tests.helpers.fake_engine import FakeEngine, answer, hang, stream
from tests.helpers.router_client import (
    SETTLE_SECONDS,
    HandIndex,
    RunningRouter,
    connected,
    request,
    running_router,
)

PATH = "/v1/completions"
PROMPT = {"model": "m", "prompt": [1, 2, 3]}


async def until(router: RunningRouter, name: str, value: float, **labels: str) -> None:
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while router.counter(name, **labels) < value:
        assert asyncio.get_running_loop().time() < deadline, f"{name} never became {value}"
        await asyncio.sleep(0.01)


async def inflight(router: RunningRouter, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while router.inflight() != count:
        assert asyncio.get_running_loop().time() < deadline, f"never {count} in flight"
        await asyncio.sleep(0.01)


async def test_an_index_that_has_to_be_waited_for_is_waited_for() -> None:
    index = HandIndex()
    index.is_far = True
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, index=index) as router,
        connected(router.port) as client,
    ):
        for _ in range(3):
            client.post(PATH, PROMPT)
            assert (await client.read()).status == 200
        await router.settled()
        assert router.counter("requests_total", engine=engine.url, status="200") == 3


async def test_who_leaves_before_there_is_a_connection_asks_nothing_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        pool, gate = router.router.pool, asyncio.Event()
        pool.close_idle(engine.url)
        connect = pool._connect

        async def slowly(engine: object) -> UpstreamConnection:
            await asyncio.wait_for(gate.wait(), SETTLE_SECONDS)
            return await connect(engine)  # type: ignore[arg-type]

        monkeypatch.setattr(pool, "_connect", slowly)
        async with connected(router.port) as client:
            client.post(PATH, PROMPT)
            await inflight(router, 1)
        await router.settled()
        gate.set()
        assert (await request(router.port, PATH, PROMPT)).status == 200
        assert len(engine.requests) == 1


async def test_what_nobody_foresaw_is_a_500_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):

        def broken(*_: object, **__: object) -> bytes:
            raise RuntimeError("unforeseen")

        with monkeypatch.context() as patch:
            patch.setattr("router.trip.client_head", broken)
            client.post(PATH, PROMPT)
            assert (await client.read()).status == 500
        with monkeypatch.context() as patch:
            patch.setattr("router.trip.upstream_request", broken)
            client.post(PATH, PROMPT)
            assert (await client.read()).status == 500
        with monkeypatch.context() as patch:
            patch.setattr("router.trip.count_hits", broken)
            client.post(PATH, PROMPT)
            assert (await client.read()).status == 200
            assert await client.is_closed()
        assert router.inflight() == 0
        assert (await request(router.port, PATH, PROMPT)).status == 200


async def test_pipelined_requests_that_are_left_reach_no_engine() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = hang()
        async with connected(router.port) as client:
            for _ in range(3):
                client.post(PATH, PROMPT)
            await engine.was_asked()
        await until(router, "aborts_total", 1)
        await router.settled()
        await asyncio.wait_for(engine.aborted.wait(), SETTLE_SECONDS)
        assert len(engine.requests) == 1


async def test_an_answer_that_ends_after_its_client_left_is_nobodys() -> None:
    """Head and half of a body, then the client leaves: the connection is not pooled."""
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = hang(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        async with connected(router.port) as client:
            client.post(PATH, PROMPT)
            assert (await client.read_head()).status == 200
        await router.settled()
        await asyncio.wait_for(engine.aborted.wait(), SETTLE_SECONDS)


async def test_trips_are_gone_without_the_garbage_collector() -> None:
    """It hardly ever runs in a router: what a request leaves behind would stay for long."""
    index = HandIndex()
    async with FakeEngine().serving() as engine, running_router(engine.url, index=index) as router:
        gc.collect()
        gc.disable()
        try:
            async with connected(router.port) as client:
                for body, status in ((PROMPT, 200), (b"[]", 400), ({"model": "other"}, 404)):
                    client.post(PATH, body)
                    assert (await client.read()).status == status
                index.is_far = True
                client.post(PATH, PROMPT)
                assert (await client.read()).status == 200
                for script, status in ((answer({}, 500), 500), (stream([b"data: 1\n\n"]), 200)):
                    engine.completion = script
                    client.post(PATH, PROMPT)
                    assert (await client.read()).status == status
                engine.completion = hang()
                client.post(PATH, PROMPT)
                await inflight(router, 1)
            await router.settled()
            assert not [thing for thing in gc.get_objects() if type(thing) in (Trip, Relay)]
        finally:
            gc.enable()
