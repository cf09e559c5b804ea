"""From a request's body to the token ids its engine will compute.

Ids given as numbers are used as they are; text and messages are put to the engine's own /tokenize,
since any other rendering of a chat would hash to other blocks and never hit. Without ids a request
still goes, by load alone.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from router.chains import ChainKeys, ChainKind
from router.engine_client import Fetched
from router.engines import Engine
from router.request_body import RequestBody
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
_CHAT_SOURCE = {name: name.encode() for name in ("model", "cache_salt", *CHAT_FIELDS)}
_COMPLETION_SOURCE = {name: name.encode() for name in ("model", "cache_salt", *COMPLETION_FIELDS)}
ENTRY_TOKENS = 160
"""What remembering a prompt costs beside its tokens, in tokens of 4 bytes."""
KINDS_KEPT = 4
"""Of how many namespaces a remembered prompt keeps its blocks' keys."""
LARGE_BYTES = 256 * 1024
"""A prompt of so many bytes is read and hashed in a thread, a piece at a time."""
PIECE_BYTES = 32 * 1024


class NoTokens(str, Enum):
    """Why a request has no token ids; the label of a counter."""

    OTHER_BODY = "other_body"
    """Of an endpoint whose rendering only the engine knows."""
    NO_PROMPT = "no_prompt"
    MANY_PROMPTS = "many_prompts"
    BAD_IDS = "bad_ids"
    ENGINE_FAILED = "engine_failed"
    ENGINE_REFUSED = "engine_refused"


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt's tokens, what they were made from, and its blocks' keys once asked for."""

    source: bytes
    ids: TokenIds
    chains: dict[ChainKind, ChainKeys] = field(default_factory=dict)

    def keep(self, kind: ChainKind, keys: ChainKeys) -> None:
        if len(self.chains) < KINDS_KEPT:
            self.chains[kind] = keys


@dataclass(frozen=True, slots=True)
class Ask:
    """A body for the engine's /tokenize."""

    body: bytes


class Fetcher(Protocol):
    """What can put a question to an engine; raises UpstreamError."""

    async def fetch(
        self, engine: Engine, method: str, target: bytes, body: bytes, deadline_seconds: float
    ) -> Fetched: ...


class TokenCache:
    """Least recently used prompts by what they were made from, bounded by tokens of 4 bytes.

    They are found by a quick digest with a seed of this process, and compared whole: whoever makes
    two that collide gets no other tokens than its own.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._entries: OrderedDict[bytes, Prompt] = OrderedDict()
        self._tokens = 0
        self._seed = int.from_bytes(os.urandom(8), "little")

    def get(self, source: bytes) -> Prompt | None:
        digest = xxhash.xxh3_128_digest(source, self._seed)
        found = self._entries.get(digest)
        if found is None or found.source != source:
            return None
        self._entries.move_to_end(digest)
        return found

    def put(self, prompt: Prompt) -> None:
        digest = xxhash.xxh3_128_digest(prompt.source, self._seed)
        old = self._entries.pop(digest, None)
        if old is not None:
            self._tokens -= _cost(old)
        self._entries[digest] = prompt
        self._tokens += _cost(prompt)
        while self._tokens > self._capacity_tokens:
            _, dropped = self._entries.popitem(last=False)
            self._tokens -= _cost(dropped)

    def check_integrity(self) -> None:
        assert self._tokens == sum(map(_cost, self._entries.values()))
        assert self._tokens <= self._capacity_tokens


def _cost(prompt: Prompt) -> int:
    """Its source, its ids, and about twice as much again for its blocks' hashes and keys."""
    return ENTRY_TOKENS + len(prompt.source) // 4 + 3 * len(prompt.ids)


def prompt_source(body: RequestBody) -> bytes:
    """All of a body that its tokens and hashes depend on; empty where it has no prompt.

    The salt belongs to it, else a quick answer would tell one salt's owner what another's has
    asked. JSON has no NUL, so no two bodies run together.
    """
    wanted = _CHAT_SOURCE if "messages" in body else _COMPLETION_SOURCE
    if body.raw("messages" if wanted is _CHAT_SOURCE else "prompt") is None:
        return b""
    parts: list[bytes] = []
    for name in body:
        told = wanted.get(name)
        if told is not None:
            raw = body.raw(name)
            if raw is not None:
                parts += (told, raw)
    return b"\0".join(parts)


def read_prompt(body: RequestBody) -> TokenIds | Ask | NoTokens:
    """Return the ids in the body, or what to ask the engine, or why neither is possible. Pure."""
    if "messages" in body:
        return _ask(body, CHAT_FIELDS)
    raw = body.raw("prompt")
    if raw is None:
        return NoTokens.NO_PROMPT
    if raw[:1] == b'"':
        return _ask(body, COMPLETION_FIELDS)
    if raw[:1] != b"[":
        return NoTokens.NO_PROMPT
    if raw[1:64].lstrip()[:1] not in (b'"', b"[", b"]"):
        return ids_in(raw)
    prompts = body["prompt"]
    if len(prompts) != 1:
        return NoTokens.MANY_PROMPTS if prompts else NoTokens.NO_PROMPT
    if isinstance(prompts[0], str):
        return _ask(RequestBody.of(**{**body, "prompt": prompts[0]}), COMPLETION_FIELDS)
    return token_ids(prompts[0])


_decode_ids = msgspec.json.Decoder(list[int]).decode


def ids_in(raw: bytes) -> TokenIds | NoTokens:
    """The ids of a JSON list, read a piece at a time: a thread that does it lets others in."""
    pieces: list[bytes] = []
    at, end = 1, len(raw) - 1
    while end - at > PIECE_BYTES:
        comma = raw.find(b",", at + PIECE_BYTES, end)
        if comma < 0:
            break
        pieces.append(raw[at:comma])
        at = comma + 1
    pieces.append(raw[at:end])
    found = []
    for piece in pieces:
        try:
            found.append(np.frombuffer(array("I", _decode_ids(b"[" + piece + b"]")), np.uint32))
        except (msgspec.DecodeError, OverflowError, ValueError):
            return NoTokens.BAD_IDS
        if not len(found[-1]):
            return NoTokens.BAD_IDS  # two commas in a row
    return found[0] if len(found) == 1 else np.concatenate(found)


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


def _ask(body: RequestBody, fields: tuple[str, ...]) -> Ask:
    """The fields as they came, under the names that the engine's /tokenize has for them too."""
    parts = []
    for name in ("model", *fields):
        raw = body.raw(name)
        if raw is not None:
            parts.append(b'"%s":%s' % (name.encode(), raw))
    return Ask(b"{" + b",".join(parts) + b"}")


class _Answer(msgspec.Struct):
    tokens: msgspec.Raw


def read_answer(fetched: Fetched) -> TokenIds | NoTokens:
    """Check an engine's answer to /tokenize. Pure."""
    if fetched.status != 200:
        return NoTokens.ENGINE_REFUSED
    try:
        raw = bytes(msgspec.json.decode(fetched.body, type=_Answer).tokens)
    except (msgspec.DecodeError, RecursionError):
        return NoTokens.BAD_IDS
    if raw[:1] != b"[":
        return NoTokens.BAD_IDS
    return ids_in(raw) if raw[1:-1].strip() else np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class LocalIds:
    """Ids made without the engine; `is_checked`: it is to be asked whether it makes the same."""

    ids: TokenIds
    is_checked: bool


class LocalSource(Protocol):
    """Whoever makes ids without the engine, for some models."""

    def ids(self, model: str, body: RequestBody) -> LocalIds | None: ...

    def compared(self, model: str, ours: TokenIds, theirs: TokenIds) -> None: ...


class Tokenizer:
    """Token ids of requests, remembered. `local` is asked before the engine."""

    def __init__(
        self,
        client: Fetcher,
        cache: TokenCache,
        deadline_seconds: float,
        local: LocalSource | None = None,
    ) -> None:
        self._local = local
        self._client = client
        self._cache = cache
        self._deadline_seconds = deadline_seconds

    def known(self, body: RequestBody) -> Prompt | NoTokens | None:
        """As `tokens`, where no engine, tokenizer or thread is needed; else None."""
        source = prompt_source(body)
        if not source:
            return NoTokens.NO_PROMPT
        known = self._cache.get(source)
        if known is not None:
            return known
        if len(source) >= LARGE_BYTES:
            return None
        read = read_prompt(body)
        if isinstance(read, Ask):
            return None
        return read if isinstance(read, NoTokens) else self._keep(source, read)

    def _keep(self, source: bytes, ids: TokenIds) -> Prompt:
        prompt = Prompt(source, ids)
        self._cache.put(prompt)
        return prompt

    async def tokens(
        self, body: RequestBody, some_engine: Callable[[], Engine]
    ) -> Prompt | NoTokens:
        """Return the body's prompt with its ids, as engines make them. Never raises for it.

        Only a prompt that is not remembered asks for `some_engine`.
        """
        source = prompt_source(body)
        if not source:
            return NoTokens.NO_PROMPT
        known = self._cache.get(source)
        if known is not None:
            return known
        is_large = len(source) >= LARGE_BYTES
        read = await asyncio.to_thread(read_prompt, body) if is_large else read_prompt(body)
        if isinstance(read, Ask):
            read = await self._made(read, body, some_engine(), is_large=is_large)
        if isinstance(read, NoTokens):
            return read
        return self._keep(source, read)

    async def _made(
        self, ask: Ask, body: RequestBody, engine: Engine, *, is_large: bool
    ) -> TokenIds | NoTokens:
        """By the local tokenizer where there is one, else, and sometimes too, by the engine."""
        local, model = self._local, body.text("model")
        found = None
        if local is not None:
            found = (
                await asyncio.to_thread(local.ids, model, body)
                if is_large
                else local.ids(model, body)
            )
        if found is not None and not found.is_checked:
            return found.ids
        asked = await self._asked(ask, engine, is_large=is_large)
        if found is None or local is None:
            return asked
        if isinstance(asked, NoTokens):
            return found.ids
        local.compared(model, found.ids, asked)
        return asked

    async def _asked(self, ask: Ask, engine: Engine, *, is_large: bool) -> TokenIds | NoTokens:
        try:
            fetched = await self._client.fetch(
                engine, "POST", b"/tokenize", ask.body, self._deadline_seconds
            )
        except UpstreamError:
            return NoTokens.ENGINE_FAILED
        return await asyncio.to_thread(read_answer, fetched) if is_large else read_answer(fetched)
