"""What passes through untouched, HEAD, endpoints whose prompts are not read, retries' budget."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from client_sdk.aio import timeout
from router.http_message import Request
from router.request_body import RequestBody
from router.retry_budget import RetryBudget
from router.sessions import Session, Sessions, session_of
from tests.helpers.fake_engine import FakeEngine, answer, hang, raw_then_die
from tests.helpers.router_client import connected, request, running_router

UNREAD = ["/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score"]


async def test_head_is_answered_as_get_without_its_body() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            for path, status in (("/health", 200), ("/v1/completions", 405), ("/none", 404)):
                client.send(f"HEAD {path} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
                got = await client.read_head()
                assert got.status == status
                assert int(got.headers["content-length"]) > 0
            client.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (await client.read()).json["status"] == "ok", "a body of a HEAD was sent"
        async with connected(router.port) as client:
            client.send(b"HEAD /health HTTP/1.1\r\nExpect: tea\r\n\r\n")
            assert (await client.read_head()).status == 417
            assert await client.is_closed(), "a refused HEAD had a body"


async def test_what_engines_and_traces_need_passes_and_what_is_of_a_connection_does_not() -> None:
    sent = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "vendor=1",
        "baggage": "user=2",
        "x-request-id": "mine",
        "X-Own": "kept",
        "Connection": "x-hop",
        "x-hop": "dropped",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Proxy-Authorization": "secret",
    }
    body = {
        "model": "m",
        "prompt": [1, 2],
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    }
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(router.port, "/v1/completions", body, sent)
        assert got.status == 200
        assert got.headers["x-request-id"] == "mine"
        (asked,) = engine.requests
        assert asked.json == body
        for name in ("traceparent", "tracestate", "baggage", "x-request-id", "x-own"):
            assert asked.headers[name] == sent.get(name, "kept")
        assert not {"x-hop", "keep-alive", "te", "proxy-authorization"} & set(asked.headers)


@pytest.mark.parametrize("path", UNREAD)
async def test_endpoints_whose_prompts_are_not_read_are_forwarded_and_counted(path: str) -> None:
    body = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(router.port, path, body)
        assert got.status == 200
        assert engine.requests[0].target == path
        assert engine.tokenize_calls == 0
        assert router.counter("no_token_requests_total", why="other_body") == 1


async def test_a_session_goes_back_to_its_engine_until_that_is_busy() -> None:
    long = "so it began. " * 4000
    body = {"model": "m", "input": long}
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        engines = {one.url: one, two.url: two}
        async with running_router(one.url, two.url, seed=4, max_inflight_per_engine=1) as router:
            header = {"x-session-id": "s"}
            first = (await request(router.port, "/v1/responses", body, header)).headers
            for _ in range(6):
                got = await request(router.port, "/v1/responses", body, header)
                assert got.headers["x-emberkv-engine"] == first["x-emberkv-engine"]
            own = engines[first["x-emberkv-engine"]]
            own.completion = hang()
            async with connected(router.port) as client:
                client.post("/v1/responses", body, header)
                await _until_active(1, own)
                got = await request(router.port, "/v1/responses", body, header)
                assert got.headers["x-emberkv-engine"] != first["x-emberkv-engine"]
            await router.settled()


async def _until_active(count: int, *engines: FakeEngine) -> None:
    async with timeout(60):
        while sum(engine.active for engine in engines) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_sixteen_cold_beginnings_are_spread_over_idle_engines() -> None:
    engines = [FakeEngine() for _ in range(4)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.completion = hang()
            await stack.enter_async_context(engine.serving())
        urls = [engine.url for engine in engines]
        router = await stack.enter_async_context(running_router(*urls))
        prompts = [list(range(1000 * n, 1000 * n + 500)) for n in range(16)]
        tasks = [
            asyncio.ensure_future(
                request(router.port, "/v1/completions", {"model": "m", "prompt": prompt})
            )
            for prompt in prompts
        ]
        try:
            await _until_active(16, *engines)
            assert [engine.active for engine in engines] == [4, 4, 4, 4]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await router.settled()


async def test_when_all_engines_fail_retries_end_with_their_budget() -> None:
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        for engine in (one, two):
            engine.completion = raw_then_die(b"")
        async with running_router(
            one.url, two.url, retry_share=0.0, breaker_failures=100_000
        ) as router:
            for _ in range(130):
                got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1]})
                assert got.status == 502
            assert router.counter("retries_denied_total") == 30
            assert router.counter("retries_total", why="ClosedEarlyError") == 100
            one.completion = two.completion = answer({"ok": True})
            got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1]})
            assert got.status == 200


def test_a_budget_fills_by_its_share_up_to_its_burst() -> None:
    budget = RetryBudget(0.5, 2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.requested()
    assert not budget.take()
    budget.requested()
    assert budget.take()
    for _ in range(100):
        budget.requested()
    budget.check_integrity()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def asked(headers: list[tuple[bytes, bytes]]) -> Request:
    return Request("POST", "/", b"/", headers, b"", "1.1", True)


def test_sessions_are_told_apart_by_name_beginning_model_and_salt() -> None:
    plain = RequestBody.of(model="m", messages=[{"role": "user", "content": "a" * 600}])
    longer = RequestBody.of(
        model="m", messages=[{"role": "user", "content": "a" * 600}, {"role": "user"}]
    )
    named = asked([(b"x-session-id", b"s")])
    assert session_of(asked([]), plain) == session_of(asked([]), longer)
    found = [
        session_of(asked([]), plain),
        session_of(named, plain),
        session_of(named, RequestBody.of(model="n")),
        session_of(named, RequestBody.of(model="m", cache_salt="x")),
        session_of(asked([]), RequestBody.of(model="m", user="s")),
    ]
    assert len(set(found)) == len(found)
    assert None not in found
    assert session_of(asked([]), RequestBody.of(model="m")) is None


def test_sessions_are_bounded_grow_old_and_go_with_their_engine() -> None:
    sessions = Sessions(3, 10.0)
    keys = [Session(b"%d" % number) for number in range(5)]
    for number, key in enumerate(keys):
        sessions.note(key, "a", 10 * number, float(number))
        sessions.check_integrity()
    assert [sessions.engine_of(key, 5.0) for key in keys] == ["", "", "a", "a", "a"]
    assert sessions.held_tokens(keys[4], "a", 5.0) == 40
    assert sessions.held_tokens(keys[4], "b", 5.0) == 0
    assert sessions.engine_of(keys[2], 12.5) == ""
    sessions.note(keys[3], "b", 1, 6.0)
    sessions.forget("a")
    assert [sessions.engine_of(key, 7.0) for key in keys] == ["", "", "", "b", ""]
    sessions.check_integrity()
