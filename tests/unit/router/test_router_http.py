"""The clients' side of HTTP: bodies, limits, pipelining, malformed input, own paths."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.fake_engine import (
    COMPLETION,
    SSE_HEAD,
    FakeEngine,
    FakeRequest,
    answer,
    hang,
    response,
)
from tests.helpers.router_client import connected, http_post, request, running_router

PROMPT = {"model": "m", "prompt": [1, 2, 3]}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def echo(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        number = request.json["prompt"][0]
        await asyncio.sleep(0.05 if number == 0 else 0)
        writer.write(response(200, b"%d" % number))
        return True

    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = echo
        async with connected(router.port) as client:
            posts = [http_post("/v1/completions", {"prompt": [i]}) for i in range(30)]
            client.send(
                b"".join(posts[:15]) + b"GET /health HTTP/1.1\r\n\r\n" + b"".join(posts[15:])
            )
            bodies = [(await client.read()).body for _ in range(31)]
        own = bodies.pop(15)
        assert json.loads(own)["status"] == "ok"
        assert bodies == [b"%d" % i for i in range(30)]


async def test_requests_arrive_whole_however_they_are_cut() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):
        for byte in http_post("/v1/completions", PROMPT):
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.read()).json == COMPLETION


async def test_a_chunked_body_is_read_and_sent_on_with_its_length() -> None:
    raw = json.dumps(PROMPT).encode()
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            client.send(
                b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
                + b"%x\r\n%s\r\n" % (10, raw[:10])
            )
            await asyncio.sleep(0.05)
            client.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw) - 10, raw[10:]))
            assert (await client.read()).status == 200
        assert engine.requests[0].body == raw
        assert engine.requests[0].headers["content-length"] == str(len(raw))
        assert "transfer-encoding" not in engine.requests[0].headers


async def test_a_two_megabyte_prompt_goes_through() -> None:
    body = {"model": "m", "prompt": "x" * 2_000_000}
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        assert (await request(router.port, "/v1/completions", body)).status == 200
        assert engine.requests[0].json == body


async def test_expect_100_continue_is_granted_or_refused_by_size() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    raw = json.dumps(PROMPT).encode()
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_body_bytes=1000) as router,
    ):
        async with connected(router.port) as client:
            for _ in range(2):
                client.send(head % len(raw))
                assert (await client.read_head()).status == 100
                client.send(raw)
                assert (await client.read()).status == 200
        assert "expect" not in engine.requests[0].headers
        async with connected(router.port) as client:
            client.send(head % 1001)
            assert (await client.read()).status == 413
            assert await client.is_closed()


async def test_a_body_over_the_limit_is_413_in_either_framing() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_body_bytes=1000) as router,
    ):
        async with connected(router.port) as client:
            client.send(http_post("/v1/completions", b"x" * 1001))
            assert (await client.read()).status == 413
            assert await client.is_closed()
        async with connected(router.port) as client:
            client.send(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.send(b"300\r\n" + b"x" * 0x300 + b"\r\n" + b"300\r\n" + b"x" * 0x300 + b"\r\n")
            got = await client.read()
            assert got.status == 413
            assert "1000 bytes" in got.json["error"]["message"]
        assert not engine.requests


async def test_a_head_over_the_limit_is_431_even_without_an_end() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            client.send(b"GET /health HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n")
            assert (await client.read()).status == 431
        async with connected(router.port) as client:
            client.send(b"GET /health HTTP/1.1\r\nX: ")
            for _ in range(20):
                client.send(b"a" * 8192)
                await asyncio.sleep(0.01)
            assert (await client.read()).status == 431


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxx\r\n",
    ],
)
async def test_malformed_http_is_400_and_closed_without_asking_an_engine(raw: bytes) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            client.send(raw)
            assert (await client.read()).status == 400
            assert await client.is_closed()
        assert not engine.requests


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"identity, chunked"])
async def test_a_transfer_coding_that_is_not_known_is_501(coding: bytes) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            client.send(
                b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: " + coding + b"\r\n\r\n"
            )
            assert (await client.read()).status == 501
            assert await client.is_closed()
        assert not engine.requests


async def test_an_error_waits_for_the_responses_before_it() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):
        client.send(http_post("/v1/completions", PROMPT) + b"nonsense\r\n\r\n")
        assert (await client.read()).status == 200
        assert (await client.read()).status == 400
        assert await client.is_closed()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe\x00", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_400_without_asking_an_engine(body: bytes) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            for path in ("/v1/completions", "/v1/chat/completions", "/route/explain"):
                client.send(http_post(path, body))
                got = await client.read()
                assert got.status == 400
                assert got.json["error"]["code"] == "invalid_json"
        assert not engine.requests


async def test_an_offered_upgrade_is_ignored() -> None:
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "x"}
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        async with connected(router.port) as client:
            for _ in range(2):
                client.send(http_post("/v1/completions", PROMPT, upgrade))
                assert (await client.read()).status == 200
        assert "upgrade" not in engine.requests[0].headers
        assert "http2-settings" not in engine.requests[0].headers


async def test_unknown_paths_and_methods_have_openai_style_errors() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(router.port, "/v1/nothing", {})
        assert got.status == 404
        assert set(got.json["error"]) == {"message", "type", "param", "code"}
        got = await request(router.port, "/v1/completions")
        assert got.status == 405
        assert got.headers["allow"] == "POST"
        got = await request(router.port, "/v1/completions", {"model": "other", "prompt": [1]})
        assert got.status == 404
        assert got.json["error"]["code"] == "model_not_found"


async def test_models_are_the_union_over_healthy_engines() -> None:
    async with (
        FakeEngine("m").serving() as a,
        FakeEngine("m").serving() as b,
        FakeEngine("n").serving() as c,
        running_router(a.url, b.url, c.url) as router,
    ):
        got = await request(router.port, "/v1/models")
        assert [card["id"] for card in got.json["data"]] == ["m", "n"]
        for _ in range(3):
            reply = await request(router.port, "/v1/completions", {"model": "n", "prompt": [1]})
            assert reply.headers["x-emberkv-engine"] == c.url


async def test_workers_metrics_ready_and_tokenize() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        await request(router.port, "/v1/completions", PROMPT)
        (worker,) = (await request(router.port, "/workers")).json["workers"]
        assert worker["state"] == "healthy"
        assert set(worker["load"].values()) == {0}
        assert {"active_requests", "queued_prefill_tokens"} <= worker["load"].keys()
        metrics = await request(router.port, "/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert b'emberkv_router_requests_total{engine="' in metrics.body
        assert b"emberkv_router_queue_seconds" in metrics.body
        assert (await request(router.port, "/ready")).status == 200
        got = await request(router.port, "/tokenize", {"model": "m", "prompt": "ab"})
        assert got.json == {"tokens": [97, 98]}


async def test_an_idle_connection_and_half_a_request_are_closed_in_time() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, client_idle_seconds=0.3) as router,
        connected(router.port) as idle,
        connected(router.port) as half,
        connected(router.port) as busy,
    ):
        engine.completion = hang()
        busy.send(http_post("/v1/completions", PROMPT))
        half.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\nab")
        assert await idle.is_closed()
        assert (await half.read()).status == 408
        assert router.inflight() == 1


async def test_a_request_that_comes_drop_by_drop_is_closed_in_time_too() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, client_idle_seconds=0.3) as router,
        connected(router.port) as head,
        connected(router.port) as body,
    ):
        head.send(b"GET /health HTTP/1.1\r\nX: ")
        body.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5000\r\n\r\n")

        async def drip() -> None:
            while True:
                head.send(b"a")
                body.send(b"a")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        try:
            assert (await head.read()).status == 408
            assert (await body.read()).status == 408
        finally:
            dripping.cancel()


async def test_a_client_that_stops_reading_late_in_a_stream_has_its_whole_time_from_then() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, client_idle_seconds=60) as router,
        connected(router.port) as client,
    ):
        engine.completion = hang(SSE_HEAD)
        client.post("/v1/completions", PROMPT)
        await client.read_head()
        (connection,) = router.router.server.connections
        now = asyncio.get_running_loop().time()
        connection.last_activity = now - 100  # when its request came
        connection.pause_writing()
        connection.check_idle(now + 1)
        await asyncio.sleep(0.02)
        assert router.inflight() == 1
        connection.check_idle(now + 120)
        await router.settled()


async def test_trailers_do_not_become_headers() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):
        body = json.dumps(PROMPT).encode()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nX-Own: 1\r\n\r\n"
            b"%x\r\n%s\r\n0\r\nAuthorization: forged\r\n\r\n" % (len(body), body)
        )
        assert (await client.read()).status == 200
        assert "authorization" not in engine.requests[0].headers
        assert engine.requests[0].headers["x-own"] == "1"


async def test_a_crash_of_a_route_is_500_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.completion = answer(COMPLETION)

        def broken() -> bytes:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(router.router.metrics, "render", broken)
        async with connected(router.port) as client:
            client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert (await client.read()).status == 500
            client.post("/v1/completions", PROMPT)
            assert (await client.read()).status == 200


async def test_a_long_line_of_requests_that_are_answered_at_once_is_answered() -> None:
    count = 300  # each in the call of the one before would be too deep
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):
        health = b"GET /health HTTP/1.1\r\n\r\n"
        client.send(http_post("/v1/completions", PROMPT) + health * count)
        assert (await client.read()).json == COMPLETION
        for _ in range(count):
            assert (await client.read()).json["status"] == "ok"


async def test_a_client_that_takes_no_answers_gets_none_made_until_it_does() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url) as router,
        connected(router.port) as client,
    ):
        asking = b"GET /metrics HTTP/1.1\r\n\r\n"
        client.send(asking)
        assert (await client.read()).status == 200
        (connection,) = router.router.server.connections
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        asked = 0
        while not connection._is_read_paused:
            client.send(asking * 10)
            asked += 10
            await asyncio.sleep(0)
            assert connection._transport.get_write_buffer_size() < 1_000_000
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(asked):
            assert (await client.read()).status == 200


async def test_a_refusal_takes_the_leave_to_send_a_body_with_it() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, max_body_bytes=1000) as router,
        connected(router.port) as client,
    ):
        client.send(b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n")
        client.send(b"Content-Length: 1001\r\n\r\n")
        assert (await client.read()).status == 413
        (connection,) = router.router.server.connections
        connection.pause_writing()
        connection.resume_writing()
        assert await client.reader.read() == b""


async def test_who_asks_what_is_refused_and_takes_no_answer_is_closed_in_time() -> None:
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, client_idle_seconds=60) as router,
        connected(router.port) as client,
    ):
        client.send(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await client.read()).status == 200
        (connection,) = router.router.server.connections
        connection.pause_writing()
        connection.data_received(b"GET http://a:b/ HTTP/1.1\r\n\r\n")
        connection.last_activity = now = asyncio.get_running_loop().time() - 100
        connection.data_received(b"more")
        connection.check_idle(now + 61)
        assert await client.is_closed()
