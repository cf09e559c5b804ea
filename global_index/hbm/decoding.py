"""Engines' messages to `EngineMessage`: vLLM's and SGLang's, as maps and as the older arrays.

    message   [timestamp, [event, ...], dp rank?]
    map       {"type": "BlockStored", "block_hashes": [...], ...}     vLLM >= 0.24, SGLang >= 0.5.21
    array     ["BlockStored", block_hashes, ...]                      before

One broken event costs itself only, and fields nobody knows cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import InvalidRequestError
from global_index.hbm.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineMessage,
    EngineRemoved,
    EngineStored,
    MediaAt,
)

MAX_MESSAGE_BYTES = 16 << 20
"""A step that drops a hundred thousand blocks says so in 6 MB."""
MAX_EVENTS = 1 << 17
"""Of a message; an engine that drops its whole cache in one step sends one for each block."""
MAX_BLOCKS = 1 << 17
"""Of an event."""
MAX_BLOCK_TOKENS = 1 << 16
MAX_GROUP = 255
MAX_HASH_BYTES = 64
MAX_TEXT_CHARS = 4096
"""Of a salt, an adapter's name, a medium's digest."""

FULL_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
HBM_MEDIA = frozenset({None, "GPU"})
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS: Mapping[str, Sequence[str]] = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": (),
}
_METADATA = _STORED.index("lora_name")
"""Where SGLang's arrays carry a map of metadata instead."""
_NO_TOKENS = np.empty(0, np.uint32)


class _MalformedError(Exception):
    """An event breaks its own format."""


class _Fault(Enum):
    """Why an event is left out."""

    OTHER_MEDIUM = "other_medium"
    UNKNOWN = "unknown"
    MALFORMED = "malformed"


def decode_message(payload: bytes) -> EngineMessage:
    """Raises InvalidRequestError when the message as a whole cannot be read."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(f"engine message of {len(payload)} bytes is too long")
    try:
        message = msgspec.msgpack.decode(payload)
    except (ValueError, OverflowError, RecursionError) as error:  # DecodeError is a ValueError
        raise InvalidRequestError(f"engine message is no msgpack: {error}") from None
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], list):
        raise InvalidRequestError("engine message is not [time, events, rank]")
    if len(message[1]) > MAX_EVENTS:
        raise InvalidRequestError(f"engine message has {len(message[1])} events")
    rank = message[2] if len(message) > 2 else None
    events: list[EngineEvent] = []
    other_media = unknown = malformed = 0
    for raw in message[1]:
        match _event_or_fault(raw):
            case _Fault.OTHER_MEDIUM:
                other_media += 1
            case _Fault.UNKNOWN:
                unknown += 1
            case _Fault.MALFORMED:
                malformed += 1
            case event:
                events.append(event)
    return EngineMessage(
        tuple(events), rank if type(rank) is int else None, other_media, unknown, malformed
    )


def _event_or_fault(raw: Any) -> EngineEvent | _Fault:
    try:
        return _event(raw)
    except _MalformedError:
        return _Fault.MALFORMED


def _event(raw: Any) -> EngineEvent | _Fault:
    kind, fields = _fields_of(raw)
    if kind not in _FIELDS:
        return _Fault.UNKNOWN
    medium = fields.get("medium")
    if not (medium is None or isinstance(medium, str)):
        raise _MalformedError
    if medium not in HBM_MEDIA or fields.get("locality") == "REMOTE":
        return _Fault.OTHER_MEDIUM
    if kind == "AllBlocksCleared":
        return EngineCleared()
    hashes = _hashes(fields.get("block_hashes"))
    group = _whole(fields.get("group_idx") or 0, 0, MAX_GROUP)
    if kind == "BlockRemoved":
        return EngineRemoved(hashes, group)
    return _stored(hashes, group, fields)


def _fields_of(raw: Any) -> tuple[str, Mapping[Any, Any]]:
    if isinstance(raw, dict):
        kind = raw.get("type")
        fields = raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(names, raw[1:], strict=False))
        if len(raw) > _METADATA + 1 and isinstance(raw[_METADATA + 1], dict):
            fields.update({"lora_name": None, "extra_keys": None, **raw[_METADATA + 1]})
    else:
        raise _MalformedError
    if not isinstance(kind, str):
        raise _MalformedError
    return kind, fields


def _stored(hashes: tuple[EngineHash, ...], group: int, fields: Mapping[Any, Any]) -> EngineStored:
    parent = fields.get("parent_block_hash")
    kind = fields.get("kv_cache_spec_kind")
    windowed = fields.get("kv_cache_spec_sliding_window")
    if not (kind is None or isinstance(kind, str)):
        raise _MalformedError
    block_tokens = _whole(fields.get("block_size"), 1, MAX_BLOCK_TOKENS)
    adapter = _text(fields.get("lora_name"))
    salt = _text(fields.get("cache_salt"))
    keys = fields.get("extra_keys")
    media: tuple[tuple[MediaAt, ...], ...] = ()
    understood = len(hashes)
    if fields.get("lora_id") is not None and not adapter:
        understood = 0  # which adapter a number stands for, only its engine knows
    elif keys is not None:
        if not isinstance(keys, list) or len(keys) != len(hashes):
            raise _MalformedError
        if any(keys):
            reader = _KeyReader(adapter)
            media, understood = reader.read(keys, starts_prompt=parent is None)
            salt = salt or reader.salt
    return EngineStored(
        hashes,
        None if parent is None else _hash(parent),
        _tokens(fields.get("token_ids")),
        block_tokens,
        group,
        kind in FULL_KINDS and windowed is None,
        salt,
        adapter,
        media,
        understood,
    )


class _KeyReader:
    """The untagged extra keys of vLLM: an adapter's name, [digest, offset], a salt, in this order.

    The salt stands at the first block of a prompt only. Bytes are digests of prompt embeddings,
    for which nothing is stored; those, and whatever else comes, are not understood.
    """

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self.salt = ""

    def read(
        self, blocks: Sequence[Any], *, starts_prompt: bool
    ) -> tuple[tuple[tuple[MediaAt, ...], ...], int]:
        """The media of each block, and how many leading blocks are understood."""
        media: list[tuple[MediaAt, ...]] = []
        for number, keys in enumerate(blocks):
            found = self._block(keys or (), may_be_salted=starts_prompt and number == 0)
            if found is None:
                return (*media, *((),) * (len(blocks) - number)), number
            media.append(found)
        return tuple(media), len(blocks)

    def _block(self, keys: Any, *, may_be_salted: bool) -> tuple[MediaAt, ...] | None:
        if not isinstance(keys, list | tuple):
            raise _MalformedError
        rest = list(keys)
        if self._adapter and rest and rest[0] == self._adapter:
            rest.pop(0)
        media: list[MediaAt] = []
        for key in rest:
            match key:
                case [str(identifier), int(offset)] if abs(offset) < 1 << 62:
                    media.append(MediaAt(_text(identifier), offset))
                case str(salt) if may_be_salted and not self.salt:
                    self.salt = _text(salt)
                case _:
                    return None
        return tuple(media)


def _hashes(raw: Any) -> tuple[EngineHash, ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_BLOCKS:
        raise _MalformedError
    return tuple([_hash(value) for value in raw])


def _hash(raw: Any) -> EngineHash:
    if type(raw) is int or (type(raw) is bytes and 0 < len(raw) <= MAX_HASH_BYTES):
        return raw
    raise _MalformedError


def _tokens(raw: Any) -> npt.NDArray[np.uint32]:
    """Token ids; of pairs (a draft model's bigrams) the first ones."""
    if raw is None or raw == []:
        return _NO_TOKENS
    if not isinstance(raw, list):
        raise _MalformedError
    try:
        ids = np.array(raw)
    except (ValueError, OverflowError, TypeError):  # pairs and numbers mixed
        raise _MalformedError from None
    if ids.ndim == 2 and ids.shape[1] == 2:
        ids = ids[:, 0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise _MalformedError
    return ids.astype(np.uint32)


def _whole(raw: Any, low: int, high: int) -> int:
    if type(raw) is not int or not low <= raw <= high:
        raise _MalformedError
    return raw


def _text(raw: Any) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, str) or len(raw) > MAX_TEXT_CHARS:
        raise _MalformedError
    return raw
