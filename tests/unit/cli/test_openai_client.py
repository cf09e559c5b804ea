"""The demo's client against answers that are whole, broken off, refused or nonsense."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from client_sdk.cli.openai_client import OpenAiClient, hits_by_source
from emberkv_proto.errors import InvalidRequestError, UnavailableError

USAGE = {
    "prompt_tokens": 32,
    "prompt_tokens_details": {"cached_tokens": 16, "dram_tokens": 10, "ssd_tokens": 6},
}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(number: int) -> bytes:
    return event(choices=[{"text": "x", "token_ids": [number]}])


@asynccontextmanager
async def answering(*pieces: bytes, status: int = 200) -> AsyncIterator[OpenAiClient]:
    """A client of a server that sends these pieces and hangs up."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site.name
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield OpenAiClient(session, f"http://127.0.0.1:{port}", "m", 5.0)
    finally:
        await runner.cleanup()
    assert all(body["return_token_ids"] and body["model"] == "m" for body in seen)


async def test_an_answer_is_its_tokens_its_usage_and_its_first_tokens_time() -> None:
    pieces = (token(5), token(6), event(choices=[], usage=USAGE), b"data: [DONE]\n\n")
    async with answering(*pieces) as client:
        answer = await client.complete([1, 2], 2)
    assert answer.token_ids == (5, 6)
    assert answer.text == "xx"
    assert answer.prompt_tokens == 32
    assert answer.hit_tokens == {"hbm": 0, "dram": 10, "ssd": 6, "peer": 0}
    assert answer.hits == 16
    assert 0 < answer.ttft_seconds < 5


async def test_events_cut_anywhere_are_put_together_again() -> None:
    whole = token(5) + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    async with answering(*pieces) as client:
        assert (await client.chat([], 1)).token_ids == (5,)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (token(5),),
        (token(5), event(choices=[], usage=USAGE)),
        (token(5), b"data: [DONE]\n\n"),
        (event(choices=[], usage=USAGE), b"data: [DONE]\n\n"),
        (token(5), event(error={"message": "engine failed"})),
    ],
)
async def test_an_answer_that_is_not_whole_is_no_answer(pieces: tuple[bytes, ...]) -> None:
    async with answering(*pieces) as client:
        with pytest.raises(UnavailableError):
            await client.complete([1], 1)


@pytest.mark.parametrize(("status", "error"), [(400, InvalidRequestError), (503, UnavailableError)])
async def test_a_refusal_carries_status_and_text(status: int, error: type[Exception]) -> None:
    async with answering(b"too long", status=status) as client:
        with pytest.raises(error, match=f"{status}: too long"):
            await client.complete([1], 1)


async def test_nobody_there_is_unavailable() -> None:
    async with aiohttp.ClientSession() as session:
        client = OpenAiClient(session, "http://127.0.0.1:1", "m", 5.0)
        with pytest.raises(UnavailableError):
            await client.complete([1], 1)


def test_sources_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="do not add up"):
        hits_by_source({"cached_tokens": 5, "dram_tokens": 4})
    none = {"hbm": 0, "dram": 0, "ssd": 0, "peer": 0}
    assert hits_by_source({}) == {**none, "untold": 0}
    assert hits_by_source({"cached_tokens": 5}) == {**none, "untold": 5}
