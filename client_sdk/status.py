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
class DriveStatus:
    """A directory of the SSD tier."""

    path: str
    drive_id: str
    """Empty until it was there once."""
    state: str
    capacity_bytes: int
    used_bytes: int
    written_bytes_total: int
    """Over all lives: the wear."""
    failed_reads: int
    failed_writes: int


@dataclass(frozen=True, slots=True)
class PinStatus:
    """Operators' pins on a node. The limit is that of hard pins."""

    hard_blocks: int = 0
    soft_blocks: int = 0
    hard_bytes: int = 0
    limit_bytes: int = 0


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
    drives: tuple[DriveStatus, ...] = ()
    pins: PinStatus = PinStatus()


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
        drives=tuple(
            DriveStatus(
                drive.path,
                drive.drive_id,
                drive.state,
                drive.capacity_bytes,
                drive.used_bytes,
                drive.written_bytes_total,
                drive.failed_reads,
                drive.failed_writes,
            )
            for drive in message.drives
        ),
        pins=PinStatus(
            message.pins.hard_blocks,
            message.pins.soft_blocks,
            message.pins.hard_bytes,
            message.pins.limit_bytes,
        ),
    )
