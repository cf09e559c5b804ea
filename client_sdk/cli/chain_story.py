"""How far a chain reaches on a node or in an engine, and why not further. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from client_sdk.index_client import IndexedNode, TracedEngine, TracedNode
from emberkv_proto.types import BlockHash, EngineInfo, NodeHit, NodeId, Tier

HBM, DRAM, SSD = (1 << (tier - 1) for tier in (Tier.HBM, Tier.DRAM, Tier.SSD))


class EndReason(str, Enum):
    """Why a hit ends where it ends."""

    ALL_THERE = "all_there"
    NO_FULL_BLOCK = "no_full_block"
    NODE_AWAY = "node_away"
    """Suspect, gone or removed: it is in no answer, whatever it has."""
    HOLE = "hole"
    """A block is missing, and later ones are there."""
    STORED_NO_FURTHER = "stored_no_further"
    NOTHING_STORED = "nothing_stored"
    NOT_TRACED = "not_traced"
    """Another process keeps the node's rows, in Redis: here only the hit's length is known."""
    OTHER_NAMESPACE = "other_namespace"
    """Nothing is there, and the node's engines of this model name their blocks otherwise."""
    OTHER_MODEL = "other_model"
    """Nothing is there, and the node's engines serve other models."""


@dataclass(frozen=True, slots=True)
class TierRun:
    """Blocks first..last, which are in the same tiers; in none: they are missing."""

    first: int
    last: int
    tiers: tuple[Tier, ...]

    def __str__(self) -> str:
        where = "+".join(tier.name for tier in self.tiers) or "missing"
        return f"{_span(self.first, self.last)} {where}"


@dataclass(frozen=True, slots=True)
class NodeWhere:
    """One node's part of a chain. Hit blocks are counted at their fastest tier."""

    node_id: NodeId
    hit_blocks: int
    dram_blocks: int
    ssd_blocks: int
    reason: EndReason
    ends_because: str
    runs: tuple[TierRun, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineWhere:
    """One engine's part: its own HBM, and what its node has between."""

    engine_id: str
    dp_rank: int
    node_id: NodeId
    state: str
    """Of its event stream."""
    hit_blocks: int
    hbm_blocks: int
    """Of the hit."""
    reason: EndReason
    ends_because: str
    runs: tuple[TierRun, ...] = ()


@dataclass(frozen=True, slots=True)
class AskedChain:
    """What is looked for. Without an engine (hashes were given) namespaces cannot be compared."""

    hashes: tuple[BlockHash, ...]
    tokens: tuple[int, ...] = ()
    engine: EngineInfo | None = None
    is_salted: bool = False
    adapter: str = ""


def runs_of(tiers: bytes) -> tuple[TierRun, ...]:
    """Neighbouring blocks that are in the same tiers, as one."""
    runs: list[TierRun] = []
    first = 0
    for number in range(1, len(tiers) + 1):
        if number == len(tiers) or tiers[number] != tiers[first]:
            held = tuple(tier for tier in Tier if tiers[first] >> (tier - 1) & 1)
            runs.append(TierRun(first, number - 1, held))
            first = number
    return tuple(runs)


def node_where(
    node: IndexedNode, traced: TracedNode | None, chain: AskedChain, found: NodeHit | None = None
) -> NodeWhere:
    """What a node has of the chain, as traced; where it could not be, by its hit alone."""
    if traced is None:
        return _untraced(node, found or NodeHit(node.node_id, 0, 0, 0), chain)
    tiers = traced.tiers
    hit = _leading(tiers)
    dram = sum(1 for held in tiers[:hit] if held & DRAM)
    reason, text = _end(tiers, hit, "in neither DRAM nor SSD")
    if node.state != "ok" and chain.hashes:
        reason, text = EndReason.NODE_AWAY, f"the node is {node.state}, so it is in no answer"
        if hit:
            text += f"; {_blocks(hit)} at the head would count"
        hit = dram = 0
    elif reason is EndReason.NOTHING_STORED and chain.engine is not None:
        reason, text = _strangers(node, chain.engine) or (reason, text)
    if reason not in (EndReason.ALL_THERE, EndReason.NO_FULL_BLOCK) and node.exactness != "exact":
        text += f" (as far as a {node.exactness} index knows)"
    return NodeWhere(node.node_id, hit, dram, hit - dram, reason, text, runs_of(tiers))


def _untraced(node: IndexedNode, hit: NodeHit, chain: AskedChain) -> NodeWhere:
    reason, text = _end(bytes([DRAM]) * hit.hit_blocks, hit.hit_blocks, "")
    if hit.hit_blocks < len(chain.hashes):
        reason = EndReason.NOT_TRACED
        text = f"block {hit.hit_blocks} does not count; another process keeps this node's rows"
        if node.state != "ok":
            reason, text = EndReason.NODE_AWAY, f"the node is {node.state}, so it is in no answer"
    return NodeWhere(node.node_id, hit.hit_blocks, hit.dram_blocks, hit.ssd_blocks, reason, text)


def engine_where(traced: TracedEngine, node: NodeWhere | None, node_tiers: bytes) -> EngineWhere:
    """What an engine finds: in its HBM, and between it on its node, if that is in answers."""
    is_away = traced.state != "current"
    own = bytes(len(traced.tiers)) if is_away else traced.tiers
    counts_node = node is not None and node.reason is not EndReason.NODE_AWAY
    around = node_tiers if counts_node else bytes(len(own))
    tiers = bytes(a | b for a, b in zip(own, around, strict=True))
    hit = _leading(tiers)
    reason, text = _end(tiers, hit, "neither in its HBM nor on its node")
    if is_away:
        text += f"; its event stream is {traced.state}, so its HBM does not count"
    engine = traced.engine
    hbm = sum(1 for held in tiers[:hit] if held & HBM)
    return EngineWhere(
        engine.engine_id,
        engine.dp_rank,
        traced.node_id,
        traced.state,
        hit,
        hbm,
        reason,
        text,
        runs_of(tiers),
    )


def hint_of(chain: AskedChain, nodes: Sequence[NodeWhere], engines: Sequence[EngineWhere]) -> str:
    """What to look at when nobody has anything; empty when somebody has."""
    told = [*(node.runs for node in nodes), *(engine.runs for engine in engines)]
    if not chain.hashes or any(run.tiers for runs in told for run in runs):
        return ""
    if chain.engine is None:
        return "Nobody has a block of this chain: it is not stored, or was evicted everywhere."
    salt = "with the salt given" if chain.is_salted else "without a cache salt"
    adapter = f"with adapter {chain.adapter}" if chain.adapter else "without an adapter"
    return (
        f"Nobody has a block of this chain, hashed for {chain.engine.model}"
        f" (namespace {chain.engine.namespace_id.hex()}, blocks of {chain.engine.block_tokens}"
        f" tokens, {salt}, {adapter}). It is not stored, or was evicted everywhere, or was stored"
        " with another salt (--salt), adapter (--adapter) or token ids (--tokens): those are other"
        " blocks."
    )


def _leading(tiers: bytes) -> int:
    hit = tiers.find(0)
    return len(tiers) if hit < 0 else hit


def _end(tiers: bytes, hit: int, nowhere: str) -> tuple[EndReason, str]:
    if not tiers:
        return EndReason.NO_FULL_BLOCK, "the prompt fills no block"
    if hit == len(tiers):
        return EndReason.ALL_THERE, "all full blocks are there"
    if not any(tiers):
        return EndReason.NOTHING_STORED, "no block of this chain is here"
    last = len(tiers) - 1
    later = sum(1 for held in tiers[hit:] if held)
    if not later:
        return (
            EndReason.STORED_NO_FURTHER,
            f"{_name(hit, last)} {'is' if hit == last else 'are'} {nowhere}",
        )
    end = hit
    while end < last and not tiers[end + 1]:
        end += 1
    return (
        EndReason.HOLE,
        f"{_name(hit, end)} {'is' if hit == end else 'are'} {nowhere};"
        f" {_blocks(later)} behind the hole cannot be used",
    )


def _strangers(node: IndexedNode, engine: EngineInfo) -> tuple[EndReason, str] | None:
    """Why a node that has nothing could not have any: its engines name their blocks otherwise."""
    if not node.engines or any(e.namespace_id == engine.namespace_id for e in node.engines):
        return None
    if any(other.model == engine.model for other in node.engines):
        return (
            EndReason.OTHER_NAMESPACE,
            f"its engines of {engine.model} are of another namespace (weights, KV dtype, layout or"
            " block size differ), which shares no block with this one",
        )
    models = ", ".join(sorted({other.model for other in node.engines}))
    return EndReason.OTHER_MODEL, f"its engines serve other models ({models})"


def _name(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {_span(first, last)}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _blocks(count: int) -> str:
    return f"{count} block" + ("s" if count != 1 else "")
