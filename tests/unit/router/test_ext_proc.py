"""The endpoint picker as an Envoy meets it, over gRPC: modes, subsets, refusals, faults."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import grpc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emberkv_proto.errors import PreflightError
from emberkv_proto.v1 import envoy_pb2 as pb
from router.ext_proc.messages import DESTINATION, PIECE_BYTES
from router.ext_proc.server import SERVICE
from router.keys import edit_keys, make_key
from tests.helpers.ext_proc import (
    POST,
    destinations,
    header_map,
    picker_at,
    request_body,
    request_head,
    response_body,
    response_head,
    set_headers,
)
from tests.helpers.fake_engine import COMPLETION, FakeEngine
from tests.helpers.router_client import RunningRouter, running_router
from tests.helpers.waiting import until

BODY = json.dumps({"model": "m", "prompt": [1, 2, 3]}).encode()
DEAD = "http://127.0.0.1:1"


def at(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


async def idle(router: RunningRouter) -> None:
    await until(lambda: not router.inflight() and not router.router.ext_proc.streams)


async def test_a_buffered_body_is_answered_with_the_engine_and_its_stand_ins_in_order() -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, DEAD, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as envoy,
    ):
        first = await envoy.ask(request_head())
        assert first.WhichOneof("response") == "request_headers"
        assert not set_headers(first)
        picked = await envoy.ask(request_body(BODY))
        assert picked.WhichOneof("response") == "request_body"
        assert sorted(destinations(picked)) == sorted([at(a), at(b)])  # the dead one is left out
        assert not picked.request_body.response.HasField("body_mutation")
        assert router.inflight() == 1
        answered = await envoy.ask(response_head(served=destinations(picked)[0]))
        assert set_headers(answered)["x-emberkv-engine"] == f"http://{destinations(picked)[0]}"
        assert set_headers(answered)["x-emberkv-hit-tokens"] == "0"
        await envoy.end()
        assert await envoy.code() is grpc.StatusCode.OK
        await idle(router)
        engine = f"http://{destinations(picked)[0]}"
        assert router.counter("requests_total", engine=engine, status="200") == 1
        assert router.counter("aborts_total") == 0


async def test_by_the_head_alone_the_choice_goes_by_load() -> None:
    async with (
        FakeEngine("m").serving() as a,
        FakeEngine("other").serving() as b,
        running_router(a.url, b.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        head = {**POST, "x-gateway-model-name": "other", "content-length": "400"}
        async with picker.stream() as envoy:
            assert destinations(await envoy.ask(request_head(head, mode="NONE"))) == [at(b)]
            assert router.router.ledger.load(b.url).queued_prefill_tokens == 100
        async with picker.stream() as envoy:
            answer = await envoy.ask(request_head(head, mode="STREAMED"))
            assert destinations(answer) == [at(b)]
            passed = await envoy.ask(request_body(BODY))
            assert passed.request_body == pb.BodyResponse()
        assert router.counter("no_token_requests_total", why="no_prompt") == 2
        await idle(router)


async def test_in_full_duplex_head_and_body_are_answered_when_the_body_is_whole() -> None:
    body = json.dumps({"model": "m", "prompt": list(range(30_000))}).encode()
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as envoy,
    ):
        duplex = "FULL_DUPLEX_STREAMED"
        await envoy.say(request_head(mode=duplex, response_mode=duplex))
        for start in range(0, len(body), 50_000):
            await envoy.say(request_body(body[start : start + 50_000], ends=False))
        assert router.inflight() == 0
        await envoy.say(request_body(b""))
        assert destinations(await envoy.hear()) == [at(a)]
        got, ends = b"", []
        while len(got) < len(body):
            piece = (await envoy.hear()).request_body.response.body_mutation.streamed_response
            assert 0 < len(piece.body) <= PIECE_BYTES
            got += piece.body
            ends.append(piece.end_of_stream)
        assert got == body
        assert ends == [False] * (len(ends) - 1) + [True]
        assert router.router.ledger.load(a.url).queued_prefill_tokens > 0
        await envoy.ask(response_head())
        raw = json.dumps(COMPLETION).encode()
        echo = await envoy.ask(response_body(raw))
        streamed = echo.response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (raw, True)
        assert router.router.ledger.load(a.url).queued_prefill_tokens == 0
        assert router.counter("delivered_hit_tokens_total", source="all") == 8
        await envoy.end()
        await idle(router)


async def test_a_body_in_full_duplex_may_end_with_trailers() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as envoy,
    ):
        await envoy.say(request_head(mode="FULL_DUPLEX_STREAMED"))
        await envoy.say(request_body(BODY, ends=False))
        await envoy.say(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        assert destinations(await envoy.hear()) == [at(a)]
        piece = (await envoy.hear()).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (BODY, False)
        assert (await envoy.hear()).WhichOneof("response") == "request_trailers"
    await idle(router)


@pytest.mark.parametrize("said", [0, 1, 2, 3])
async def test_a_client_that_goes_away_at_any_moment_leaves_no_charge(said: int) -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        messages = [
            request_head(response_mode="STREAMED"),
            request_body(BODY),
            response_head(content_type="text/event-stream"),
            response_body(b"data: {}\n\n", ends=False),
        ]
        async with picker.stream() as envoy:
            for message in messages[: said + 1]:
                await envoy.ask(message)
            assert router.inflight() == (said > 0)
        await idle(router)
        # Seen only where the end of the answer would have been seen.
        assert router.counter("aborts_total") == (said in (1, 3))


async def test_a_client_that_goes_away_while_it_waits_in_line_leaves_the_line() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, max_inflight_per_engine=1) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as first,
    ):
        await first.ask(request_head())
        await first.ask(request_body(BODY))
        async with picker.stream() as second:
            await second.ask(request_head())
            await second.say(request_body(BODY))
            await until(lambda: len(router.router.admission) == 1)
        await until(lambda: len(router.router.admission) == 0)
        assert router.inflight() == 1


async def test_a_full_fleet_is_told_to_answer_429_and_when_to_come_again() -> None:
    limits = {"max_inflight_per_engine": 1, "queue_requests": 0, "retry_after_seconds": 3}
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, **limits) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as first,
    ):
        await first.ask(request_head())
        await first.ask(request_body(BODY))
        refused = (await picker.pick(BODY)).immediate_response
        assert refused.status.code == 429
        assert set_headers(pb.ProcessingResponse(immediate_response=refused))["retry-after"] == "3"
        assert json.loads(refused.body)["error"]["type"] == "rate_limit_error"
        assert router.counter("requests_total", engine="", status="429") == 1


async def test_refusals_are_those_of_the_router_itself() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, max_body_bytes=1000) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        wrong = {**POST, "x-emberkv-priority": "soon"}
        for body, head, status in (
            (b"[1]", POST, 400),
            (b"{", POST, 400),
            (b'{"model": "else", "prompt": [1]}', POST, 404),
            (BODY, wrong, 400),
            (b" " * 1001, POST, 413),
        ):
            answer = await picker.pick(body, headers=head)
            assert answer.immediate_response.status.code == status, body[:20]
        # What is no JSON is not the router's to judge.
        form = {**POST, ":path": "/v1/audio/transcriptions", "content-type": "multipart/form-data"}
        assert destinations(await picker.pick(b"--x", headers=form)) == [at(a)]
        get = {":method": "GET", ":path": "/v1/models"}
        async with picker.stream() as envoy:
            assert destinations(await envoy.ask(request_head(get, ends=True))) == [at(a)]
        await idle(router)


async def test_only_endpoints_of_the_subset_are_chosen() -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        for _ in range(8):
            assert destinations(await picker.pick(BODY, subset=[at(b), "10.0.0.9:1"])) == [at(b)]
        for nobody in ([], ["10.0.0.9:1"]):
            answer = await picker.pick(BODY, subset=nobody)
            assert answer.immediate_response.status.code == 503
        await idle(router)


async def test_the_charge_moves_to_the_engine_that_envoy_says_has_answered() -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(a.url, b.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
        picker.stream() as envoy,
    ):
        await envoy.ask(request_head())
        first, second = destinations(await envoy.ask(request_body(BODY)))
        answered = await envoy.ask(response_head(served=second))
        assert set_headers(answered)["x-emberkv-engine"] == f"http://{second}"
        ledger = router.router.ledger
        assert ledger.active_requests(f"http://{first}") == 0
        assert ledger.active_requests(f"http://{second}") == 1
        assert router.counter("retries_total", why="envoy") == 1
        told = {"engine": f"http://{first}", "kind": "passed_over"}
        assert router.counter("upstream_errors_total", **told) == 1


async def test_an_engine_that_answers_502_is_counted_as_failing() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, health_interval_seconds=60) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        for _ in range(3):
            async with picker.stream() as envoy:
                await envoy.ask(request_head())
                await envoy.ask(request_body(BODY))
                await envoy.ask(response_head("502", at(a)))
        answer = await picker.pick(BODY)
        assert answer.immediate_response.status.code == 503
        assert router.counter("upstream_errors_total", engine=a.url, kind="502") == 3
        await idle(router)


async def test_with_keys_the_body_is_sealed_and_the_key_stays_behind(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.json", tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    key = make_key("acme", "now")
    edit_keys(keys, lambda file: file.with_key(key.stored, None))
    guarded = {"key_file": keys, "tenant_secret_file": secret}
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0, **guarded) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        assert (await picker.pick(BODY)).immediate_response.status.code == 401
        head = {**POST, "authorization": f"Bearer {key.text}"}
        answer = await picker.pick(BODY, headers=head)
        common = answer.request_body.response
        assert "authorization" in common.header_mutation.remove_headers
        sealed = json.loads(common.body_mutation.body)
        assert len(sealed["cache_salt"]) == 64
        assert set_headers(answer)["content-length"] == str(len(common.body_mutation.body))
        async with picker.stream() as envoy:  # without the body there is no salt
            answer = await envoy.ask(request_head(head, mode="NONE"))
            assert answer.immediate_response.status.code == 501
        await idle(router)
        assert router.router.tenants is not None
        assert router.router.tenants.active_requests() == 0


async def test_health_tells_life_and_readiness() -> None:
    serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        for service in ("", "liveness", "readiness", SERVICE):
            assert await picker.health(service) == serving
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await picker.health("tea")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        router.router.engines.get(a.url).health.refused(0.0)  # type: ignore[union-attr]
        assert await picker.health("liveness") == serving
        assert await picker.health("readiness") == not_serving


async def test_a_taken_port_is_named_with_its_setting() -> None:
    async with FakeEngine().serving() as a:
        with pytest.raises(PreflightError, match="ext_proc_port"):
            async with running_router(a.url, ext_proc_port=a.port):
                pass


async def test_what_no_envoy_says_ends_the_stream_and_is_counted() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        grpc_mode = request_head(mode="GRPC")
        bad_subset = request_head(mode="NONE", subset=[])
        hint = bad_subset.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint["x-gateway-destination-endpoint-subset"] = 7
        for kind, messages in (
            ("garbled", [b"\xff\xff"]),
            ("unknown_message", [pb.ProcessingRequest()]),
            ("unknown_mode", [grpc_mode]),
            ("out_of_order", [request_body(BODY)]),
            ("out_of_order", [request_head(), request_head()]),
            ("out_of_order", [pb.ProcessingRequest(request_trailers=pb.HttpTrailers())]),
            ("bad_head", [request_head({"host": "x"})]),
            ("bad_head", [request_head(), request_body(BODY), response_head("2xx")]),
            ("bad_subset", [bad_subset]),
        ):
            before = router.counter("ext_proc_errors_total", kind=kind)
            async with picker.stream() as envoy:
                for message in messages:
                    await envoy.say(message)
                assert await envoy.code() is grpc.StatusCode.INVALID_ARGUMENT, kind
            assert router.counter("ext_proc_errors_total", kind=kind) == before + 1, kind
        await idle(router)


async def test_a_name_of_an_engine_is_looked_up_and_an_unknown_one_is_left_out() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(f"http://localhost:{a.port}", ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        (told,) = destinations(await picker.pick(BODY))
        assert told in (at(a), f"[::1]:{a.port}")
        addresses, engine = router.router.addresses, next(iter(router.router.engines))
        engine.host = "no-such-name.invalid"
        assert addresses.of(engine) is None
        await addresses.refresh()
        assert addresses.of(engine) is None
        assert addresses.failed_lookups == 1
        assert (await picker.pick(BODY)).immediate_response.status.code == 503
        await idle(router)


_BYTES = st.binary(max_size=40)
_TEXT = st.sampled_from(
    ["POST", "GET", "/v1/completions", "/", "200", "9", "", "é", "application/json", "text/plain"]
)
_HEADERS = st.dictionaries(
    st.sampled_from([":method", ":path", ":status", "content-type", "content-length", "x", ":"]),
    _TEXT,
).map(header_map)
_HEAD = st.builds(pb.HttpHeaders, headers=_HEADERS, end_of_stream=st.booleans())
_BODY = st.builds(
    pb.HttpBody, body=st.sampled_from([BODY, b"", b"{", b"\xff"]), end_of_stream=st.booleans()
)
_CONFIG = st.builds(
    pb.ProtocolConfiguration,
    request_body_mode=st.integers(0, 6),
    response_body_mode=st.integers(0, 6),
)
_MESSAGE = st.one_of(
    st.builds(pb.ProcessingRequest, request_headers=_HEAD, protocol_config=_CONFIG),
    st.builds(pb.ProcessingRequest, response_headers=_HEAD),
    st.builds(pb.ProcessingRequest, request_body=_BODY),
    st.builds(pb.ProcessingRequest, response_body=_BODY),
    st.just(pb.ProcessingRequest(request_trailers=pb.HttpTrailers())),
    st.just(pb.ProcessingRequest(response_trailers=pb.HttpTrailers())),
).map(lambda message: message.SerializeToString())
_GOOD_HEADS = st.builds(
    lambda mode, response: request_head(
        mode=pb.BodySendMode.Name(mode), response_mode=pb.BodySendMode.Name(response)
    ).SerializeToString(),
    st.integers(0, 4),
    st.integers(0, 4),
)
_STREAM = st.one_of(
    st.lists(st.one_of(_MESSAGE, _BYTES), max_size=6),
    st.builds(lambda head, rest: [head, *rest], _GOOD_HEADS, st.lists(_MESSAGE, max_size=8)),
)


@given(streams=st.lists(_STREAM, min_size=20, max_size=40))
@settings(max_examples=8, phases=[Phase.generate])
def test_no_message_breaks_the_picker(streams: list[list[bytes]]) -> None:
    faults: list[logging.LogRecord] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            faults.append(record)

    async def run() -> None:
        async with (
            FakeEngine().serving() as a,
            running_router(a.url, ext_proc_port=0) as router,
            picker_at(router.router.ext_proc_port) as picker,
        ):
            for stream in streams:
                # Not judged by the code: the client's library makes one of its own when it has more
                # to say than was wanted. A fault of the router is in its counter and its log.
                await asyncio.wait_for(picker.play(stream), 30)
            await idle(router)
            assert router.counter("ext_proc_errors_total", kind="internal") == 0
            assert destinations(await picker.pick(BODY)) == [at(a)]
            await idle(router)

    watch = Watch(logging.ERROR)
    logging.getLogger().addHandler(watch)
    try:
        asyncio.run(run())
    finally:
        logging.getLogger().removeHandler(watch)
    assert not faults, [record.getMessage() for record in faults]


def test_the_destination_header_is_the_gateways() -> None:
    assert DESTINATION == "x-gateway-destination-endpoint"


async def test_of_a_body_shown_in_part_only_the_head_counts() -> None:
    async with (
        FakeEngine().serving() as a,
        running_router(a.url, ext_proc_port=0) as router,
        picker_at(router.router.ext_proc_port) as picker,
    ):
        for ends, unknown in ((True, 0), (False, 1)):
            async with picker.stream() as envoy:
                await envoy.ask(request_head(mode="BUFFERED_PARTIAL"))
                answer = await envoy.ask(request_body(BODY, ends=ends))
                assert destinations(answer) == [at(a)]
            assert router.counter("no_token_requests_total", why="no_prompt") == unknown
        await idle(router)
