from emberkv_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlocksStored(_message.Message):
    __slots__ = ("tier", "keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    keys: bytes
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("tier", "keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    keys: bytes
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class TierCleared(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: TierCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[TierCleared, _Mapping]] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("node_id", "incarnation", "seq_first", "events", "sent_unix_seconds")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIRST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    seq_first: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    sent_unix_seconds: float
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq_first: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., sent_unix_seconds: _Optional[float] = ...) -> None: ...

class TierDigest(_message.Message):
    __slots__ = ("tier", "blocks", "xor", "capacity_bytes", "used_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    XOR_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    blocks: int
    xor: int
    capacity_bytes: int
    used_bytes: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., xor: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("node_id", "incarnation", "seq", "state", "tiers", "engines", "grpc_address", "sent_unix_seconds", "bucket_xors")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_XORS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    seq: int
    state: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierDigest]
    engines: _containers.RepeatedCompositeFieldContainer[_common_pb2.EngineInfo]
    grpc_address: str
    sent_unix_seconds: float
    bucket_xors: _containers.RepeatedCompositeFieldContainer[BucketXors]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., state: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierDigest, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[_common_pb2.EngineInfo, _Mapping]]] = ..., grpc_address: _Optional[str] = ..., sent_unix_seconds: _Optional[float] = ..., bucket_xors: _Optional[_Iterable[_Union[BucketXors, _Mapping]]] = ...) -> None: ...

class BucketXors(_message.Message):
    __slots__ = ("tier", "xors")
    TIER_FIELD_NUMBER: _ClassVar[int]
    XORS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    xors: bytes
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., xors: _Optional[bytes] = ...) -> None: ...

class BucketChoice(_message.Message):
    __slots__ = ("tier", "buckets")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    buckets: bytes
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., buckets: _Optional[bytes] = ...) -> None: ...

class BucketRows(_message.Message):
    __slots__ = ("node_id", "incarnation", "seq", "tier", "bucket", "keys")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    seq: int
    tier: _common_pb2.Tier
    bucket: int
    keys: bytes
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., bucket: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class SnapshotNeeded(_message.Message):
    __slots__ = ("incarnation", "seq", "node_id")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    seq: int
    node_id: str
    def __init__(self, incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., node_id: _Optional[str] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("incarnation", "from_seq", "subscriber", "wants_bucket_xors", "buckets")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    WANTS_BUCKET_XORS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    from_seq: int
    subscriber: str
    wants_bucket_xors: bool
    buckets: _containers.RepeatedCompositeFieldContainer[BucketChoice]
    def __init__(self, incarnation: _Optional[int] = ..., from_seq: _Optional[int] = ..., subscriber: _Optional[str] = ..., wants_bucket_xors: bool = ..., buckets: _Optional[_Iterable[_Union[BucketChoice, _Mapping]]] = ...) -> None: ...

class EventMessage(_message.Message):
    __slots__ = ("batch", "report", "snapshot_needed", "bucket_rows")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_ROWS_FIELD_NUMBER: _ClassVar[int]
    batch: EventBatch
    report: NodeReport
    snapshot_needed: SnapshotNeeded
    bucket_rows: BucketRows
    def __init__(self, batch: _Optional[_Union[EventBatch, _Mapping]] = ..., report: _Optional[_Union[NodeReport, _Mapping]] = ..., snapshot_needed: _Optional[_Union[SnapshotNeeded, _Mapping]] = ..., bucket_rows: _Optional[_Union[BucketRows, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotPage(_message.Message):
    __slots__ = ("node_id", "incarnation", "seq", "tier", "keys", "is_last")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    seq: int
    tier: _common_pb2.Tier
    keys: bytes
    is_last: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., keys: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class NodeHit(_message.Message):
    __slots__ = ("node_id", "hit_blocks", "dram_blocks", "ssd_blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    hit_blocks: int
    dram_blocks: int
    ssd_blocks: int
    def __init__(self, node_id: _Optional[str] = ..., hit_blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class EngineHit(_message.Message):
    __slots__ = ("engine_id", "dp_rank", "url", "node_id", "hit_blocks", "hbm_blocks", "dram_blocks", "ssd_blocks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HBM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    dp_rank: int
    url: str
    node_id: str
    hit_blocks: int
    hbm_blocks: int
    dram_blocks: int
    ssd_blocks: int
    def __init__(self, engine_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., url: _Optional[str] = ..., node_id: _Optional[str] = ..., hit_blocks: _Optional[int] = ..., hbm_blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("hits", "engines")
    HITS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedCompositeFieldContainer[NodeHit]
    engines: _containers.RepeatedCompositeFieldContainer[EngineHit]
    def __init__(self, hits: _Optional[_Iterable[_Union[NodeHit, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineHit, _Mapping]]] = ...) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeState(_message.Message):
    __slots__ = ("node_id", "incarnation", "seq", "state", "exactness", "grpc_address", "tiers", "engines", "lag_seconds", "gaps", "snapshots")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    seq: int
    state: str
    exactness: str
    grpc_address: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierDigest]
    engines: _containers.RepeatedCompositeFieldContainer[_common_pb2.EngineInfo]
    lag_seconds: float
    gaps: int
    snapshots: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., seq: _Optional[int] = ..., state: _Optional[str] = ..., exactness: _Optional[str] = ..., grpc_address: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierDigest, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[_common_pb2.EngineInfo, _Mapping]]] = ..., lag_seconds: _Optional[float] = ..., gaps: _Optional[int] = ..., snapshots: _Optional[int] = ...) -> None: ...

class RedisState(_message.Message):
    __slots__ = ("is_up", "problem", "writer", "writers", "leases", "exact_nodes", "queued_rows")
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EXACT_NODES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    is_up: bool
    problem: str
    writer: str
    writers: int
    leases: int
    exact_nodes: int
    queued_rows: int
    def __init__(self, is_up: bool = ..., problem: _Optional[str] = ..., writer: _Optional[str] = ..., writers: _Optional[int] = ..., leases: _Optional[int] = ..., exact_nodes: _Optional[int] = ..., queued_rows: _Optional[int] = ...) -> None: ...

class NodesResponse(_message.Message):
    __slots__ = ("nodes", "redis")
    NODES_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeState]
    redis: RedisState
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeState, _Mapping]]] = ..., redis: _Optional[_Union[RedisState, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("is_whole", "nodes", "removed")
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    is_whole: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeState]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, is_whole: bool = ..., nodes: _Optional[_Iterable[_Union[NodeState, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeTrace(_message.Message):
    __slots__ = ("node_id", "state", "exactness", "tiers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    state: str
    exactness: str
    tiers: bytes
    def __init__(self, node_id: _Optional[str] = ..., state: _Optional[str] = ..., exactness: _Optional[str] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class EngineTrace(_message.Message):
    __slots__ = ("engine", "node_id", "state", "tiers")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    engine: _common_pb2.EngineInfo
    node_id: str
    state: str
    tiers: bytes
    def __init__(self, engine: _Optional[_Union[_common_pb2.EngineInfo, _Mapping]] = ..., node_id: _Optional[str] = ..., state: _Optional[str] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("nodes", "engines")
    NODES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeTrace]
    engines: _containers.RepeatedCompositeFieldContainer[EngineTrace]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeTrace, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineTrace, _Mapping]]] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...
