"""The proxy against engines over real sockets: bytes, timing, disconnects, retries."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from router.hints import Hinter
from tests.helpers.fake_engine import (
    COMPLETION,
    SSE_HEAD,
    FakeEngine,
    FakeRequest,
    answer,
    chunk,
    hang,
    raw_then_die,
    response,
    stream,
)
from tests.helpers.ports import refusing_port
from tests.helpers.router_client import (
    HandIndex,
    RunningRouter,
    connected,
    http_post,
    request,
    running_router,
    until_status,
)
from tests.helpers.waiting import until

EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(5)] + [b"data: [DONE]\n\n"]
PROMPT = {"model": "m", "prompt": [1, 2, 3]}


async def test_a_completion_passes_through_with_its_headers_both_ways() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(
            router.port,
            "/v1/completions?a=1",
            PROMPT,
            {
                "X-Request-Id": "r7",
                "Traceparent": "00-abc-01",
                "Connection": "x-gone",
                "X-Gone": "1",
            },
        )
        assert got.status == 200
        assert got.body == json.dumps(COMPLETION).encode()
        assert got.headers["x-emberkv-engine"] == engine.url
        assert got.headers["x-emberkv-hit-tokens"] == "0"
        assert got.headers["x-request-id"] == "r7"
        seen = engine.requests[0]
        assert seen.target == "/v1/completions?a=1"
        assert seen.body == json.dumps(PROMPT).encode()
        assert seen.headers["x-request-id"] == "r7"
        assert seen.headers["traceparent"] == "00-abc-01"
        assert "x-gone" not in seen.headers
        assert seen.headers["host"] == f"127.0.0.1:{engine.port}"
        assert router.counter("delivered_hit_tokens_total", source="all") == 8
        assert router.counter("delivered_hit_tokens_total", source="ssd") == 2
        assert router.counter("requests_total", engine=engine.url, status="200") == 1


async def test_what_a_router_behind_the_router_says_of_its_choice_is_replaced() -> None:
    async def inner(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        said = "X-EmberKV-Engine: inner\r\nX-EmberKV-Hit-Tokens: 5\r\nX-Request-Id: kept\r\n"
        writer.write(response(200, b"{}", said))
        return True

    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = inner
        got = await request(router.port, "/v1/completions", PROMPT)
        assert got.headers["x-emberkv-engine"] == engine.url
        assert got.headers["x-emberkv-hit-tokens"] == "0"
        assert got.headers["x-request-id"] == "kept"


async def test_a_request_id_is_made_where_none_came() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(router.port, "/v1/completions", PROMPT)
        assert len(got.headers["x-request-id"]) == 32
        assert engine.requests[0].headers["x-request-id"] == got.headers["x-request-id"]


async def test_a_stream_passes_byte_for_byte_and_chunk_by_chunk() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        has_come = asyncio.Semaphore(1)

        async def one_by_one(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
            """No event before the client has the one before it."""
            writer.write(SSE_HEAD)
            for event in EVENTS:
                await has_come.acquire()
                writer.write(chunk(event))
            writer.write(b"0\r\n\r\n")
            return True

        engine.completion = one_by_one
        async with connected(router.port) as client:
            client.post("/v1/chat/completions", {"model": "m", "messages": [], "stream": True})
            head = await client.read_head()
            assert head.headers["content-type"] == "text/event-stream"
            assert head.headers["x-engine-own"] == "kept"
            for event in EVENTS:
                wanted = chunk(event)
                got = await asyncio.wait_for(client.reader.readexactly(len(wanted)), 30)
                assert got == wanted
                has_come.release()
            assert await client.reader.readexactly(5) == b"0\r\n\r\n"
            # The connection serves on.
            engine.completion = answer(COMPLETION)
            client.post("/v1/completions", PROMPT)
            assert (await client.read()).status == 200


async def test_cached_tokens_of_a_streams_usage_are_counted() -> None:
    usage = b"data: " + json.dumps({"choices": [], "usage": COMPLETION["usage"]}).encode() + b"\n\n"
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = stream([*EVENTS[:-1], usage, EVENTS[-1]])
        await request(router.port, "/v1/completions", PROMPT)
        await router.settled()
        assert router.counter("delivered_hit_tokens_total", source="dram") == 6


async def seconds_to_abort(router: RunningRouter, engine: FakeEngine, sent: bytes) -> float:
    """From the moment when a client hangs up in mid-request until its engine sees that."""
    asked = len(engine.requests)
    engine.completion = hang(sent)
    engine.aborted.clear()
    async with connected(router.port) as client:
        client.post("/v1/completions", PROMPT)
        await until(lambda: len(engine.requests) > asked)
        if sent:
            await client.read_head()
        assert router.inflight() == 1
    left_at = time.monotonic()
    await asyncio.wait_for(engine.aborted.wait(), 30)
    took = time.monotonic() - left_at
    await router.settled()
    return took


@pytest.mark.parametrize("sent", [b"", SSE_HEAD + chunk(EVENTS[0])])
async def test_a_client_that_goes_away_aborts_the_engine_within_100_ms(sent: bytes) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        # The quickest of some: a busy machine may hold up any of them.
        took = [await seconds_to_abort(router, engine, sent) for _ in range(10)]
        assert min(took) < 0.1, took
        assert router.counter("aborts_total") == 10
        assert engine.aborts == 10


async def test_a_client_that_goes_away_during_tokenization_is_forgotten() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.tokenize = hang()
        async with connected(router.port) as client:
            client.post("/v1/completions", {"prompt": "abc"})
            await engine.was_asked()
        await until(lambda: router.counter("aborts_total") == 1)
        assert not engine.requests


async def test_an_engine_that_refuses_is_replaced_before_the_first_byte() -> None:
    async with FakeEngine().serving() as live, FakeEngine().serving() as dying:
        async with running_router(
            live.url, dying.url, policy="round_robin", health_interval_seconds=30
        ) as router:
            await dying.stop()
            for _ in range(4):
                got = await request(router.port, "/v1/completions", PROMPT)
                assert got.status == 200
                assert got.headers["x-emberkv-engine"] == live.url
            # The first refusal opened its breaker, so it was asked at most once.
            assert router.counter("retries_total", why="RefusedError") <= 1
            assert len(live.requests) == 4
        await dying.start()


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_failing_status_is_retried_elsewhere(status: int) -> None:
    async with (
        FakeEngine().serving() as good,
        FakeEngine().serving() as bad,
        running_router(good.url, bad.url, policy="round_robin") as router,
    ):
        bad.completion = answer({"error": "x"}, status)
        for _ in range(4):
            got = await request(router.port, "/v1/completions", PROMPT)
            assert got.status == 200
            assert got.headers["x-emberkv-engine"] == good.url
        assert router.counter("retries_total", why=str(status)) == len(bad.requests) >= 1


async def test_an_engine_that_closes_before_a_response_is_retried_elsewhere() -> None:
    async with (
        FakeEngine().serving() as good,
        FakeEngine().serving() as bad,
        running_router(good.url, bad.url, policy="round_robin") as router,
    ):
        for part in (b"", b"HTTP/1.1 200 OK\r\nContent-"):
            bad.completion = raw_then_die(part)
            for _ in range(2):
                assert (await request(router.port, "/v1/completions", PROMPT)).status == 200
        assert len(bad.requests) >= 1
        assert len(good.requests) == 4


async def test_without_another_engine_the_failure_itself_is_passed_on() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = answer({"error": {"message": "sleeping"}}, 503)
        got = await request(router.port, "/v1/completions", PROMPT)
        assert got.status == 503
        assert got.json["error"]["message"] == "sleeping"
        engine.completion = raw_then_die(b"")
        got = await request(router.port, "/v1/completions", PROMPT)
        assert got.status == 502
        assert got.json["error"]["type"] == "upstream_error"


async def test_other_statuses_are_never_retried() -> None:
    async with (
        FakeEngine().serving() as one,
        FakeEngine().serving() as two,
        running_router(one.url, two.url) as router,
    ):
        for engine in (one, two):
            engine.completion = answer({"error": "mine"}, 500)
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 500
        assert len(one.requests) + len(two.requests) == 1


async def test_retries_are_bounded() -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        FakeEngine().serving() as c,
        running_router(a.url, b.url, c.url, retries=1) as router,
    ):
        for engine in (a, b, c):
            engine.completion = raw_then_die(b"")
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 502
        # One may have been asked twice, since a closed pooled connection looks stale.
        assert sum(bool(engine.requests) for engine in (a, b, c)) == 2


@pytest.mark.parametrize(
    "cut", [b"", b"20\r\ndata: {", b"20", b"5\r\nhello", b"5\r\nhello\r"], ids=str
)
async def test_a_stream_whose_engine_dies_ends_with_an_error_event_and_no_retry(cut: bytes) -> None:
    async with (
        FakeEngine().serving() as one,
        FakeEngine().serving() as two,
        running_router(one.url, two.url) as router,
    ):
        for engine in (one, two):
            engine.completion = raw_then_die(SSE_HEAD + chunk(EVENTS[0]) + cut)
        async with connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            got = await client.read()
            assert got.status == 200
            text = got.body
            assert text.startswith(EVENTS[0])
            assert b"[DONE]" not in text
            last = text.split(b"\n\ndata: ")[-1]
            assert text.endswith(b"\n\n")
            assert json.loads(last)["error"]["type"] == "upstream_error"
            assert await client.is_closed()
        assert len(one.requests) + len(two.requests) == 1
        assert (
            sum(
                router.counter("upstream_errors_total", engine=e.url, kind="DiedError")
                for e in (one, two)
            )
            == 1
        )


async def test_a_plain_body_whose_engine_dies_is_cut() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = raw_then_die(response(200, b"x" * 100)[:-50])
        async with connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            head = await client.read_head()
            assert head.headers["content-length"] == "100"
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reader.readexactly(100)
        await router.settled()


async def test_broken_framing_cuts_the_connection() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = raw_then_die(SSE_HEAD + b"zz\r\nnonsense\r\n")
        async with connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            await client.read_head()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reader.readexactly(1)


async def test_a_silent_engine_is_given_up() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, response_seconds=0.2, idle_seconds=0.2) as router,
    ):
        engine.completion = hang()
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 504
        engine.completion = hang(SSE_HEAD + chunk(EVENTS[0]))
        got = await request(router.port, "/v1/completions", PROMPT)
        assert b'"error"' in got.body
        assert engine.aborts == 2


async def test_a_pooled_connection_gone_stale_is_no_failure() -> None:
    async with FakeEngine().serving() as engine:

        async def once(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
            writer.write(response(200, b"{}"))
            return False  # closes, without having said so

        async with running_router(engine.url, health_interval_seconds=30) as router:
            engine.completion = once
            for _ in range(5):
                assert (await request(router.port, "/v1/completions", PROMPT)).status == 200
            assert router.counter("retries_total", why="ClosedEarlyError") == 0


async def test_connections_to_an_engine_are_reused() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, health_interval_seconds=30) as router,
    ):
        before = engine.connections
        for _ in range(10):
            assert (await request(router.port, "/v1/completions", PROMPT)).status == 200
        assert engine.connections - before <= 1


async def test_a_body_that_ends_by_closing_and_an_old_client() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = raw_then_die(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end"
        )
        got = await request(router.port, "/v1/completions", PROMPT)
        assert got.body == b"until the end"
        assert got.headers["connection"] == "close"
        engine.completion = stream(EVENTS)
        async with connected(router.port) as client:
            client.send(http_post("/v1/completions", PROMPT).replace(b"HTTP/1.1", b"HTTP/1.0"))
            got = await client.read()
            assert "transfer-encoding" not in got.headers
            assert got.body == b"".join(EVENTS)


async def test_a_slow_client_holds_the_engine_back() -> None:
    block = b"x" * 65536
    written = 0

    async def flood(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        nonlocal written
        writer.write(SSE_HEAD)
        for _ in range(800):  # 50 MiB
            writer.write(chunk(block))
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")
        return True

    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = flood
        async with connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            await client.read_head()
            seen = -1
            while written != seen:  # until the engine is held back
                seen = written
                await asyncio.sleep(0.3)
            assert 0 < written < 700
            left = 800 * len(chunk(block)) + 5
            while data := await asyncio.wait_for(client.reader.read(min(left, 1 << 20)), 30):
                left -= len(data)
            assert left == 0
        await router.settled()


async def test_fifty_streams_at_once_arrive_whole() -> None:
    async with (
        FakeEngine().serving() as one,
        FakeEngine().serving() as two,
        running_router(one.url, two.url) as router,
    ):
        for engine in (one, two):
            engine.completion = stream(EVENTS * 5, pause_seconds=0.01)
        results = await asyncio.gather(
            *(request(router.port, "/v1/completions", {"prompt": [i]}) for i in range(50))
        )
        assert all(got.body == b"".join(EVENTS * 5) for got in results)
        await router.settled()
        assert abs(len(one.requests) - len(two.requests)) <= 6


async def test_full_engines_answer_429_and_none_healthy_503() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_inflight_per_engine=1, queue_requests=0) as router,
    ):
        engine.completion = hang()
        async with connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            await engine.was_asked()
            got = await request(router.port, "/v1/completions", PROMPT)
            assert got.status == 429
            assert got.headers["retry-after"] == "1"
            assert len(engine.requests) == 1
        await router.settled()
    with refusing_port() as port:
        async with running_router(f"http://127.0.0.1:{port}") as router:
            got = await request(router.port, "/v1/completions", PROMPT)
            assert got.status == 503
            assert got.headers["retry-after"] == "1"
            assert (await request(router.port, "/ready")).status == 503
            assert (await request(router.port, "/health")).status == 200


async def test_an_engine_still_loading_gets_nothing_until_its_health_is_good() -> None:
    async with FakeEngine().serving() as engine:
        engine.health = answer({}, 503)
        async with running_router(engine.url) as router:
            assert (await request(router.port, "/v1/completions", PROMPT)).status == 503
            engine.health = answer({})
            await until_status(router.port, "/v1/completions", 200, PROMPT)
            engine.health = answer({}, 500)
            await until_status(router.port, "/v1/completions", 503, PROMPT)


async def test_a_host_that_cannot_be_looked_up_is_an_engine_that_refuses() -> None:
    url = "http://a..b:80"
    async with FakeEngine().serving() as engine, running_router(engine.url, url) as router:
        bad = router.router.engines.get(url)
        assert bad is not None
        assert not bad.health.is_healthy
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 200


async def test_an_engine_that_comes_back_on_its_port_serves_again() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        await engine.stop()
        await until_status(router.port, "/v1/completions", 503, PROMPT)
        await engine.start()
        await until_status(router.port, "/v1/completions", 200, PROMPT)


async def test_a_broken_index_never_fails_a_request() -> None:
    index = HandIndex()
    index.is_broken = True
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, index=index) as router,
    ):
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 200


async def test_a_hint_that_breaks_ends_its_request_and_leaves_no_charge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Hinter, decision: object) -> None:
        raise RuntimeError("unforeseen")

    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        with monkeypatch.context() as patch:
            patch.setattr(Hinter, "queued", broken)
            assert (await request(router.port, "/v1/completions", PROMPT)).status == 500
        assert router.router.ledger.total_requests() == 0
        assert (await request(router.port, "/v1/completions", PROMPT)).status == 200


async def test_draining_lets_a_stream_end_and_takes_nothing_new() -> None:
    async with FakeEngine().serving() as engine:
        engine.completion = stream(EVENTS, pause_seconds=0.1)
        async with (
            running_router(engine.url) as router,
            connected(router.port) as idle,
            connected(router.port) as client,
        ):
            client.post("/v1/completions", PROMPT)
            await client.read_head()
            draining = asyncio.ensure_future(router.router.server.drain(5.0))
            assert await idle.is_closed()
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", router.port)
            body = await client.reader.read()
            assert body.endswith(b"0\r\n\r\n")
            assert await draining == 0


async def test_draining_cuts_what_takes_too_long() -> None:
    async with FakeEngine().serving() as engine:
        engine.completion = hang(SSE_HEAD)
        async with running_router(engine.url) as router, connected(router.port) as client:
            client.post("/v1/completions", PROMPT)
            await client.read_head()
            assert await router.router.server.drain(0.1) == 1
