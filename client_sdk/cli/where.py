"""Where a prompt's blocks are: per node how far its hit goes, tier by tier, and why it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from client_sdk.cli.http_json import post_json
from client_sdk.cli.remote import CALL_SECONDS, indexed_nodes
from client_sdk.index_client import IndexClient, IndexedNode
from client_sdk.tls import Tls
from emberkv_proto.errors import ConfigError, EmberError, InvalidRequestError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import BlockHash, EngineInfo, NodeHit, NodeId


@dataclass(frozen=True, slots=True)
class NodeWhere:
    """One node's part of a chain."""

    node_id: NodeId
    hit_blocks: int
    dram_blocks: int
    ssd_blocks: int
    ends_because: str


@dataclass(frozen=True, slots=True)
class Where:
    """A prompt's chain and who holds it. `route` is what the router's /route/explain said."""

    model: str
    prompt_tokens: int
    block_tokens: int
    hashes: tuple[BlockHash, ...]
    nodes: tuple[NodeWhere, ...]
    route: dict[str, Any] | None
    route_problem: str = ""


@dataclass(frozen=True, slots=True)
class WhereQuery:
    """What is looked for: a text, or token ids when given. `model` may be empty if only one is
    served."""

    index_address: str
    router_url: str
    model: str
    prompt: str
    token_ids: tuple[int, ...] | None
    tls: Tls | None = None
    """Towards the index."""


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


def choose_engine(nodes: Sequence[IndexedNode], model: str) -> EngineInfo:
    """The engine whose namespace the chain is hashed in.

    Raises:
        ConfigError: no engine announced, or several models and none named.
    """
    engines = [engine for node in nodes for engine in node.engines]
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
        chain = await find_chain(query, nodes)
        hits = await index.query(index_keys(chain.hashes)) if chain.hashes else []
    finally:
        await index.close()
    found = {hit.node_id: hit for hit in hits}
    blocks = len(chain.hashes)
    rows = tuple(node_where(node, found.get(node.node_id), blocks) for node in nodes)
    engine = chain.engine
    route, problem = await asyncio.to_thread(_explain, query.router_url, engine.model, chain.tokens)
    return Where(
        engine.model, len(chain.tokens), engine.block_tokens, chain.hashes, rows, route, problem
    )


@dataclass(frozen=True, slots=True)
class PromptChain:
    """A prompt as the store knows it."""

    engine: EngineInfo
    tokens: tuple[int, ...]
    hashes: tuple[BlockHash, ...]


async def find_chain(query: WhereQuery, nodes: Sequence[IndexedNode]) -> PromptChain:
    """The blocks of the query's prompt, in the namespace of the engine that serves its model.

    Raises:
        ConfigError: nothing to look for, or no single namespace to hash it in.
        UnavailableError: the engine is away, for a prompt's token ids.
    """
    _check_asked(query)
    engine = choose_engine(nodes, query.model)
    tokens = query.token_ids
    if tokens is None:
        tokens = tuple(await asyncio.to_thread(_tokenize, engine, query.prompt))
    hashes = block_hashes(engine.namespace_id, list(tokens), engine.block_tokens)
    return PromptChain(engine, tokens, tuple(hashes))


def _check_asked(query: WhereQuery) -> None:
    if not query.prompt and query.token_ids is None:
        raise ConfigError("give a prompt, or token ids with --tokens")


def _tokenize(engine: EngineInfo, prompt: str) -> list[int]:
    answer = post_json(f"{engine.url}/tokenize", {"model": engine.model, "prompt": prompt})
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequestError(f"{engine.url}/tokenize answered no list of tokens")
    return tokens


def _explain(
    router_url: str, model: str, tokens: Sequence[int]
) -> tuple[dict[str, Any] | None, str]:
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1}
    try:
        return post_json(f"{router_url}/route/explain", body), ""
    except EmberError as error:
        return None, str(error)


def node_where(node: IndexedNode, hit: NodeHit | None, blocks: int) -> NodeWhere:
    found = hit or NodeHit(node.node_id, 0, 0, 0)
    if node.state != "ok":
        reason = f"the node is {node.state}"
    elif not blocks:
        reason = "the prompt fills no block"
    elif found.hit_blocks == blocks:
        reason = "all full blocks are there"
    else:
        reason = f"block {found.hit_blocks} is in neither DRAM nor SSD"
        if node.exactness != "exact":
            reason += f" as far as a {node.exactness} index knows"
    return NodeWhere(node.node_id, found.hit_blocks, found.dram_blocks, found.ssd_blocks, reason)


def where_json(where: Where) -> dict[str, Any]:
    return {
        "model": where.model,
        "prompt_tokens": where.prompt_tokens,
        "block_tokens": where.block_tokens,
        "blocks": [block.hex() for block in where.hashes],
        "nodes": [
            {
                "node_id": node.node_id,
                "hit_blocks": node.hit_blocks,
                "hit_tokens": node.hit_blocks * where.block_tokens,
                "dram_blocks": node.dram_blocks,
                "ssd_blocks": node.ssd_blocks,
                "ends_because": node.ends_because,
            }
            for node in where.nodes
        ],
        "route": where.route,
        "route_problem": where.route_problem,
    }


def print_where(console: Console, where: Where) -> None:
    partial = where.prompt_tokens % where.block_tokens
    console.print(
        f"{where.prompt_tokens} tokens of {where.model}: {len(where.hashes)} full blocks of"
        f" {where.block_tokens}, {partial} tokens in the last, unstored one",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("node", "hit blocks", "DRAM", "SSD"):
        table.add_column(heading, no_wrap=True)
    table.add_column("the hit ends because")
    for node in where.nodes:
        table.add_row(
            node.node_id,
            f"{node.hit_blocks}/{len(where.hashes)}",
            str(node.dram_blocks),
            str(node.ssd_blocks),
            node.ends_because,
        )
    console.print(table)
    if where.route is None:
        console.print(f"no word from the router: {where.route_problem}", markup=False)
    else:
        _print_route(console, where.route)


def _print_route(console: Console, route: dict[str, Any]) -> None:
    """The router's terms for each engine. Its answer is another version's to change: ask gently."""
    console.print(f"\nthe router would choose {route.get('chosen') or 'none'}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for heading in ("total ms", "queue", "fetch", "prefill", "tokens to compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    for engine in route.get("engines", ()):
        parts = ("total_seconds", "queue_seconds", "fetch_seconds", "prefill_seconds")
        times = [f"{1000 * float(engine.get(part, 0.0)):.1f}" for part in parts]
        name = str(engine.get("engine", "?"))
        table.add_row(name, *times, str(engine.get("uncached_tokens", "?")))
    console.print(table)
