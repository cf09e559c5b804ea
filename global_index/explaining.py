"""Who has which blocks of a chain, block by block, without stopping the index. For people."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import Keys
from emberkv_proto.types import EngineInfo, NodeId, Tier
from global_index.embedded import GlobalIndex
from global_index.hbm.engines import EngineKey

MAX_EXPLAINED_BLOCKS = 16384
PIECE_BLOCKS = 512
"""Looked up in one turn of the loop: some milliseconds."""
HBM = 1 << (Tier.HBM - 1)


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """`tiers` has a byte a block: 1 HBM, 2 DRAM, 4 SSD, added; 0 where the node has none."""

    node_id: NodeId
    state: str
    exactness: str
    tiers: bytes


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """What an engine has in its own HBM; the rest is its node's."""

    engine: EngineInfo
    node_id: NodeId
    state: str
    """Of its event stream: "current" or "away"."""
    tiers: bytes


@dataclass(frozen=True, slots=True)
class Traces:
    nodes: tuple[NodeTrace, ...]
    engines: tuple[EngineTrace, ...]


async def explain(index: GlobalIndex, keys: Keys) -> Traces:
    """Trace a chain on all nodes and followed engines, those left out of answers included.

    The chain is looked up in pieces, with queries and events between. What other processes follow
    is asked of Redis; while that is away, their nodes are left out.

    Raises InvalidRequestError for a chain that is too long.
    """
    if keys.size > MAX_EXPLAINED_BLOCKS:
        raise InvalidRequestError(
            f"a chain of {keys.size} blocks; at most {MAX_EXPLAINED_BLOCKS} are explained"
        )
    nodes: dict[NodeId, bytearray] = {}
    engines: dict[EngineKey, bytearray] = {}
    for start in range(0, keys.size, PIECE_BLOCKS):
        piece = keys[start : start + PIECE_BLOCKS]
        for node in index.explain(piece):
            tiers = nodes.setdefault(node.node_id, bytearray(keys.size))
            for number, held in enumerate(node.tiers, start=start):
                tiers[number] = sum(1 << (tier - 1) for tier in held)
        if index.shared is not None:
            for node_id, found in (await index.shared.trace(piece)).items():
                tiers = nodes.setdefault(node_id, bytearray(keys.size))
                tiers[start : start + len(found)] = found
        for engine in index.explain_engines(piece):
            tiers = engines.setdefault(engine.key, bytearray(keys.size))
            for number, is_there in enumerate(engine.hbm, start=start):
                tiers[number] = HBM * is_there
        await asyncio.sleep(0)
    nothing = bytes(keys.size)
    return Traces(
        tuple(
            NodeTrace(
                view.node_id,
                view.liveness.value,
                view.exactness.value,
                bytes(nodes.get(view.node_id, nothing)),
            )
            for view in index.nodes()
            if view.node_id in nodes or not keys.size
        ),
        tuple(
            EngineTrace(
                view.info,
                view.key.node_id,
                view.state.value,
                bytes(engines.get(view.key, nothing)),
            )
            for view in index.engines()
        ),
    )
