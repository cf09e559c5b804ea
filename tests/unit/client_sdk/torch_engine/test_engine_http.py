"""The OpenAI surface: bodies, streams, usage, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from client_sdk.engine.torch_engine.engine import TorchEngine
from client_sdk.engine.torch_engine.server import EngineServer
from tests.helpers.torch_engines import tiny_config

PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(tiny_config(max_batch_tokens=8))
    engine.start("http://127.0.0.1:1")
    yield engine
    await engine.close()
    engine.check_integrity()


@pytest.fixture
async def http(engine: TorchEngine) -> AsyncIterator[TestClient[Any, Any]]:
    server = TestServer(EngineServer(engine).app)
    await server.start_server()  # with handler_cancellation, as the engine's own runner
    async with TestClient(server) as client:
        yield client


async def post(http: TestClient[Any, Any], path: str, body: Any, status: int = 200) -> Any:
    response = await http.post(path, json=body)
    assert response.status == status, await response.text()
    return await response.json()


async def until(condition: Callable[[], bool]) -> None:
    """The engine's thread sets no asyncio event, so this polls; at most 10 s."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    pytest.fail("it did not come about in 10 s")


async def events(http: TestClient[Any, Any], path: str, body: Any) -> list[Any]:
    """The JSON of each event; checks that [DONE] ends the stream."""
    response = await http.post(path, json={**body, "stream": True})
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    parts = (await response.text()).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_a_completion_has_text_ids_and_usage(http: TestClient[Any, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "user": "u", "odd": 1}
    first = await post(http, "/v1/completions", body)
    choice = first["choices"][0]
    assert choice["text"].encode() == bytes(choice["token_ids"])
    assert choice["prompt_token_ids"] == list(PROMPT.encode())
    assert choice["finish_reason"] == "length"
    assert first["usage"]["total_tokens"] == len(PROMPT) + 5
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await post(http, "/v1/completions", body)
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    details = again["usage"]["prompt_tokens_details"]
    assert details == {
        "cached_tokens": 40,
        "hbm_tokens": 40,
        "dram_tokens": 0,
        "ssd_tokens": 0,
        "peer_tokens": 0,
    }


async def test_text_and_its_token_ids_are_the_same_prompt(http: TestClient[Any, Any]) -> None:
    text = await post(http, "/v1/completions", {"prompt": PROMPT})
    ids = await post(http, "/v1/completions", {"prompt": list(PROMPT.encode())})
    assert text["choices"][0]["text"] == ids["choices"][0]["text"]
    assert ids["usage"]["prompt_tokens_details"]["hbm_tokens"] == 40


async def test_a_stream_says_what_the_whole_answer_says(http: TestClient[Any, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
    whole = (await post(http, "/v1/completions", body))["choices"][0]
    parts = await events(
        http, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    choices = [part["choices"][0] for part in parts[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [n for choice in choices for n in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == list(PROMPT.encode())
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 12


async def test_chat_in_turns_hits_what_was_said(http: TestClient[Any, Any]) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    first = await post(
        http, "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 20}
    )
    assert first["object"] == "chat.completion"
    message = first["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "and then?"}]
    parts = await events(
        http,
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 3, "stream_options": {"include_usage": True}},
    )
    assert parts[0]["object"] == "chat.completion.chunk"
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    said = first["usage"]["total_tokens"] - 1
    assert parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == said // 4 * 4


async def test_tokenize_agrees_with_what_is_computed(http: TestClient[Any, Any]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "häh?"}]
    told = await post(http, "/tokenize", {"messages": messages})
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 256
    answer = await post(
        http,
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 1, "return_token_ids": True},
    )
    assert answer["choices"][0]["prompt_token_ids"] == told["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": 0.7}, 400, "temperature"),
        ({"prompt": "x", "n": 2}, 400, "n: "),
        ({"prompt": "x", "model": "gpt"}, 404, "not served"),
        ({"prompt": "x", "lora_name": "a"}, 400, "lora_name"),
        ({"prompt": "x", "stop": ["end"]}, 400, "stop"),
        ({"prompt": "x", "cache_salt": 5}, 400, "cache_salt"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "0..511"),
        ({"prompt": [512]}, 400, "0..511"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": "x" * 256}, 400, "256 tokens"),
        ({}, 400, "prompt"),
        ([], 400, "object"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(
    http: TestClient[Any, Any], body: Any, status: int, words: str
) -> None:
    error = (await post(http, "/v1/completions", body, status))["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]


@pytest.mark.parametrize(
    "messages",
    [[], "x", [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": [{}]}], None],
)
async def test_malformed_chats_are_refused(http: TestClient[Any, Any], messages: Any) -> None:
    await post(http, "/v1/chat/completions", {"messages": messages}, 400)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
async def test_what_is_not_json_is_refused(http: TestClient[Any, Any], raw: bytes) -> None:
    response = await http.post("/v1/completions", data=raw)
    assert response.status == 400
    assert (await response.json())["error"]["code"] == "invalid_json"


async def test_small_routes(http: TestClient[Any, Any], engine: TorchEngine) -> None:
    assert (await (await http.get("/v1/models")).json())["data"][0]["id"] == engine.cfg.model
    assert (await http.get("/health")).status == (await http.get("/ready")).status == 200
    assert (await http.get("/nowhere")).status == 404
    await post(http, "/v1/completions", {"prompt": PROMPT})
    metrics = await (await http.get("/metrics")).text()
    assert "emberkv_engine_ttft_seconds_count 1.0" in metrics
    assert "emberkv_engine_free_blocks 64.0" in metrics


async def test_a_request_that_the_engine_drops_is_an_error(
    http: TestClient[Any, Any], engine: TorchEngine
) -> None:
    def broken(*_: object) -> list[int]:
        raise RuntimeError("no")

    engine.model.forward = broken  # type: ignore[method-assign]
    assert (await post(http, "/v1/completions", {"prompt": "x"}, 503))["error"]["message"]
    response = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(
    http: TestClient[Any, Any], engine: TorchEngine, stream: bool
) -> None:
    waiting = asyncio.ensure_future(
        http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 200, "stream": stream})
    )
    await until(lambda: any(r.generated for r in engine.scheduler.active))
    if stream:
        (await waiting).close()
    else:
        waiting.cancel()
    await until(lambda: not engine._flights)
    await until(lambda: engine.scheduler.pool.free_blocks == engine.cfg.num_blocks)
    assert engine.events.labels("answered")._value.get() == 0
