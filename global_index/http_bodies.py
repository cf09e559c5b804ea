"""What callers of Mooncake's and Dynamo's indexers send, read into one form. Pure.

Both name the same things differently; who says `model` (or `modelname`) gets Mooncake's answers,
who says `model_name` gets Dynamo's.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import Keys
from emberkv_proto.hashing import ExtraKey, index_key
from emberkv_proto.request_keys import adapter_key, salt_bytes
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

MAX_TOKENS = 1 << 20
MAX_TEXT_CHARS = 1024
MAX_RANK = 4095
MAX_BLOCK_TOKENS = 1 << 16
DEFAULT_TENANT = "default"
MODEL_FIELDS = ("model", "modelname", "model_name")
_HASH_FIELDS = ("seq_hashes", "block_hashes", "block_hash")
_MISSING = object()


class Shape(Enum):
    """In whose form an answer is given."""

    MOONCAKE = "mooncake"
    DYNAMO = "dynamo"


@dataclass(frozen=True, slots=True, eq=False)
class ChainQuestion:
    """Who is asked about, and what of a chain is in its hashes beside tokens."""

    shape: Shape
    model: str
    tenant: str
    instance_id: str | None
    """Only this one."""
    block_tokens: int | None
    """What the caller believes a block has."""


@dataclass(frozen=True, slots=True, eq=False)
class TokensQuestion(ChainQuestion):
    tokens: npt.NDArray[np.uint32]
    salt: bytes
    adapter: tuple[ExtraKey, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HashesQuestion(ChainQuestion):
    keys: Keys


@dataclass(frozen=True, slots=True)
class Registration:
    """A source of events that is to be followed."""

    shape: Shape
    kind: str
    """"vllm", "sglang", "emberkv", in lower case."""
    instance_id: str
    dp_rank: int
    endpoint: str
    replay_endpoint: str
    model: str
    tenant: str
    block_tokens: int
    store_block_tokens: int
    """Of a block of ours; a multiple of block_tokens."""
    node_id: str
    namespace_id: str
    url: str


@dataclass(frozen=True, slots=True)
class Unregistration:
    """Who is to be followed no longer; no rank: all of them."""

    shape: Shape
    kind: str
    instance_id: str
    dp_rank: int | None
    tenant: str


def read_tokens_question(body: bytes) -> TokensQuestion:
    """Raises InvalidRequestError, naming the field, for what cannot be asked."""
    fields = _Fields.parse(body)
    name = fields.text("lora_name", default="")
    weights = fields.text("lora_weights_id", default="")
    if bool(name) != bool(weights):
        raise InvalidRequestError(
            "lora_name and lora_weights_id go together: an adapter's blocks are told apart by both"
        )
    if fields.has("lora_id"):
        raise InvalidRequestError("lora_id means nothing beyond its engine; use lora_name")
    tokens = _tokens(fields.get("token_ids"))
    question = _question(fields)
    return TokensQuestion(
        question.shape,
        question.model,
        question.tenant,
        question.instance_id,
        question.block_tokens,
        tokens,
        salt_bytes(fields.text("cache_salt", "additional_salt", "additionalsalt", default="")),
        (adapter_key(name, weights),) if name else (),
    )


def read_hashes_question(body: bytes) -> HashesQuestion:
    """Raises InvalidRequestError, naming the field, for what cannot be asked."""
    fields = _Fields.parse(body)
    hashes = fields.get(*_HASH_FIELDS)
    if not isinstance(hashes, list) or len(hashes) > MAX_BLOCKS_PER_CALL:
        raise InvalidRequestError(
            f"{_HASH_FIELDS[0]} must be a list of at most {MAX_BLOCKS_PER_CALL} hashes"
        )
    question = _question(fields)
    return HashesQuestion(
        question.shape,
        question.model,
        question.tenant,
        question.instance_id,
        question.block_tokens,
        np.array([_key(value) for value in hashes], np.uint64),
    )


def read_registration(body: bytes) -> Registration:
    """Raises InvalidRequestError, naming the field, for what cannot be followed."""
    fields = _Fields.parse(body)
    kind = fields.text("type", "engine_type", default="vllm").lower()
    is_engine = kind in ("vllm", "sglang")
    block_tokens = fields.whole("block_size", low=1, high=MAX_BLOCK_TOKENS, default=0)
    if is_engine and not block_tokens:
        raise InvalidRequestError("block_size is missing")
    store_block_tokens = fields.whole(
        "store_block_size", low=1, high=MAX_BLOCK_TOKENS, default=block_tokens
    )
    if block_tokens and store_block_tokens % block_tokens:
        raise InvalidRequestError(
            f"store_block_size {store_block_tokens} is no multiple of block_size {block_tokens}"
        )
    return Registration(
        fields.shape,
        kind,
        fields.identity("instance_id") if is_engine else fields.identity("instance_id", default=""),
        fields.whole("dp_rank", low=0, high=MAX_RANK, default=0),
        fields.text("endpoint"),
        fields.text("replay_endpoint", default=""),
        fields.text(*MODEL_FIELDS) if is_engine else fields.text(*MODEL_FIELDS, default=""),
        fields.text("tenant_id", default=DEFAULT_TENANT),
        block_tokens,
        store_block_tokens,
        fields.text("node_id", default=""),
        fields.text("namespace_id", default=""),
        fields.text("url", default=""),
    )


def read_unregistration(body: bytes) -> Unregistration:
    """Raises InvalidRequestError, naming the field, for what names nobody."""
    fields = _Fields.parse(body)
    return Unregistration(
        fields.shape,
        fields.text("type", "engine_type", default="vllm").lower(),
        fields.identity("instance_id"),
        fields.maybe_whole("dp_rank", low=0, high=MAX_RANK),
        fields.text("tenant_id", default=DEFAULT_TENANT),
    )


class _Fields:
    """A body's JSON object. A field that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def parse(cls, body: bytes) -> _Fields:
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"the body is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise InvalidRequestError("the body must be a JSON object")
        return cls(values)

    @property
    def shape(self) -> Shape:
        is_dynamo = self.has("model_name") or not (self.has("model") or self.has("modelname"))
        return Shape.DYNAMO if is_dynamo else Shape.MOONCAKE

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The first of these fields that is there. Raises when none is and there is no default."""
        for name in names:
            if self.has(name):
                return self._values[name]
        if default is _MISSING:
            raise InvalidRequestError(f"{' or '.join(names)} is missing")
        return default

    def text(self, *names: str, default: Any = _MISSING) -> str:
        value = self.get(*names, default=default)
        if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
            raise InvalidRequestError(
                f"{names[0]} must be a string of at most {MAX_TEXT_CHARS} characters"
            )
        return value

    def whole(self, name: str, *, low: int, high: int, default: int) -> int:
        value = self.maybe_whole(name, low=low, high=high)
        return default if value is None else value

    def maybe_whole(self, name: str, *, low: int, high: int) -> int | None:
        value = self.get(name, default=None)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequestError(f"{name} must be a whole number in {low}..{high}")
        return int(value)

    def identity(self, name: str, default: Any = _MISSING) -> str:
        """A name, or a number as Dynamo's workers have one."""
        value = self.get(name, default=default)
        if type(value) is int and abs(value) < 1 << 64:
            return str(value)
        return self.text(name, default=default)


def _question(fields: _Fields) -> ChainQuestion:
    return ChainQuestion(
        fields.shape,
        fields.text(*MODEL_FIELDS),
        fields.text("tenant_id", "routing_group", default=DEFAULT_TENANT),
        fields.identity("instance_id") if fields.has("instance_id") else None,
        fields.maybe_whole("block_size", low=1, high=MAX_BLOCK_TOKENS),
    )


def _tokens(raw: Any) -> npt.NDArray[np.uint32]:
    if not isinstance(raw, list) or len(raw) > MAX_TOKENS:
        raise InvalidRequestError(f"token_ids must be a list of at most {MAX_TOKENS} token ids")
    if not raw:
        return np.empty(0, np.uint32)
    try:
        # Types first: of numbers and one long text numpy would make texts that are all as long.
        if set(map(type, raw)) == {int}:
            return np.frombuffer(array("I", raw), np.uint32)
    except OverflowError:
        pass
    raise InvalidRequestError("token_ids must be whole numbers in 0..4294967295")


def _key(value: Any) -> int:
    """An index key: as a number of 64 bits, signed or not, or cut from a whole hash in hex."""
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value & (1 << 64) - 1
    if isinstance(value, str) and len(value) == 2 * BLOCK_HASH_BYTES:
        try:
            return index_key(BlockHash(bytes.fromhex(value)))
        except ValueError:
            pass
    raise InvalidRequestError(
        "a hash is a number of 64 bits, or the whole hash as 64 hexadecimal digits"
    )
