"""The OpenAI API as the demo uses it: one streaming request, its tokens, its usage, its TTFT."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from client_sdk.aio import timeout
from emberkv_proto.errors import InvalidRequestError, UnavailableError

SOURCES = ("hbm", "dram", "ssd", "peer")
UNTOLD = "untold"
"""The source of engines that tell only how much they found, as vLLM."""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request. Tokens are counted by the engine, time by this client."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    hit_tokens: dict[str, int]
    """By source; a source that gave nothing is 0."""
    ttft_seconds: float
    interruptions: int = 0
    """How often the request was sent again because its engine died under it."""

    @property
    def hits(self) -> int:
        return sum(self.hit_tokens.values())


@dataclass(slots=True)
class _Collected:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    ttft_seconds: float | None = None
    done: bool = False


class OpenAiClient:
    """Talks to one base URL (the router or an engine).

    Raises, from every call:
        InvalidRequestError: the server refused the request (4xx) or answered what is no answer.
        UnavailableError: nobody answered in time, a 5xx, or the stream broke off.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, deadline_seconds: float = 120.0
    ) -> None:
        self.url = url
        self._session = session
        self._model = model
        self._deadline_seconds = deadline_seconds

    async def complete(self, prompt: list[int], max_tokens: int) -> Answer:
        """Greedy continuation of a prompt of token ids."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        return await self._stream("/v1/completions", body)

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        """Greedy answer to a conversation."""
        body = {"messages": messages, "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", body)

    async def _stream(self, path: str, body: dict[str, Any]) -> Answer:
        body |= {
            "model": self._model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        collected = _Collected()
        began = time.monotonic()
        try:
            async with (
                timeout(self._deadline_seconds),
                self._session.post(self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    await _refuse(response)
                async for line in response.content:
                    _take_line(collected, line, began)
        except asyncio.TimeoutError:  # not the builtin one before Python 3.11
            raise UnavailableError(
                f"{self.url}: no whole answer in {self._deadline_seconds:.0f} s"
            ) from None
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{self.url}: {error!r}") from None
        return _to_answer(self.url, collected)


async def _refuse(response: aiohttp.ClientResponse) -> None:
    text = (await response.text())[:500]
    message = f"{response.url} answered {response.status}: {text}"
    raise (UnavailableError if response.status >= 500 else InvalidRequestError)(message)


def _take_line(collected: _Collected, line: bytes, began: float) -> None:
    if not line.startswith(b"data:"):
        return
    data = line[5:].strip()
    if data == b"[DONE]":
        collected.done = True
        return
    try:
        chunk = json.loads(data)
    except ValueError:
        raise InvalidRequestError(f"stream: not JSON: {data[:200]!r}") from None
    if "error" in chunk:
        raise UnavailableError(f"stream: {chunk['error']}")
    if chunk.get("usage"):
        collected.usage = chunk["usage"]
    for choice in chunk.get("choices", ()):
        ids = choice.get("token_ids") or []
        if ids and collected.ttft_seconds is None:
            collected.ttft_seconds = time.monotonic() - began
        collected.token_ids += ids
        collected.text.append(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _to_answer(url: str, collected: _Collected) -> Answer:
    if not collected.done or collected.usage is None or collected.ttft_seconds is None:
        raise UnavailableError(f"{url}: the stream ended before the answer was whole")
    details = collected.usage.get("prompt_tokens_details") or {}
    return Answer(
        tuple(collected.token_ids),
        "".join(collected.text),
        int(collected.usage["prompt_tokens"]),
        hits_by_source(details),
        collected.ttft_seconds,
    )


def hits_by_source(details: dict[str, Any]) -> dict[str, int]:
    """`usage.prompt_tokens_details` as tokens by source; `UNTOLD` when it names none.

    Raises:
        InvalidRequestError: the parts do not add up to `cached_tokens`.
    """
    hits = {source: int(details.get(f"{source}_tokens", 0)) for source in SOURCES}
    total = int(details.get("cached_tokens") or 0)
    if not any(f"{source}_tokens" in details for source in SOURCES):
        return {**hits, UNTOLD: total}
    if sum(hits.values()) != total:
        raise InvalidRequestError(f"usage: {hits} do not add up to cached_tokens {total}")
    return hits
