"""Prefill on one engine, decode on another: what each is sent, and what happens when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import EngineInfo, NamespaceId, NodeId
from router.remote_prefill import one_token
from store_daemon.hint_server import MAX_HINT_SECONDS
from tests.helpers.fake_engine import (
    COMPLETION,
    FakeEngine,
    FakeRequest,
    answer,
    hang,
    raw_then_die,
)
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
PROMPT = list(range(401))
HASHES = block_hashes(SPACE, PROMPT, BLOCK)
BODY: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 50}


@dataclass
class Site:
    """A prefill engine on node p, a decode engine on node d, and d's daemon."""

    prefill: FakeEngine
    decode: FakeEngine
    daemon: FakeHints
    nodes: list[HandNode]
    router: RunningRouter

    def count(self, outcome: str) -> float:
        return self.router.counter("remote_prefills_total", outcome=outcome)

    def decided(self, decided: str) -> float:
        return self.router.counter("splits_total", decided=decided)


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(handover_seconds=5.0) as site:
        yield site


@asynccontextmanager
async def running_site(**settings: Any) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(FakeEngine().serving())
        decode = await stack.enter_async_context(FakeEngine().serving())
        daemon = await stack.enter_async_context(FakeHints().serving())
        infos = [
            EngineInfo(name, engine.url, "m", SPACE, BLOCK, role=name)
            for name, engine in (("prefill", prefill), ("decode", decode))
        ]
        nodes = [
            HandNode(NodeId("p"), engines=(infos[0],), grpc_address="127.0.0.1:1"),
            HandNode(NodeId("d"), engines=(infos[1],), grpc_address=daemon.address),
        ]
        router = await stack.enter_async_context(
            running_router(
                index=HandIndex(*nodes),
                remote_prefill_tokens=100,
                prefetch_hints=False,
                **settings,
            )
        )
        yield Site(prefill, decode, daemon, nodes, router)


async def test_where_only_prefill_engines_are_left_they_answer(site: Site) -> None:
    table = site.router.router.engines
    assert [engine.role for engine in table.serving("m")] == ["decode"]
    for engine in table:
        if engine.role == "decode":
            table.remove(engine.url)
            site.nodes[1].engines = ()
            break
    assert (await request(site.router.port, "/v1/completions", BODY)).status == 200
    assert len(site.prefill.requests) == 1
    assert site.prefill.requests[0].json["max_tokens"] == 50, "the whole answer"
    table.check_integrity()


def test_prefill_engine_is_asked_for_one_token_of_the_same_prompt() -> None:
    body = {
        **BODY,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "max_completion_tokens": 9,
        "cache_salt": "s",
    }
    assert one_token(body) == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "cache_salt": "s",
    }


async def test_blocks_are_followed_to_the_decode_node_while_the_prompt_is_prefilled(
    site: Site,
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    whole = answer(COMPLETION)

    async def slowly(got: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        begun.set()
        await go_on.wait()
        return await whole(got, writer)

    site.prefill.completion = slowly
    site.daemon.readable = len(HASHES)
    async with connected(site.router.port) as client:
        client.post("/v1/completions", BODY)
        await asyncio.wait_for(begun.wait(), 30)
        await asyncio.wait_for(site.daemon.came.wait(), 30)
        (hint,) = site.daemon.hints
        assert hint.hashes == HASHES
        assert hint.request.source_node_id == "p"
        assert 5.0 < hint.request.patience_seconds < 6.0, "the setting and the estimated prefill"
        assert not site.decode.requests
        site.daemon.go_on.set()
        go_on.set()
        got = await client.read()
    assert (got.status, got.headers["x-emberkv-engine"]) == (200, "decode")
    assert got.headers["x-emberkv-hit-tokens"] == "400"
    assert site.prefill.requests[0].json == one_token(BODY)
    assert site.decode.requests[0].json == BODY
    assert (site.decided("remote"), site.count("done")) == (1, 1)
    blocks = [site.router.counter("handover_blocks_total", when=w) for w in ("during", "after")]
    assert sum(blocks) == 100
    await site.router.settled()


async def test_prompt_with_little_left_is_prefilled_by_the_decode_engine(site: Site) -> None:
    body = {**BODY, "prompt": PROMPT[:80]}
    assert (await request(site.router.port, "/v1/completions", body)).status == 200
    assert not site.prefill.requests
    assert site.decided("short") == 1


async def test_prefill_engine_that_dies_costs_no_error(site: Site) -> None:
    die = raw_then_die(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nab")

    async def die_on_the_way(got: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await site.daemon.came.wait()
        return await die(got, writer)

    site.prefill.completion = die_on_the_way
    got = await request(site.router.port, "/v1/completions", BODY)
    assert (got.status, got.headers["x-emberkv-engine"]) == (200, "decode")
    assert site.count("failed") == 1
    (hint,) = site.daemon.hints
    await asyncio.wait_for(hint.ended.wait(), 30)
    await site.router.settled()


async def test_prefill_engine_that_refuses_costs_no_error(site: Site) -> None:
    site.prefill.completion = answer({"error": {"message": "too long"}}, 400)
    assert (await request(site.router.port, "/v1/completions", BODY)).status == 200
    assert site.count("refused") == 1
    await site.router.settled()


async def test_prefill_engine_that_keeps_failing_is_asked_no_more() -> None:
    async with running_site(handover_seconds=5.0, breaker_open_seconds=60.0) as site:
        site.prefill.completion = answer({"error": {"message": "overloaded"}}, 503)
        for number in range(10):
            body = {**BODY, "prompt": [number, *PROMPT]}
            assert (await request(site.router.port, "/v1/completions", body)).status == 200
        assert site.decided("no_engine") >= 5
        await site.router.settled()


async def test_prefill_engine_whose_answer_is_garbage_costs_no_error(site: Site) -> None:
    site.daemon.go_on.set()
    usage = {"prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": 1 << 80}}
    answers: list[Any] = [[], {"usage": []}, {"usage": usage}]
    for said in answers:
        site.prefill.completion = answer(said)
        got = await request(site.router.port, "/v1/completions", BODY)
        assert (got.status, got.headers["x-emberkv-engine"]) == (200, "decode")
    await site.router.settled()


async def test_prefill_engine_that_stops_when_all_blocks_came_is_waited_for_shortly() -> None:
    async with running_site(handover_seconds=0.2) as site:
        site.prefill.completion = hang()
        site.daemon.readable = len(HASHES)
        site.daemon.go_on.set()
        got = await request(site.router.port, "/v1/completions", BODY)
        assert (got.status, got.headers["x-emberkv-hit-tokens"]) == (200, "400")
        assert site.count("unanswered") == 1
        await asyncio.wait_for(site.prefill.aborted.wait(), 30)
        await site.router.settled()


async def test_blocks_that_leave_the_decode_node_again_cost_no_error(site: Site) -> None:
    whole = answer(COMPLETION)

    async def when_some_came(got: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await site.daemon.came.wait()
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_later(0.2, site.daemon.go_on.set)
        return await whole(got, writer)

    site.prefill.completion = when_some_came
    site.daemon.readable_at_first, site.daemon.readable = 60, 10
    got = await request(site.router.port, "/v1/completions", BODY)
    assert (got.status, got.headers["x-emberkv-hit-tokens"]) == (200, "40")
    assert site.router.counter("handover_blocks_total", when="during") == 60
    assert site.router.counter("handover_blocks_total", when="after") == 0
    await site.router.settled()


async def test_daemon_that_claims_more_blocks_than_the_chain_has_is_not_believed(
    site: Site,
) -> None:
    site.daemon.readable = 1 << 30
    site.daemon.go_on.set()
    got = await request(site.router.port, "/v1/completions", BODY)
    assert (got.status, got.headers["x-emberkv-hit-tokens"]) == (200, "400")


async def test_prefill_is_given_up_when_its_blocks_cannot_reach_the_decode_node(
    site: Site,
) -> None:
    site.prefill.completion = hang()
    site.daemon.fails = True
    got = await request(site.router.port, "/v1/completions", BODY)
    assert (got.status, got.headers["x-emberkv-engine"]) == (200, "decode")
    assert site.count("cut") == 1
    await asyncio.wait_for(site.prefill.aborted.wait(), 30)
    await site.router.settled()


async def test_client_that_goes_away_ends_prefill_and_handover(site: Site) -> None:
    site.prefill.completion = hang()
    async with connected(site.router.port) as client:
        client.post("/v1/completions", BODY)
        await asyncio.wait_for(site.daemon.came.wait(), 30)
    await asyncio.wait_for(site.prefill.aborted.wait(), 30)
    await asyncio.wait_for(site.daemon.hints[0].ended.wait(), 30)
    await site.router.settled()
    assert not site.decode.requests


async def test_engines_on_one_node_need_no_handover(site: Site) -> None:
    site.nodes[1].engines = (*site.nodes[1].engines, *site.nodes[0].engines)
    site.nodes[0].engines = ()
    engines = site.router.router.engines
    await until(lambda: {engine.node_id for engine in engines} == {"d"})
    got = await request(site.router.port, "/v1/completions", BODY)
    assert (got.status, got.headers["x-emberkv-hit-tokens"]) == (200, "400")
    assert len(site.prefill.requests) == 1
    assert not site.daemon.hints


async def test_daemon_is_not_asked_for_longer_than_it_takes() -> None:
    async with running_site(response_seconds=900.0) as site:
        site.daemon.go_on.set()
        assert (await request(site.router.port, "/v1/completions", BODY)).status == 200
        (hint,) = site.daemon.hints
        assert hint.request.deadline_seconds == MAX_HINT_SECONDS
