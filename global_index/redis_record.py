"""What the registry in Redis says of one node: one JSON object, checked when read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from emberkv_proto.convert import hash_scheme_from
from emberkv_proto.types import (
    EngineInfo,
    Incarnation,
    NamespaceId,
    NodeId,
    Seq,
    Tier,
    TierDigest,
)
from global_index.directory import MAX_NODE_ID_CHARS
from global_index.index import MAX_HOLDERS, Holder
from global_index.ingest import Counts, Exactness
from global_index.membership import Liveness
from global_index.views import NodeView

MAX_RECORD_BYTES = 1 << 20
MAX_ENGINES = 1024


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node whose rows are in Redis under `number`, as its writer last described it."""

    number: Holder
    writer: str
    address: str
    view: NodeView
    written_unix_seconds: float


def record_to_json(record: NodeRecord) -> str:
    view = record.view
    return json.dumps(
        {
            "number": record.number,
            "writer": record.writer,
            "address": record.address,
            "node": view.node_id,
            "incarnation": view.incarnation,
            "seq": view.seq,
            "liveness": view.liveness.value,
            "exactness": view.exactness.value,
            "state": view.reported_state,
            "grpc": view.grpc_address,
            "tiers": [
                [d.tier, d.blocks, d.xor, d.capacity_bytes, d.used_bytes] for d in view.tiers
            ],
            "engines": [
                [
                    *(e.engine_id, e.url, e.model, e.namespace_id.hex()),
                    *(e.block_tokens, e.role, e.dp_rank),
                    *(e.events_endpoint, e.replay_endpoint, e.engine_block_tokens),
                    *([e.hash_scheme.value] if e.hash_scheme.value else []),
                ]
                for e in view.engines
            ],
            "written": record.written_unix_seconds,
        },
        separators=(",", ":"),
    )


def fixed_part(record: NodeRecord) -> tuple[Any, ...]:
    """What readers keep between two versions of the registry."""
    view = record.view
    return (
        *(record.number, record.writer, record.address, view.incarnation, view.liveness),
        *(view.reported_state, view.grpc_address, view.engines),
    )


def record_from_json(text: bytes) -> NodeRecord:
    """Raises ValueError on whatever no writer of ours writes."""
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(text)} bytes")
    try:
        raw = json.loads(text)
        tiers = tuple(_digest(*item) for item in raw["tiers"])
        engines = tuple(_engine(*item) for item in raw["engines"])
        view = NodeView(
            node_id=NodeId(_text(raw["node"], MAX_NODE_ID_CHARS)),
            incarnation=Incarnation(_count(raw["incarnation"])),
            seq=Seq(_count(raw["seq"])),
            liveness=Liveness(raw["liveness"]),
            exactness=Exactness(raw["exactness"]),
            reported_state=_text(raw["state"]),
            grpc_address=_text(raw["grpc"]),
            tiers=tiers,
            engines=engines,
            lag_seconds=0.0,
            counts=Counts(),
            anomalies=0,
            dropped=0,
        )
        number = _count(raw["number"])
        record = NodeRecord(
            Holder(number),
            _text(raw["writer"]),
            _text(raw["address"]),
            view,
            float(raw["written"]),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a node's record: {error!r}") from None
    if not view.node_id or number >= MAX_HOLDERS or len(engines) > MAX_ENGINES:
        raise ValueError(f"node {view.node_id!r} has number {number}, {len(engines)} engines")
    return record


def _digest(tier: Any, blocks: Any, xor: Any, capacity: Any, used: Any) -> TierDigest:
    return TierDigest(Tier(tier), _count(blocks), _count(xor), _count(capacity), _count(used))


def _engine(
    engine_id: Any,
    url: Any,
    model: Any,
    namespace: Any,
    block_tokens: Any,
    role: Any,
    rank: Any,
    events: Any,
    replay: Any,
    engine_block_tokens: Any,
    hash_scheme: Any = "",
) -> EngineInfo:
    return EngineInfo(
        _text(engine_id),
        _text(url),
        _text(model),
        NamespaceId(bytes.fromhex(_text(namespace))),
        _count(block_tokens),
        _text(role),
        _count(rank),
        _text(events),
        _text(replay),
        _count(engine_block_tokens),
        hash_scheme_from(_text(hash_scheme)),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any, longest: int = 4096) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{str(value)[:80]!r} is no text of at most {longest} characters")
    return value
