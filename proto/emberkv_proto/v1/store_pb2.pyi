from emberkv_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcquirePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BEST_EFFORT: _ClassVar[AcquirePolicy]
    TIMEOUT: _ClassVar[AcquirePolicy]
    WAIT_COMPLETE: _ClassVar[AcquirePolicy]

class StageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRANTED: _ClassVar[StageState]
    PRESENT: _ClassVar[StageState]
    IN_PROGRESS: _ClassVar[StageState]
    NO_SPACE: _ClassVar[StageState]
BEST_EFFORT: AcquirePolicy
TIMEOUT: AcquirePolicy
WAIT_COMPLETE: AcquirePolicy
GRANTED: StageState
PRESENT: StageState
IN_PROGRESS: StageState
NO_SPACE: StageState

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "client", "namespace_json", "part", "engine")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_JSON_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    namespace_json: str
    part: int
    engine: _common_pb2.EngineInfo
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., namespace_json: _Optional[str] = ..., part: _Optional[int] = ..., engine: _Optional[_Union[_common_pb2.EngineInfo, _Mapping]] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "session_id", "namespace_id", "pool_bytes", "part_bytes", "heartbeat_seconds", "lease_seconds", "version", "transport", "transport_address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    session_id: int
    namespace_id: bytes
    pool_bytes: int
    part_bytes: int
    heartbeat_seconds: float
    lease_seconds: float
    version: str
    transport: str
    transport_address: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., session_id: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., pool_bytes: _Optional[int] = ..., part_bytes: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., version: _Optional[str] = ..., transport: _Optional[str] = ..., transport_address: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("hit_blocks", "tiers")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    tiers: bytes
    def __init__(self, hit_blocks: _Optional[int] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("hashes", "policy", "deadline_seconds", "recompute_seconds_per_block")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    policy: AcquirePolicy
    deadline_seconds: float
    recompute_seconds_per_block: float
    def __init__(self, hashes: _Optional[bytes] = ..., policy: _Optional[_Union[AcquirePolicy, str]] = ..., deadline_seconds: _Optional[float] = ..., recompute_seconds_per_block: _Optional[float] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "expires_in_seconds", "usable_blocks", "ready_blocks", "offsets", "checksums", "sources", "needed_from", "seconds_to_complete")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FROM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_TO_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    expires_in_seconds: float
    usable_blocks: int
    ready_blocks: int
    offsets: bytes
    checksums: bytes
    sources: bytes
    needed_from: int
    seconds_to_complete: float
    def __init__(self, lease_id: _Optional[int] = ..., expires_in_seconds: _Optional[float] = ..., usable_blocks: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., offsets: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., needed_from: _Optional[int] = ..., seconds_to_complete: _Optional[float] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("lease_id", "from_block", "timeout_seconds", "until_block")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_BLOCK_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    from_block: int
    timeout_seconds: float
    until_block: int
    def __init__(self, lease_id: _Optional[int] = ..., from_block: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., until_block: _Optional[int] = ...) -> None: ...

class WaitResponse(_message.Message):
    __slots__ = ("usable_blocks", "ready_blocks", "offsets", "checksums", "sources", "needed_from", "seconds_to_complete")
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FROM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_TO_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    usable_blocks: int
    ready_blocks: int
    offsets: bytes
    checksums: bytes
    sources: bytes
    needed_from: int
    seconds_to_complete: float
    def __init__(self, usable_blocks: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., offsets: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., needed_from: _Optional[int] = ..., seconds_to_complete: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("hashes", "parent", "salt_id")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SALT_ID_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    parent: bytes
    salt_id: bytes
    def __init__(self, hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., salt_id: _Optional[bytes] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("stage_id", "states", "offsets")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    stage_id: int
    states: bytes
    offsets: bytes
    def __init__(self, stage_id: _Optional[int] = ..., states: _Optional[bytes] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("stage_id", "hashes", "checksums")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    stage_id: int
    hashes: bytes
    checksums: bytes
    def __init__(self, stage_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed_blocks",)
    COMMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    committed_blocks: int
    def __init__(self, committed_blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("stage_id",)
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    stage_id: int
    def __init__(self, stage_id: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("hashes", "deadline_seconds", "source_node_id", "patience_seconds")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    deadline_seconds: float
    source_node_id: str
    patience_seconds: float
    def __init__(self, hashes: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ..., source_node_id: _Optional[str] = ..., patience_seconds: _Optional[float] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("scheduled_blocks", "prefetch_id")
    SCHEDULED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    scheduled_blocks: int
    prefetch_id: int
    def __init__(self, scheduled_blocks: _Optional[int] = ..., prefetch_id: _Optional[int] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("prefetch_id",)
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    prefetch_id: int
    def __init__(self, prefetch_id: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "blocks", "state")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    state: str
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class DriveStatus(_message.Message):
    __slots__ = ("path", "drive_id", "state", "capacity_bytes", "used_bytes", "written_bytes_total", "failed_reads", "failed_writes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DRIVE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_READS_FIELD_NUMBER: _ClassVar[int]
    FAILED_WRITES_FIELD_NUMBER: _ClassVar[int]
    path: str
    drive_id: str
    state: str
    capacity_bytes: int
    used_bytes: int
    written_bytes_total: int
    failed_reads: int
    failed_writes: int
    def __init__(self, path: _Optional[str] = ..., drive_id: _Optional[str] = ..., state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., written_bytes_total: _Optional[int] = ..., failed_reads: _Optional[int] = ..., failed_writes: _Optional[int] = ...) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("hard_blocks", "soft_blocks", "hard_bytes", "limit_bytes")
    HARD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    hard_blocks: int
    soft_blocks: int
    hard_bytes: int
    limit_bytes: int
    def __init__(self, hard_blocks: _Optional[int] = ..., soft_blocks: _Optional[int] = ..., hard_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "state", "uptime_seconds", "tiers", "engines", "sessions", "leases", "staged_blocks", "seq", "counters", "version", "drives", "pins")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    state: str
    uptime_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    engines: _containers.RepeatedCompositeFieldContainer[_common_pb2.EngineInfo]
    sessions: int
    leases: int
    staged_blocks: int
    seq: int
    counters: _containers.ScalarMap[str, float]
    version: str
    drives: _containers.RepeatedCompositeFieldContainer[DriveStatus]
    pins: PinStatus
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[_common_pb2.EngineInfo, _Mapping]]] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., staged_blocks: _Optional[int] = ..., seq: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., version: _Optional[str] = ..., drives: _Optional[_Iterable[_Union[DriveStatus, _Mapping]]] = ..., pins: _Optional[_Union[PinStatus, _Mapping]] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("problems",)
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problems: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "ttl_seconds")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: bytes
    ttl_seconds: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned_blocks", "pinned_bytes", "limit_bytes")
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    pinned_blocks: int
    pinned_bytes: int
    limit_bytes: int
    def __init__(self, pinned_blocks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned_blocks",)
    UNPINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    unpinned_blocks: int
    def __init__(self, unpinned_blocks: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tier", "namespace_id", "hashes", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    namespace_id: bytes
    hashes: bytes
    bytes: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("tier", "namespace_id")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    namespace_id: bytes
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_blocks", "freed_bytes", "kept_blocks")
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    freed_bytes: int
    kept_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ..., freed_bytes: _Optional[int] = ..., kept_blocks: _Optional[int] = ...) -> None: ...

class QuotaRequest(_message.Message):
    __slots__ = ("salt_id", "dram_bytes", "ssd_bytes")
    SALT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    salt_id: bytes
    dram_bytes: int
    ssd_bytes: int
    def __init__(self, salt_id: _Optional[bytes] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ...) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("salt_id", "dram_bytes", "ssd_bytes", "dram_limit_bytes", "ssd_limit_bytes", "evicted_blocks")
    SALT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    salt_id: bytes
    dram_bytes: int
    ssd_bytes: int
    dram_limit_bytes: int
    ssd_limit_bytes: int
    evicted_blocks: int
    def __init__(self, salt_id: _Optional[bytes] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., dram_limit_bytes: _Optional[int] = ..., ssd_limit_bytes: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class QuotasResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScrubResponse(_message.Message):
    __slots__ = ("records", "expected_seconds")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    expected_seconds: float
    def __init__(self, records: _Optional[int] = ..., expected_seconds: _Optional[float] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("changed", "needs_restart")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    NEEDS_RESTART_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedScalarFieldContainer[str]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[str]] = ..., needs_restart: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerAcquireRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "lease_seconds", "requester", "wait_seconds", "ready_only", "ticket")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READY_ONLY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: bytes
    lease_seconds: float
    requester: str
    wait_seconds: float
    ready_only: bool
    ticket: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ..., requester: _Optional[str] = ..., wait_seconds: _Optional[float] = ..., ready_only: bool = ..., ticket: _Optional[bytes] = ...) -> None: ...

class PeerAcquireResponse(_message.Message):
    __slots__ = ("lease_id", "incarnation", "transport", "transport_address", "usable_blocks", "parts", "offsets", "lengths", "checksums", "salt_ids", "ticket")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SALT_IDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    incarnation: int
    transport: str
    transport_address: str
    usable_blocks: int
    parts: int
    offsets: bytes
    lengths: bytes
    checksums: bytes
    salt_ids: bytes
    ticket: bytes
    def __init__(self, lease_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., transport: _Optional[str] = ..., transport_address: _Optional[str] = ..., usable_blocks: _Optional[int] = ..., parts: _Optional[int] = ..., offsets: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., salt_ids: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class PeerReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class SessionBytes(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "deadline_seconds", "source_node_id", "patience_seconds")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    hashes: bytes
    deadline_seconds: float
    source_node_id: str
    patience_seconds: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ..., source_node_id: _Optional[str] = ..., patience_seconds: _Optional[float] = ...) -> None: ...

class HintProgress(_message.Message):
    __slots__ = ("scheduled_blocks", "readable_blocks", "is_done")
    SCHEDULED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    scheduled_blocks: int
    readable_blocks: int
    is_done: bool
    def __init__(self, scheduled_blocks: _Optional[int] = ..., readable_blocks: _Optional[int] = ..., is_done: bool = ...) -> None: ...
