"""Nodes and chains as the index tells of them."""

from __future__ import annotations

from dataclasses import dataclass

from emberkv_proto.events import Keys
from emberkv_proto.types import EngineInfo, Incarnation, NodeId, Seq, Tier, TierDigest
from global_index.index import Holder
from global_index.ingest import Counts, Exactness
from global_index.membership import Liveness


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the index knows it."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    liveness: Liveness
    exactness: Exactness
    reported_state: str
    grpc_address: str
    tiers: tuple[TierDigest, ...]
    """Rows as the index counts them; capacity and use as the node last reported them."""
    engines: tuple[EngineInfo, ...]
    lag_seconds: float
    """Age of the newest event or report."""
    counts: Counts
    anomalies: int
    """Rows stored twice or removed when absent."""
    dropped: int
    """Rows refused because the index was full."""


@dataclass(frozen=True, slots=True)
class FollowedNode:
    """A node with rows that queries see, and where it is followed."""

    address: str
    node_id: NodeId
    holder: Holder
    liveness: Liveness


@dataclass(frozen=True, slots=True)
class ChainTrace:
    """Where one node's run of a chain ends, and in which tiers it has each block."""

    node_id: NodeId
    liveness: Liveness
    exactness: Exactness
    hit_blocks: int
    tiers: tuple[tuple[Tier, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class NodeRows:
    """All rows of one node right after event `seq`."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    keys: dict[Tier, Keys]
