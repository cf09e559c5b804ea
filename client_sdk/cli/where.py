"""Where a prompt's blocks are: per node how far its hit goes, tier by tier, and why it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client_sdk.cli.chain_story import (
    AskedChain,
    EngineWhere,
    NodeWhere,
    engine_where,
    hint_of,
    node_where,
)
from client_sdk.cli.http_json import post_json
from client_sdk.cli.remote import CALL_SECONDS, indexed_nodes
from client_sdk.index_client import IndexClient, IndexedNode
from client_sdk.tls import Tls
from emberkv_proto.chains import chain_hashes
from emberkv_proto.errors import ConfigError, EmberError, InvalidRequestError
from emberkv_proto.events import Keys
from emberkv_proto.hashing import index_keys
from emberkv_proto.request_keys import adapter_key, salt_bytes
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash, EngineInfo

EXPLAIN_SECONDS = 30.0
NO_KEYS: Keys = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Where:
    """A chain and who holds it. `route` is what the router's /route/explain said."""

    model: str
    """Empty: hashes were given, and nobody can say whose."""
    prompt_tokens: int
    block_tokens: int
    """0 where hashes were given."""
    hashes: tuple[BlockHash, ...]
    nodes: tuple[NodeWhere, ...]
    engines: tuple[EngineWhere, ...]
    """Those whose own HBM events are followed, and whose blocks are called alike."""
    hint: str
    """What to look at when nobody has anything."""
    route: dict[str, Any] | None
    route_problem: str = ""


@dataclass(frozen=True, slots=True)
class WhereQuery:
    """What is looked for: a text, or token ids, or hashes when given. `model` may be empty if only
    one is served."""

    index_address: str
    router_url: str
    model: str
    prompt: str
    token_ids: tuple[int, ...] | None
    tls: Tls | None = None
    """Towards the index."""
    hashes: tuple[BlockHash, ...] | None = None
    salt: str = ""
    """Cache salt of the request."""
    adapter: Adapter | None = None


def read_tokens(text: str) -> list[int]:
    """Token ids from a file (`@path`) or from the text itself: JSON, or numbers with commas."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {text[1:]} cannot be read: {error}") from None
    try:
        loaded = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except ValueError:
        raise ConfigError("token ids must be numbers with commas between, or a JSON list") from None
    if any(type(token) is not int or not 0 <= token < 1 << 32 for token in loaded):
        raise ConfigError("token ids must be integers in 0..4294967295")
    tokens: list[int] = loaded
    return tokens


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as it is in the hashes."""

    name: str
    weights_id: str

    @staticmethod
    def parse(text: str) -> Adapter:
        """NAME=WEIGHTS_ID. Raises ConfigError."""
        name, equals, weights_id = text.partition("=")
        if not (name and equals and weights_id):
            raise ConfigError(
                "give an adapter as NAME=WEIGHTS_ID; its blocks are told apart by both"
            )
        return Adapter(name, weights_id)


def read_hashes(text: str) -> tuple[BlockHash, ...]:
    """Block hashes from a file (`@path`) or the text itself: a JSON list, what `where --json`
    printed, or hexadecimal words with commas or spaces between."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hash file {text[1:]} cannot be read: {error}") from None
    words: Any = text.replace(",", " ").split()
    if text.lstrip().startswith(("[", "{")):
        try:
            loaded = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the hashes are no JSON: {error}") from None
        words = loaded.get("blocks") if isinstance(loaded, dict) else loaded
    try:
        hashes = tuple(BlockHash(bytes.fromhex(word)) for word in words)
    except (TypeError, ValueError):
        raise ConfigError("hashes must be hexadecimal words, or a JSON list of them") from None
    if any(len(found) != BLOCK_HASH_BYTES for found in hashes):
        raise ConfigError(f"a block hash has {2 * BLOCK_HASH_BYTES} hexadecimal digits")
    return hashes


def choose_engine(engines: Sequence[EngineInfo], model: str) -> EngineInfo:
    """The engine whose namespace the chain is hashed in.

    Raises:
        ConfigError: no engine announced, or several models and none named.
    """
    if not engines:
        raise ConfigError("no engine announced; blocks cannot be hashed without its namespace")
    served = ", ".join(sorted({engine.model for engine in engines}))
    if model:
        engines = [engine for engine in engines if engine.model == model]
    kinds = {engine.namespace_id: engine for engine in engines}
    if not kinds:
        raise ConfigError(f"no engine announced model {model!r}; there is {served}")
    if len(kinds) > 1:
        names = ", ".join(sorted({engine.model for engine in kinds.values()}))
        raise ConfigError(f"engines of several namespaces announced ({names}); name one: --model")
    return next(iter(kinds.values()))


async def run_where(query: WhereQuery) -> Where:
    """Ask the index which nodes hold the prompt, and the router what it would do with it.

    Raises:
        ConfigError: nothing to look for, or no single namespace to hash it in.
        UnavailableError: index or engine (for the prompt's token ids) away. A router that is away
        is told in the answer.
    """
    _check_asked(query)
    index = IndexClient(query.index_address, timeout_seconds=CALL_SECONDS, tls=query.tls)
    try:
        nodes = await indexed_nodes(index)
        if query.hashes is not None:
            chain = AskedChain(query.hashes)
        else:
            followed = (await index.explain(NO_KEYS)).engines
            chain = _asked(query, await find_chain(query, nodes, [f.engine for f in followed]))
        hits = await index.query(_keys(chain.hashes)) if chain.hashes else []
        traced = await index.explain(_keys(chain.hashes), timeout_seconds=EXPLAIN_SECONDS)
    finally:
        await index.close()
    by_id = {node.node_id: node for node in traced.nodes}
    by_hit = {hit.node_id: hit for hit in hits}
    rows = tuple(
        node_where(node, by_id.get(node.node_id), chain, by_hit.get(node.node_id)) for node in nodes
    )
    wheres = {row.node_id: row for row in rows}
    nothing = bytes(len(chain.hashes))
    engines = tuple(
        engine_where(
            found,
            wheres.get(found.node_id),
            by_id[found.node_id].tiers if found.node_id in by_id else nothing,
        )
        for found in traced.engines
        if chain.engine is None or found.engine.namespace_id == chain.engine.namespace_id
    )
    hint = hint_of(chain, rows, engines)
    if chain.engine is None:
        problem = "hashes were given, and a request is routed by its tokens"
        return Where("", 0, 0, chain.hashes, rows, engines, hint, None, problem)
    model = chain.engine.model
    route, problem = await asyncio.to_thread(_explain, query, model, chain.tokens)
    return Where(
        model,
        len(chain.tokens),
        chain.engine.block_tokens,
        chain.hashes,
        rows,
        engines,
        hint,
        route,
        problem,
    )


def _keys(hashes: Sequence[BlockHash]) -> Keys:
    return index_keys(hashes) if hashes else NO_KEYS


def _asked(query: WhereQuery, chain: PromptChain) -> AskedChain:
    adapter = query.adapter.name if query.adapter is not None else ""
    return AskedChain(chain.hashes, chain.tokens, chain.engine, bool(query.salt), adapter)


@dataclass(frozen=True, slots=True)
class PromptChain:
    """A prompt as the store knows it."""

    engine: EngineInfo
    tokens: tuple[int, ...]
    hashes: tuple[BlockHash, ...]


async def find_chain(
    query: WhereQuery, nodes: Sequence[IndexedNode], more: Sequence[EngineInfo] = ()
) -> PromptChain:
    """The blocks of the query's prompt, in the namespace of the engine that serves its model:
    one that a node names, or of `more`.

    Raises:
        ConfigError: nothing to look for, or no single namespace to hash it in.
        UnavailableError: the engine is away, for a prompt's token ids.
    """
    _check_asked(query)
    engine = choose_engine([*(e for node in nodes for e in node.engines), *more], query.model)
    tokens = query.token_ids
    if tokens is None:
        tokens = tuple(await asyncio.to_thread(_tokenize, engine, query.prompt))
    adapter = query.adapter
    hashes = chain_hashes(
        engine.hash_scheme,
        engine.namespace_id,
        list(tokens),
        engine.block_tokens,
        salt=salt_bytes(query.salt),
        extra_keys=() if adapter is None else (adapter_key(adapter.name, adapter.weights_id),),
    )
    return PromptChain(engine, tokens, tuple(hashes))


def _check_asked(query: WhereQuery) -> None:
    if not query.prompt and query.token_ids is None and query.hashes is None:
        raise ConfigError("give a prompt, or token ids with --tokens, or hashes with --hashes")


def _tokenize(engine: EngineInfo, prompt: str) -> list[int]:
    answer = post_json(f"{engine.url}/tokenize", {"model": engine.model, "prompt": prompt})
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequestError(f"{engine.url}/tokenize answered no list of tokens")
    return tokens


def _explain(
    query: WhereQuery, model: str, tokens: Sequence[int]
) -> tuple[dict[str, Any] | None, str]:
    body: dict[str, Any] = {"model": model, "prompt": list(tokens), "max_tokens": 1}
    if query.salt:
        body["cache_salt"] = query.salt
    try:
        return post_json(f"{query.router_url}/route/explain", body), ""
    except EmberError as error:
        return None, str(error)
