"""What a daemon says of itself to operators."""

from __future__ import annotations

from dataclasses import dataclass

from emberkv_proto.convert import engine_from_wire, tier_from_wire
from emberkv_proto.types import EngineInfo, Incarnation, NodeId, Seq, Tier
from emberkv_proto.v1 import store_pb2


@dataclass(frozen=True, slots=True)
class TierStatus:
    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    state: str
    """"ok", "degraded: <why>" or "off"."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A store daemon at one moment."""

    node_id: NodeId
    incarnation: Incarnation
    state: str
    """"recovering", "serving" or "draining"."""
    uptime_seconds: float
    tiers: tuple[TierStatus, ...]
    engines: tuple[EngineInfo, ...]
    sessions: int
    leases: int
    staged_blocks: int
    seq: Seq
    counters: dict[str, float]
    version: str


def status_from_wire(message: store_pb2.StatusResponse) -> NodeStatus:
    """Raises InvalidRequestError on an unknown tier or a broken namespace id."""
    return NodeStatus(
        node_id=NodeId(message.node_id),
        incarnation=Incarnation(message.incarnation),
        state=message.state,
        uptime_seconds=message.uptime_seconds,
        tiers=tuple(
            TierStatus(
                tier_from_wire(row.tier),
                row.capacity_bytes,
                row.used_bytes,
                row.blocks,
                row.state,
            )
            for row in message.tiers
        ),
        engines=tuple(engine_from_wire(engine) for engine in message.engines),
        sessions=message.sessions,
        leases=message.leases,
        staged_blocks=message.staged_blocks,
        seq=Seq(message.seq),
        counters=dict(message.counters),
        version=message.version,
    )
