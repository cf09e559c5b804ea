from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_SSD: Tier

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "url", "model", "role", "dp_rank", "namespace_id", "block_tokens", "events_endpoint", "replay_endpoint", "engine_block_tokens", "hash_scheme")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    url: str
    model: str
    role: str
    dp_rank: int
    namespace_id: bytes
    block_tokens: int
    events_endpoint: str
    replay_endpoint: str
    engine_block_tokens: int
    hash_scheme: str
    def __init__(self, engine_id: _Optional[str] = ..., url: _Optional[str] = ..., model: _Optional[str] = ..., role: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., events_endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., engine_block_tokens: _Optional[int] = ..., hash_scheme: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "type", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    type: str
    message: str
    def __init__(self, code: _Optional[int] = ..., type: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
