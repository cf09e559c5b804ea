"""Token ids from bodies, the cache of them, and what engines report as delivered."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from router.engine_client import Fetched
from router.engines import Engine, EngineTable
from router.health import BreakerLimits
from router.request_body import RequestBody, parse_body
from router.tokenize import (
    ENTRY_TOKENS,
    Ask,
    NoTokens,
    Prompt,
    TokenCache,
    Tokenizer,
    prompt_source,
    read_answer,
    read_prompt,
)
from router.upstream_head import ResponseTimeoutError
from router.usage import Delivered, from_json, from_stream_tail

SALT = {"cache_salt": "a"}


def body_of(**values: Any) -> RequestBody:
    """As it comes over the wire."""
    return parse_body(json.dumps(values).encode())


def engine() -> Engine:
    return EngineTable(BreakerLimits(3, 2.0), 60.0).add("http://127.0.0.1:1", 0.0)


class AnsweringEngine:
    def __init__(self, fetched: Fetched | None) -> None:
        self.fetched = fetched
        self.bodies: list[dict[str, Any]] = []

    async def fetch(
        self, engine: Engine, method: str, target: bytes, body: bytes, deadline_seconds: float
    ) -> Fetched:
        assert (method, target, deadline_seconds) == ("POST", b"/tokenize", 0.5)
        self.bodies.append(json.loads(body))
        if self.fetched is None:
            raise ResponseTimeoutError("too slow")
        return self.fetched


def test_ids_in_the_body_are_used_as_they_are() -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        ids = read_prompt(body_of(prompt=prompt))
        assert isinstance(ids, np.ndarray)
        assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, NoTokens.NO_PROMPT),
        ({"prompt": []}, NoTokens.NO_PROMPT),
        ({"prompt": {"a": 1}}, NoTokens.NO_PROMPT),
        ({"prompt": ["a", "b"]}, NoTokens.MANY_PROMPTS),
        ({"prompt": [[1], [2]]}, NoTokens.MANY_PROMPTS),
        ({"prompt": [1, -1]}, NoTokens.BAD_IDS),
        ({"prompt": [1, 2.5]}, NoTokens.BAD_IDS),
        ({"prompt": [True, False]}, NoTokens.BAD_IDS),
        ({"prompt": [1, None]}, NoTokens.BAD_IDS),
        ({"prompt": [1, [2]]}, NoTokens.BAD_IDS),
        ({"prompt": [1, 1 << 63]}, NoTokens.BAD_IDS),
        ({"prompt": [1, 1 << 32]}, NoTokens.BAD_IDS),
        ({"prompt": [1, 10**40]}, NoTokens.BAD_IDS),
        ({"prompt": [1, "x"]}, NoTokens.BAD_IDS),
    ],
)
def test_a_prompt_without_usable_ids_says_why(body: dict[str, Any], why: NoTokens) -> None:
    assert read_prompt(body_of(**body)) is why


def test_one_long_text_among_ids_costs_no_memory() -> None:
    prompt = [1, "x" * 100_000, *[""] * 200]
    tracemalloc.start()
    try:
        assert read_prompt(body_of(prompt=prompt)) is NoTokens.BAD_IDS
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_only_fields_that_change_the_rendering_are_asked_and_remembered_by() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"t": 1}]}
    first = read_prompt(body_of(**{**chat, "temperature": 0.5, "stream": True}))
    second = read_prompt(body_of(**{**chat, "temperature": 0.9, "max_tokens": 5}))
    other = read_prompt(body_of(**{**chat, "tools": []}))
    assert isinstance(first, Ask)
    assert isinstance(second, Ask)
    assert isinstance(other, Ask)
    assert first == second
    assert first.body != other.body
    assert json.loads(first.body) == chat


def test_what_one_salt_asked_is_not_remembered_for_another() -> None:
    chat = {"model": "m", "messages": []}
    bodies = [body_of(**{**chat, **salt}) for salt in ({}, SALT, {"cache_salt": "b"})]
    assert len({prompt_source(body) for body in bodies}) == 3
    assert len({read_prompt(body) for body in bodies}) == 1, "the engine need not know"
    assert prompt_source(body_of(**{**chat, **SALT})) == prompt_source(bodies[1])


async def test_an_answer_is_remembered() -> None:
    client = AnsweringEngine(Fetched(200, b'{"tokens": [5, 6], "count": 2}'))
    cache = TokenCache(1000)
    tokenizer = Tokenizer(client, cache, 0.5)
    for _ in range(3):
        prompt = await tokenizer.tokens(body_of(prompt="ab", model="m"), engine)
        assert isinstance(prompt, Prompt)
        assert prompt.ids.tolist() == [5, 6]
    assert client.bodies == [{"model": "m", "prompt": "ab"}]
    cache.check_integrity()


async def test_a_slow_or_refusing_engine_means_no_tokens_and_is_asked_again() -> None:
    for fetched, why in (
        (None, NoTokens.ENGINE_FAILED),
        (Fetched(404, b"{}"), NoTokens.ENGINE_REFUSED),
        (Fetched(200, b"[1]"), NoTokens.BAD_IDS),
        (Fetched(200, b"nonsense"), NoTokens.BAD_IDS),
        (Fetched(200, b'{"tokens": [1, "a"]}'), NoTokens.BAD_IDS),
    ):
        client = AnsweringEngine(fetched)
        tokenizer = Tokenizer(client, TokenCache(1000), 0.5)
        for _ in range(2):
            assert await tokenizer.tokens(body_of(prompt="ab"), engine) is why
        assert len(client.bodies) == 2


def test_the_cache_is_bounded_by_tokens_and_drops_the_longest_unused() -> None:
    cache = TokenCache(2 * ENTRY_TOKENS + 30)
    for name in (b"a", b"b", b"c"):
        cache.put(Prompt(name, np.zeros(4, np.uint32)))
        cache.get(b"a")
        cache.check_integrity()
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None
    cache.put(Prompt(b"huge", np.zeros(2 * ENTRY_TOKENS, np.uint32)))
    assert cache.get(b"huge") is None
    cache.check_integrity()


def test_empty_prompts_do_not_fill_the_cache_without_bound() -> None:
    cache = TokenCache(10 * ENTRY_TOKENS)
    names = [b"%d" % number for number in range(1000)]
    for name in names:
        cache.put(Prompt(name, np.empty(0, np.uint32)))
    assert sum(cache.get(name) is not None for name in names) == 10
    cache.check_integrity()


def test_an_empty_answer_is_an_empty_prompt() -> None:
    ids = read_answer(Fetched(200, b'{"tokens": []}'))
    assert isinstance(ids, np.ndarray)
    assert len(ids) == 0


USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "dram_tokens": 8}}


def test_delivered_hits_are_read_from_json_and_from_the_last_event() -> None:
    wanted = Delivered(8, {"dram": 8}, prompt_tokens=9)
    assert from_json(json.dumps({"usage": USAGE}).encode()) == wanted
    event = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    framed = b"%x\r\n%s\r\n" % (len(event), event)
    assert from_stream_tail(b"ta: {}\n\n\r\n" + framed + b"e\r\ndata: [DONE]\n\n\r\n") == wanted


def test_by_source_is_understood_in_both_shapes() -> None:
    details = {"cached_tokens": 3, "by_source": {"hbm": 1, "peer": 2, "else": 9}}
    body = json.dumps({"usage": {"prompt_tokens_details": details}}).encode()
    assert from_json(body) == Delivered(3, {"hbm": 1, "peer": 2})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"usage": null, "x": "cached_tokens"}',
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}',
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": true}}}',
        b'{"cached_tokens": ',
    ],
)
def test_a_response_that_does_not_tell_is_not_counted(body: bytes) -> None:
    assert from_json(body) is None
    assert from_stream_tail(b"data: " + body + b"\n\n") is None
