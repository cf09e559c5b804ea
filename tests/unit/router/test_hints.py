"""What daemons are told while a request waits for its engine."""

from __future__ import annotations

import asyncio

import pytest

from client_sdk.hint_client import HintClient
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, NamespaceId, NodeId
from router.engines import EngineTable
from router.health import BreakerLimits
from router.hints import Hinter, HintLimits
from router.metrics import RouterMetrics
from tests.helpers.fake_engine import FakeEngine, hang
from tests.helpers.fake_hints import FakeHints
from tests.helpers.router_client import (
    HandIndex,
    HandNode,
    RunningRouter,
    connected,
    request,
    running_router,
)
from tests.helpers.waiting import until

SPACE = NamespaceId(b"n" * 16)
BLOCK = 4
PROMPT = list(range(400))
HASHES = block_hashes(SPACE, PROMPT, BLOCK)
BODY = {"model": "m", "prompt": PROMPT}


def two_nodes(engine: FakeEngine, daemon: str) -> HandIndex:
    """The engine's node, which has nothing, and one that has the first 60 blocks."""
    info = EngineInfo("engine-a", engine.url, "m", SPACE, BLOCK)
    here = HandNode(NodeId("a"), engines=(info,), grpc_address=daemon)
    other = HandNode(NodeId("b"), dram=set(index_keys(HASHES[:60]).tolist()))
    return HandIndex(here, other)


async def until_counted(router: RunningRouter, outcome: str, count: int = 1) -> None:
    await until(lambda: router.counter("hints_total", outcome=outcome) == count)


async def test_daemon_is_told_what_the_estimate_fetches_for_as_long_as_the_request_lasts() -> None:
    async with FakeHints().serving() as daemon, FakeEngine().serving() as engine:
        engine.completion = hang()
        index = two_nodes(engine, daemon.address)
        async with running_router(index=index, prefetch_queue_seconds=0) as router:
            async with connected(router.port) as client:
                client.post("/v1/completions", BODY)
                await asyncio.wait_for(daemon.came.wait(), 30)
                (hint,) = daemon.hints
                assert hint.hashes == HASHES[:60]
                assert hint.request.namespace_id == SPACE
                assert hint.request.source_node_id == ""
                assert not hint.ended.is_set()
            await asyncio.wait_for(hint.ended.wait(), 30)
            await until_counted(router, "cancelled")
            await router.settled()


async def test_hint_that_is_done_costs_the_request_nothing() -> None:
    async with FakeHints().serving() as daemon, FakeEngine().serving() as engine:
        daemon.go_on.set()
        index = two_nodes(engine, daemon.address)
        async with running_router(index=index, prefetch_queue_seconds=0) as router:
            got = await request(router.port, "/v1/completions", BODY)
            assert got.status == 200
            await until(lambda: len(router.router.hinter) == 0)


async def test_no_hint_where_it_is_off_or_nothing_waits_or_nothing_is_elsewhere() -> None:
    async with FakeHints().serving() as daemon, FakeEngine().serving() as engine:
        index = two_nodes(engine, daemon.address)
        for settings in (
            {"prefetch_hints": False, "prefetch_queue_seconds": 0},
            {"prefetch_queue_seconds": 60},
        ):
            async with running_router(index=index, **settings) as router:
                assert (await request(router.port, "/v1/completions", BODY)).status == 200
        index.all[1].dram = set()
        async with running_router(index=index, prefetch_queue_seconds=0) as router:
            assert (await request(router.port, "/v1/completions", BODY)).status == 200
        assert not daemon.hints


async def test_daemon_that_is_away_is_not_asked_again_at_once() -> None:
    async with FakeHints().serving() as daemon, FakeEngine().serving() as engine:
        daemon.fails = True
        index = two_nodes(engine, daemon.address)
        async with running_router(index=index, prefetch_queue_seconds=0) as router:
            engine.completion = hang()
            async with connected(router.port) as client:
                client.post("/v1/completions", BODY)
                await until_counted(router, "failed")
            await router.settled()
            router.router.predicted.forget(engine.url)
            async with connected(router.port) as client:
                client.post("/v1/completions", BODY)
                await until_counted(router, "away")
            await router.settled()
            assert len(daemon.hints) == 1


async def test_daemon_that_says_nothing_is_left_alone_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait_for_first_answers(seconds: float) -> None:
        monkeypatch.setattr("router.hints.FIRST_ANSWER_SECONDS", seconds)

    now = 0.0
    client, metrics = HintClient(), RouterMetrics()
    limits = HintLimits(True, 0.0, 30.0)
    hinter = Hinter(client, limits, metrics, lambda: now)
    engine = EngineTable(BreakerLimits(3, 1.0), 60.0).add("http://127.0.0.1:1", 0.0)

    async def outcome() -> str:
        """Of one hint, once it is over."""
        counts = {
            sample.labels["outcome"]: sample.value
            for metric in metrics.hints.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
        with hinter.bring(engine, SPACE, HASHES) as hint:
            await asyncio.wait_for(hint.over(), 60)
        (changed,) = (
            sample.labels["outcome"]
            for metric in metrics.hints.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
            and sample.value != counts.get(sample.labels["outcome"], 0)
        )
        return changed

    async with FakeHints().serving() as daemon:
        engine.daemon_address = daemon.address
        daemon.is_stopped = True
        wait_for_first_answers(0.1)
        for pause in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            assert await outcome() == "failed"
            now += pause - 0.1
            assert await outcome() == "away", "it costs the request nothing"
            now += 0.1
        daemon.is_stopped = False
        daemon.go_on.set()
        wait_for_first_answers(60.0)
        assert await outcome() == "done"
        daemon.is_stopped = True
        daemon.go_on.clear()
        wait_for_first_answers(0.1)
        assert await outcome() == "failed", "it answered, and is asked at once"
        assert await outcome() == "away"
        now += 2.0
        assert await outcome() == "failed", "the pauses begin anew"
        await hinter.close()


async def test_daemon_that_is_no_more_is_forgotten_when_its_hints_have_ended() -> None:
    async with FakeHints().serving() as daemon, FakeEngine().serving() as engine:
        engine.completion = hang()
        index = two_nodes(engine, daemon.address)
        async with running_router(index=index, prefetch_queue_seconds=0) as router:
            client = router.router.hinter._client
            async with connected(router.port) as asking:
                asking.post("/v1/completions", BODY)
                await asyncio.wait_for(daemon.came.wait(), 30)
                (known,) = router.router.engines
                index.all[0].grpc_address = "127.0.0.1:1"
                await until(lambda: known.daemon_address == "127.0.0.1:1")
                assert client.addresses == {daemon.address}, "its hint goes on"
                assert not daemon.hints[0].ended.is_set()
            await until(lambda: not client.addresses)
            await router.settled()


async def test_node_without_a_daemon_s_address_gets_no_hint() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(index=two_nodes(engine, ""), prefetch_queue_seconds=0) as router,
    ):
        assert (await request(router.port, "/v1/completions", BODY)).status == 200
        assert router.counter("hints_total", outcome="no_daemon") == 1
