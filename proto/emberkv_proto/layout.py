"""Namespace: everything outside the tokens that makes two blocks' bytes interchangeable.

Two engines with different namespace ids can never share a byte. The id goes into the root of
every block hash, so a block of another model, dtype or layout is not found, not merely refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

import blake3

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NamespaceId

MAX_NAMESPACE_BYTES = 64 * 1024
MAX_PART_BYTES = 1 << 30


class GroupKind(str, Enum):
    """What a group of layers needs of a prefix (hybrid models have several groups)."""

    FULL = "full"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"
    CROSS = "cross"


WINDOWED = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})
"""Kinds that see `window_tokens` tokens only."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the bytes of one part of a block are ordered.

    `order` names the axes from the slowest to the fastest, e.g. "layer.kv.token.head.dim".
    dtype is a name ("bfloat16"), never a width: equal widths are not equal bytes.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    order: str = "layer.kv.token.head.dim"
    details: dict[str, str] = field(default_factory=dict)
    """Whatever else the engine's layout depends on (backend, swizzle, engine page size)."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits of BLAKE3 over the canonical JSON of all fields."""
        return blake3.blake3(canonical_json(asdict(self))).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of layers of a model; `part_bytes` is what one shard stores for one block."""

    kind: GroupKind
    layers: int
    part_bytes: int
    window_tokens: int = 0
    """Window of sliding_window, chunk of chunked_local; 0 for the other kinds."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a kind of blocks. All fields enter the id at full width."""

    model: str
    weights_id: str
    """Revision or digest of the weights. Same name with other weights is another namespace."""
    kv_dtype: str
    layout_fingerprint: str
    block_tokens: int
    groups: tuple[Group, ...]
    shards: int = 1
    """tp x pp x cp ranks, each storing one part of each group."""
    engine_family: str = "torch_engine"
    layout_version: int = 1
    isolation_domain: str = ""

    def __post_init__(self) -> None:
        if not self.model or not self.weights_id:
            raise InvalidRequestError("namespace: model and weights_id must not be empty")
        if not 1 <= self.block_tokens <= 65536:
            raise InvalidRequestError(
                f"namespace: block_tokens {self.block_tokens} is not in 1..65536"
            )
        if not 1 <= self.shards <= 1024 or not 1 <= len(self.groups) <= 32:
            raise InvalidRequestError("namespace: needs 1..1024 shards and 1..32 groups")
        for group in self.groups:
            if not 1 <= group.part_bytes <= MAX_PART_BYTES:
                raise InvalidRequestError(
                    f"namespace: part_bytes {group.part_bytes} is not in 1..{MAX_PART_BYTES}"
                )
            if group.kind in WINDOWED and group.window_tokens < 1:
                raise InvalidRequestError(
                    f"namespace: window_tokens of a {group.kind.value} group must be 1 or more"
                )

    @property
    def parts(self) -> int:
        """Parts of one block: groups x shards."""
        return len(self.groups) * self.shards

    def part_bytes(self, part: int) -> int:
        """Payload bytes of part `group * shards + shard`."""
        if not 0 <= part < self.parts:
            raise InvalidRequestError(f"part {part} is not in 0..{self.parts - 1}")
        return self.groups[part // self.shards].part_bytes

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return canonical_json(asdict(self)).decode("ascii")

    @property
    def id(self) -> NamespaceId:
        return _id_of(self)

    @staticmethod
    def from_json(text: str) -> Namespace:
        """Parse a namespace a client sent.

        Raises:
            InvalidRequestError: not JSON, too long, an unknown or missing field, a wrong type.
        """
        if len(text) > MAX_NAMESPACE_BYTES:
            raise InvalidRequestError(f"namespace JSON has {len(text)} bytes, limit is 64 KiB")
        try:
            fields: dict[str, Any] = json.loads(text)
            groups = tuple(Group(**{**g, "kind": GroupKind(g["kind"])}) for g in fields["groups"])
            namespace = Namespace(**{**fields, "groups": groups})
        except InvalidRequestError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(f"namespace JSON is not valid: {error}") from error
        _check_types(namespace)
        return namespace


@lru_cache(maxsize=1024)
def _id_of(namespace: Namespace) -> NamespaceId:
    """Asked for with every call that names one; making it takes 0.2 ms."""
    return NamespaceId(blake3.blake3(namespace.to_json().encode("ascii")).digest()[:16])


def canonical_json(value: object) -> bytes:
    """Sorted keys, no spaces, ASCII only: one value has one text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")


def _check_types(namespace: Namespace) -> None:
    wanted: dict[str, type] = {
        "model": str,
        "weights_id": str,
        "kv_dtype": str,
        "layout_fingerprint": str,
        "block_tokens": int,
        "shards": int,
        "engine_family": str,
        "layout_version": int,
        "isolation_domain": str,
    }
    for name, kind in wanted.items():
        if type(getattr(namespace, name)) is not kind:
            raise InvalidRequestError(f"namespace: {name} must be {kind.__name__}")
    for group in namespace.groups:
        if any(type(n) is not int for n in (group.layers, group.part_bytes, group.window_tokens)):
            raise InvalidRequestError("namespace: numbers of a group must be int")
