"""Between protobuf messages and the value types. Checks what comes from the wire."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from emberkv_proto.buckets import BUCKETS, MOST_REPAIRED, bucket_numbers
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    Event,
    EventBatch,
    SnapshotPage,
    TierCleared,
)
from emberkv_proto.types import (
    BLOCK_HASH_BYTES,
    NAMESPACE_ID_BYTES,
    SALT_ID_BYTES,
    BlockHash,
    BucketChoice,
    BucketXors,
    ChainHits,
    EngineHit,
    EngineInfo,
    HashScheme,
    Incarnation,
    NamespaceId,
    NodeHit,
    NodeId,
    NodeReport,
    SaltId,
    Seq,
    Tier,
    TierDigest,
)
from emberkv_proto.v1 import common_pb2, index_pb2
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

U64 = np.dtype("<u8")
_HASH = np.dtype((np.void, BLOCK_HASH_BYTES))
MAX_KEYS_PER_MESSAGE = 1 << 20
_FEW = 16
"""From so many on numpy is faster than what needs no array."""
MAX_ENGINE_BYTES = 4096
"""Of one engine's description, so that a node's report with all of them fits a message."""


def hashes_to_wire(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def hashes_from_wire(packed: bytes) -> list[BlockHash]:
    """The hashes of a chain run.

    Raises:
        InvalidRequestError: a length that is no multiple of 32, over the limit, or a hash twice.
    """
    count, rest = divmod(len(packed), BLOCK_HASH_BYTES)
    if rest or count > MAX_BLOCKS_PER_CALL:
        raise InvalidRequestError(
            f"hashes has {len(packed)} bytes; wanted 32 for each of at most {MAX_BLOCKS_PER_CALL}"
        )
    hashes: list[BlockHash] = (
        np.frombuffer(packed, _HASH).tolist()
        if count >= _FEW
        else [BlockHash(packed[i : i + 32]) for i in range(0, len(packed), 32)]
    )
    if count > 1 and len(set(hashes)) != count:
        raise InvalidRequestError("hashes names a block twice; no chain does")
    return hashes


def parent_from_wire(packed: bytes) -> BlockHash | None:
    if packed and len(packed) != BLOCK_HASH_BYTES:
        raise InvalidRequestError(f"parent has {len(packed)} bytes; wanted 32, or none")
    return BlockHash(packed) if packed else None


def salt_id_from_wire(packed: bytes) -> SaltId | None:
    if packed and len(packed) != SALT_ID_BYTES:
        raise InvalidRequestError(f"salt_id has {len(packed)} bytes; wanted 16, or none")
    if packed and not any(packed):
        raise InvalidRequestError("salt_id is all zeros, which stands for nobody on disk")
    return SaltId(packed) if packed else None


def salt_ids_to_wire(salt_ids: Sequence[SaltId | None]) -> bytes:
    """16 bytes each, zeros for nobody; nothing when all are nobody's."""
    if not any(salt_ids):
        return b""
    return b"".join(salt_id or bytes(SALT_ID_BYTES) for salt_id in salt_ids)


def salt_ids_from_wire(packed: bytes, blocks: int) -> tuple[SaltId | None, ...]:
    """One for each block. Raises InvalidRequestError on another length."""
    if not packed:
        return (None,) * blocks
    if len(packed) != blocks * SALT_ID_BYTES:
        raise InvalidRequestError(f"salt_ids has {len(packed)} bytes for {blocks} blocks")
    each = (packed[at : at + SALT_ID_BYTES] for at in range(0, len(packed), SALT_ID_BYTES))
    return tuple(SaltId(salt_id) if any(salt_id) else None for salt_id in each)


def u64s_to_wire(values: Sequence[int] | npt.NDArray[np.uint64]) -> bytes:
    if len(values) < _FEW:
        return struct.pack(f"<{len(values)}Q", *values)
    return np.asarray(values, dtype=U64).tobytes()


def u64s_from_wire(packed: bytes) -> list[int]:
    """Raises InvalidRequestError on a length that is no multiple of 8."""
    if len(packed) % 8:
        raise InvalidRequestError(f"packed u64 field has {len(packed)} bytes")
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def u64_array_from_wire(packed: bytes) -> array[int]:
    """As `u64s_from_wire`, without an object for each number."""
    if len(packed) % 8:
        raise InvalidRequestError(f"packed u64 field has {len(packed)} bytes")
    values = array("Q", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def keys_from_wire(packed: bytes) -> npt.NDArray[np.uint64]:
    """Raises InvalidRequestError on a broken length, too many keys, or the reserved key 0."""
    if len(packed) % 8 or len(packed) // 8 > MAX_KEYS_PER_MESSAGE:
        raise InvalidRequestError(f"keys has {len(packed)} bytes; wanted 8 for each key")
    keys = np.frombuffer(packed, dtype=U64)
    if keys.size and not keys.all():
        raise InvalidRequestError("index key 0 is reserved")
    return keys


def tier_from_wire(value: int) -> Tier:
    try:
        return Tier(value)
    except ValueError:
        raise InvalidRequestError(f"tier {value} is unknown") from None


def namespace_id_from_wire(packed: bytes) -> NamespaceId:
    if len(packed) != NAMESPACE_ID_BYTES:
        raise InvalidRequestError(f"namespace id has {len(packed)} bytes; wanted 16")
    return NamespaceId(packed)


def hash_scheme_from(name: str) -> HashScheme:
    """One that this version does not know is UNKNOWN."""
    try:
        return HashScheme(name)
    except ValueError:
        return HashScheme.UNKNOWN


def engine_to_wire(engine: EngineInfo) -> common_pb2.EngineInfo:
    return common_pb2.EngineInfo(
        engine_id=engine.engine_id,
        url=engine.url,
        model=engine.model,
        role=engine.role,
        dp_rank=engine.dp_rank,
        namespace_id=engine.namespace_id,
        block_tokens=engine.block_tokens,
        events_endpoint=engine.events_endpoint,
        replay_endpoint=engine.replay_endpoint,
        engine_block_tokens=engine.engine_block_tokens,
        hash_scheme=engine.hash_scheme.value,
    )


def engine_from_wire(message: common_pb2.EngineInfo) -> EngineInfo:
    """Raises InvalidRequestError when it is too long, or its namespace id is none."""
    size = message.ByteSize()
    if size > MAX_ENGINE_BYTES:
        raise InvalidRequestError(f"engine info has {size} bytes, limit is {MAX_ENGINE_BYTES}")
    return EngineInfo(
        engine_id=message.engine_id,
        url=message.url,
        model=message.model,
        namespace_id=namespace_id_from_wire(message.namespace_id),
        block_tokens=message.block_tokens,
        role=message.role or "both",
        dp_rank=message.dp_rank,
        events_endpoint=message.events_endpoint,
        replay_endpoint=message.replay_endpoint,
        engine_block_tokens=message.engine_block_tokens,
        hash_scheme=hash_scheme_from(message.hash_scheme),
    )


def event_to_wire(event: Event) -> index_pb2.Event:
    match event:
        case BlocksStored(tier, keys):
            stored = index_pb2.BlocksStored(tier=int(tier), keys=u64s_to_wire(keys))  # type: ignore[arg-type]
            return index_pb2.Event(stored=stored)
        case BlocksRemoved(tier, keys):
            removed = index_pb2.BlocksRemoved(tier=int(tier), keys=u64s_to_wire(keys))  # type: ignore[arg-type]
            return index_pb2.Event(removed=removed)
        case TierCleared(tier):
            return index_pb2.Event(cleared=index_pb2.TierCleared(tier=int(tier)))  # type: ignore[arg-type]


def event_from_wire(message: index_pb2.Event) -> Event:
    match message.WhichOneof("kind"):
        case "stored":
            stored = message.stored
            return BlocksStored(tier_from_wire(stored.tier), keys_from_wire(stored.keys))
        case "removed":
            removed = message.removed
            return BlocksRemoved(tier_from_wire(removed.tier), keys_from_wire(removed.keys))
        case "cleared":
            return TierCleared(tier_from_wire(message.cleared.tier))
        case kind:
            raise InvalidRequestError(f"event of kind {kind} is unknown")


def batch_to_wire(batch: EventBatch) -> index_pb2.EventBatch:
    return index_pb2.EventBatch(
        node_id=batch.node_id,
        incarnation=batch.incarnation,
        seq_first=batch.seq_first,
        events=[event_to_wire(event) for event in batch.events],
        sent_unix_seconds=batch.sent_unix_seconds,
    )


def batch_from_wire(message: index_pb2.EventBatch) -> EventBatch:
    return EventBatch(
        NodeId(message.node_id),
        Incarnation(message.incarnation),
        Seq(message.seq_first),
        tuple(event_from_wire(event) for event in message.events),
        message.sent_unix_seconds,
    )


def page_to_wire(page: SnapshotPage) -> index_pb2.SnapshotPage:
    return index_pb2.SnapshotPage(
        node_id=page.node_id,
        incarnation=page.incarnation,
        seq=page.seq,
        tier=int(page.tier),  # type: ignore[arg-type]
        keys=u64s_to_wire(page.keys),
        is_last=page.is_last,
    )


def page_from_wire(message: index_pb2.SnapshotPage) -> SnapshotPage:
    return SnapshotPage(
        NodeId(message.node_id),
        Incarnation(message.incarnation),
        Seq(message.seq),
        tier_from_wire(message.tier),
        keys_from_wire(message.keys),
        message.is_last,
    )


def digest_to_wire(digest: TierDigest) -> index_pb2.TierDigest:
    return index_pb2.TierDigest(
        tier=int(digest.tier),  # type: ignore[arg-type]
        blocks=digest.blocks,
        xor=digest.xor,
        capacity_bytes=digest.capacity_bytes,
        used_bytes=digest.used_bytes,
    )


def digest_from_wire(message: index_pb2.TierDigest) -> TierDigest:
    return TierDigest(
        tier_from_wire(message.tier),
        message.blocks,
        message.xor,
        message.capacity_bytes,
        message.used_bytes,
    )


def report_to_wire(report: NodeReport) -> index_pb2.NodeReport:
    return index_pb2.NodeReport(
        node_id=report.node_id,
        incarnation=report.incarnation,
        seq=report.seq,
        state=report.state,
        tiers=[digest_to_wire(digest) for digest in report.tiers],
        engines=[engine_to_wire(engine) for engine in report.engines],
        grpc_address=report.grpc_address,
        sent_unix_seconds=report.sent_unix_seconds,
        bucket_xors=[bucket_xors_to_wire(digest) for digest in report.bucket_xors],
    )


def report_from_wire(message: index_pb2.NodeReport) -> NodeReport:
    return NodeReport(
        NodeId(message.node_id),
        Incarnation(message.incarnation),
        Seq(message.seq),
        message.state,
        tuple(digest_from_wire(digest) for digest in message.tiers),
        tuple(engine_from_wire(engine) for engine in message.engines),
        message.grpc_address,
        message.sent_unix_seconds,
        tuple(bucket_xors_from_wire(digest) for digest in message.bucket_xors),
    )


def bucket_xors_to_wire(digest: BucketXors) -> index_pb2.BucketXors:
    return index_pb2.BucketXors(
        tier=int(digest.tier),  # type: ignore[arg-type]
        xors=u64s_to_wire(digest.xors),
    )


def bucket_xors_from_wire(message: index_pb2.BucketXors) -> BucketXors:
    """Raises InvalidRequestError unless there is one for each bucket."""
    if len(message.xors) != 8 * BUCKETS:
        raise InvalidRequestError(f"bucket xors have {len(message.xors)} bytes, not 8 a bucket")
    xors = np.frombuffer(message.xors, dtype=U64).tolist()
    return BucketXors(tier_from_wire(message.tier), tuple(xors))


def bucket_choice_to_wire(choice: BucketChoice) -> index_pb2.BucketChoice:
    return index_pb2.BucketChoice(
        tier=int(choice.tier),  # type: ignore[arg-type]
        buckets=bytes(choice.buckets),
    )


def bucket_choices_from_wire(
    messages: Sequence[index_pb2.BucketChoice],
) -> tuple[BucketChoice, ...]:
    """Raises InvalidRequestError when a tier or a bucket is named twice, or out of order."""
    if len(messages) > len(Tier):
        raise InvalidRequestError(f"buckets of {len(messages)} tiers; there are {len(Tier)}")
    choices = tuple(
        BucketChoice(tier_from_wire(message.tier), tuple(message.buckets)) for message in messages
    )
    if len({choice.tier for choice in choices}) < len(choices):
        raise InvalidRequestError("a tier's buckets are named twice")
    for choice in choices:
        if len(choice.buckets) > MOST_REPAIRED:
            raise InvalidRequestError(f"{len(choice.buckets)} buckets; take a snapshot")
        if any(a >= b for a, b in pairwise(choice.buckets)):
            raise InvalidRequestError("buckets must be ascending")
    return choices


def bucket_rows_to_wire(rows: BucketRows) -> index_pb2.BucketRows:
    return index_pb2.BucketRows(
        node_id=rows.node_id,
        incarnation=rows.incarnation,
        seq=rows.seq,
        tier=int(rows.tier),  # type: ignore[arg-type]
        bucket=rows.bucket,
        keys=u64s_to_wire(rows.keys),
    )


def bucket_rows_from_wire(message: index_pb2.BucketRows) -> BucketRows:
    """Raises InvalidRequestError when a key is of another bucket."""
    keys = keys_from_wire(message.keys)
    if message.bucket >= BUCKETS or (bucket_numbers(keys) != message.bucket).any():
        raise InvalidRequestError(f"bucket {message.bucket} is none, or has keys of another")
    return BucketRows(
        NodeId(message.node_id),
        Incarnation(message.incarnation),
        Seq(message.seq),
        tier_from_wire(message.tier),
        message.bucket,
        keys,
    )


def hit_to_wire(hit: NodeHit) -> index_pb2.NodeHit:
    return index_pb2.NodeHit(
        node_id=hit.node_id,
        hit_blocks=hit.hit_blocks,
        dram_blocks=hit.dram_blocks,
        ssd_blocks=hit.ssd_blocks,
    )


def hit_from_wire(message: index_pb2.NodeHit) -> NodeHit:
    return NodeHit(
        NodeId(message.node_id), message.hit_blocks, message.dram_blocks, message.ssd_blocks
    )


def engine_hit_to_wire(hit: EngineHit) -> index_pb2.EngineHit:
    return index_pb2.EngineHit(
        engine_id=hit.engine_id,
        dp_rank=hit.dp_rank,
        url=hit.url,
        node_id=hit.node_id,
        hit_blocks=hit.hit_blocks,
        hbm_blocks=hit.hbm_blocks,
        dram_blocks=hit.dram_blocks,
        ssd_blocks=hit.ssd_blocks,
    )


def engine_hit_from_wire(message: index_pb2.EngineHit) -> EngineHit:
    return EngineHit(
        message.engine_id,
        message.dp_rank,
        message.url,
        NodeId(message.node_id),
        message.hit_blocks,
        message.hbm_blocks,
        message.dram_blocks,
        message.ssd_blocks,
    )


def hits_to_wire(hits: ChainHits) -> index_pb2.QueryResponse:
    return index_pb2.QueryResponse(
        hits=[hit_to_wire(hit) for hit in hits.nodes],
        engines=[engine_hit_to_wire(hit) for hit in hits.engines],
    )


def hits_from_wire(message: index_pb2.QueryResponse) -> ChainHits:
    return ChainHits(
        tuple(hit_from_wire(hit) for hit in message.hits),
        tuple(engine_hit_from_wire(hit) for hit in message.engines),
    )
