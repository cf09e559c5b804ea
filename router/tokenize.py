"""From a request's body to the token ids its engine will compute.

Ids given as numbers are used as they are; text and messages are put to the engine's own /tokenize,
since any other rendering of a chat would hash to other blocks and never hit. Without ids a request
still goes, by load alone.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from emberkv_proto.request_keys import salt_bytes
from router.engine_client import Fetched
from router.engines import Engine
from router.upstream_head import UpstreamError

TokenIds = npt.NDArray[np.uint32]

CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "documents",
    "tools",
    "tool_choice",
)
"""Fields of a chat completion that change its rendering (vLLM's TokenizeChatRequest, and two that
its chat templates read)."""

COMPLETION_FIELDS = ("prompt", "add_special_tokens")
ENTRY_TOKENS = 160
"""What remembering a prompt costs beside its tokens, in tokens of 4 bytes."""


class NoTokens(str, Enum):
    """Why a request has no token ids; the label of a counter."""

    NO_PROMPT = "no_prompt"
    MANY_PROMPTS = "many_prompts"
    BAD_IDS = "bad_ids"
    ENGINE_FAILED = "engine_failed"
    ENGINE_REFUSED = "engine_refused"


@dataclass(frozen=True, slots=True)
class Ask:
    """A body for the engine's /tokenize, and what to remember its answer by."""

    body: bytes
    digest: bytes


class Fetcher(Protocol):
    """What can put a question to an engine; raises UpstreamError."""

    async def fetch(
        self, engine: Engine, method: str, target: bytes, body: bytes, deadline_seconds: float
    ) -> Fetched: ...


class TokenCache:
    """Least recently used token ids by digest of what they were made from, bounded by tokens.

    Each entry counts for `ENTRY_TOKENS` more, or short prompts would take memory without bound.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._entries: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._tokens = 0

    def get(self, digest: bytes) -> TokenIds | None:
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def put(self, digest: bytes, tokens: TokenIds) -> None:
        old = self._entries.pop(digest, None)
        if old is not None:
            self._tokens -= _cost(old)
        self._entries[digest] = tokens
        self._tokens += _cost(tokens)
        while self._tokens > self._capacity_tokens:
            _, dropped = self._entries.popitem(last=False)
            self._tokens -= _cost(dropped)

    def check_integrity(self) -> None:
        assert self._tokens == sum(map(_cost, self._entries.values()))
        assert self._tokens <= self._capacity_tokens


def _cost(tokens: TokenIds) -> int:
    return ENTRY_TOKENS + len(tokens)


def read_prompt(body: Mapping[str, Any]) -> TokenIds | Ask | NoTokens:
    """Return the ids in the body, or what to ask the engine, or why neither is possible. Pure."""
    if "messages" in body:
        return _ask(body, CHAT_FIELDS)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _ask({**body, "prompt": prompt}, COMPLETION_FIELDS)
    if not isinstance(prompt, list) or not prompt:
        return NoTokens.NO_PROMPT
    if isinstance(prompt[0], (str, list)):
        return NoTokens.MANY_PROMPTS
    return token_ids(prompt)


def token_ids(ids: list[Any]) -> TokenIds | NoTokens:
    """Check ids and pack them as the hash builder wants them, both at C speed.

    Types first: of numbers and one long text numpy would make texts that are all as long.
    """
    if not ids:
        return np.empty(0, np.uint32)
    if set(map(type, ids)) != {int}:
        return NoTokens.BAD_IDS
    try:
        return np.frombuffer(array("I", ids), np.uint32)
    except OverflowError:
        return NoTokens.BAD_IDS


def _ask(body: Mapping[str, Any], fields: tuple[str, ...]) -> Ask:
    wanted = {name: body[name] for name in ("model", *fields) if body.get(name) is not None}
    packed = json.dumps(wanted, separators=(",", ":"), sort_keys=False).encode()
    salt = body.get("cache_salt")
    digest = blake3.blake3(packed)
    # Else a quick answer would tell one salt's owner what another's has asked.
    digest.update(b"\0" + salt_bytes(salt if isinstance(salt, str) else None))
    return Ask(packed, digest.digest())


def read_answer(fetched: Fetched) -> TokenIds | NoTokens:
    """Check an engine's answer to /tokenize. Pure."""
    if fetched.status != 200:
        return NoTokens.ENGINE_REFUSED
    try:
        answer = json.loads(fetched.body)
    except (ValueError, RecursionError):
        return NoTokens.BAD_IDS
    ids = answer.get("tokens") if isinstance(answer, dict) else None
    return token_ids(ids) if isinstance(ids, list) else NoTokens.BAD_IDS


class Tokenizer:
    """Token ids of requests, remembered."""

    def __init__(self, client: Fetcher, cache: TokenCache, deadline_seconds: float) -> None:
        self._client = client
        self._cache = cache
        self._deadline_seconds = deadline_seconds

    async def tokens(self, body: Mapping[str, Any], engine: Engine) -> TokenIds | NoTokens:
        """Return the ids of the body's prompt, as `engine` makes them. Never raises for it."""
        prompt = read_prompt(body)
        if not isinstance(prompt, Ask):
            return prompt
        known = self._cache.get(prompt.digest)
        if known is not None:
            return known
        try:
            fetched = await self._client.fetch(
                engine, "POST", b"/tokenize", prompt.body, self._deadline_seconds
            )
        except UpstreamError:
            return NoTokens.ENGINE_FAILED
        answer = read_answer(fetched)
        if not isinstance(answer, NoTokens):
            self._cache.put(prompt.digest, answer)
        return answer
