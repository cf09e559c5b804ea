"""The only builder of block hashes, and the checksum of payloads.

h(-1) = BLAKE3(namespace_id || u32le len(salt) || salt)
h(i)  = BLAKE3(h(i-1) || u32le tokens of block i || extra keys of block i)

Token counts are fixed by the namespace's block_tokens and every extra key is tagged and length
prefixed, so no two different inputs have the same bytes. Extra keys of a block are sorted.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import (
    BLOCK_HASH_BYTES,
    SALT_ID_BYTES,
    BlockHash,
    IndexKey,
    NamespaceId,
    SaltId,
)

Tokens = Sequence[int] | npt.NDArray[np.integer]
_LENGTH = struct.Struct("<I")
_TAG_AND_LENGTH = struct.Struct("<BI")
UNKNOWN_CHECKSUM = 0
"""Stands where a checksum would, when nobody has computed it yet."""


class ExtraKeyTag(IntEnum):
    """What an extra key stands for. Values are part of every stored hash: never renumber."""

    LORA = 1
    MULTIMODAL = 2
    PROMPT_EMBEDS = 3
    OTHER = 255


@dataclass(frozen=True, slots=True, order=True)
class ExtraKey:
    """Something beside the tokens that changes a block's KV."""

    tag: ExtraKeyTag
    value: bytes

    def to_bytes(self) -> bytes:
        return _TAG_AND_LENGTH.pack(self.tag, len(self.value)) + self.value


def lora_key(name: str, weights_id: str) -> ExtraKey:
    """Identity of an adapter: its name and its weights. Belongs to every block of a request."""
    return ExtraKey(ExtraKeyTag.LORA, _prefixed(name.encode()) + _prefixed(weights_id.encode()))


def multimodal_key(content_hash: bytes, offset_tokens: int) -> ExtraKey:
    """Identity of an image or sound: its whole digest, and where in the block it starts.

    `offset_tokens` is relative to the block's first token; negative when it began earlier.
    """
    return ExtraKey(
        ExtraKeyTag.MULTIMODAL, _prefixed(content_hash) + struct.pack("<q", offset_tokens)
    )


def salt_id(salt: bytes) -> SaltId | None:
    """Whose quota blocks under this cache salt count against; None without a salt: nobody's.

    It names the tenant to operators and metrics without giving the salt away.
    """
    return SaltId(blake3.blake3(salt).digest()[:SALT_ID_BYTES]) if salt else None


def chain_root(namespace_id: NamespaceId, salt: bytes = b"") -> BlockHash:
    """h(-1): the parent of a chain's first block."""
    return BlockHash(blake3.blake3(namespace_id + _prefixed(salt)).digest())


def block_hashes(
    namespace_id: NamespaceId,
    tokens: Tokens,
    block_tokens: int,
    *,
    salt: bytes = b"",
    extra_keys: Mapping[int, Sequence[ExtraKey]] | Sequence[ExtraKey] = (),
    parent: BlockHash | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks of `tokens`; a last, partial block has none.

    Args:
        tokens: token ids in 0..2**32-1; an integer array is faster than a list.
        salt: cache salt of the tenant; changes every hash of the chain.
        extra_keys: a mapping from block number to its keys, or one sequence for all blocks.
        parent: hash before tokens[0], to go on with a chain; then `salt` is in it already.

    Raises:
        InvalidRequestError: block_tokens < 1 or a token id out of range.
    """
    if block_tokens < 1:
        raise InvalidRequestError(f"block_tokens {block_tokens} must be at least 1")
    packed = pack_tokens(tokens)
    block_bytes = 4 * block_tokens
    previous = chain_root(namespace_id, salt) if parent is None else parent
    hashes: list[BlockHash] = []
    blake = blake3.blake3
    if not extra_keys:
        for start in range(0, len(packed) - block_bytes + 1, block_bytes):
            previous = BlockHash(blake(previous + packed[start : start + block_bytes]).digest())
            hashes.append(previous)
        return hashes
    for number in range(len(packed) // block_bytes):
        keys = extra_keys.get(number, ()) if isinstance(extra_keys, Mapping) else extra_keys
        start = number * block_bytes
        previous = BlockHash(
            blake(
                previous
                + packed[start : start + block_bytes]
                + b"".join(key.to_bytes() for key in sorted(keys))
            ).digest()
        )
        hashes.append(previous)
    return hashes


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as u32 little endian.

    Raises:
        InvalidRequestError: an id that is not an integer in 0..2**32-1.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError("token ids must be a flat list of integers")
    if array.dtype != np.uint32 and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise InvalidRequestError("token ids must be in 0..4294967295")
    return array.astype("<u4", copy=False).tobytes()


def index_key(block_hash: BlockHash) -> IndexKey:
    """The 8 bytes the global index keys on. 0 marks an empty slot there, so it becomes 1."""
    return IndexKey(int.from_bytes(block_hash[:8], "little") or 1)


def index_keys(hashes: Sequence[BlockHash]) -> npt.NDArray[np.uint64]:
    """`index_key` of each hash as one array."""
    if len(hashes) == 1:  # an array of one is made at a fifth of the cost
        return np.array([index_key(hashes[0])], np.uint64)
    words = np.frombuffer(b"".join(hashes), dtype="<u8")
    keys = words[:: BLOCK_HASH_BYTES // 8].copy()
    if not keys.all():
        keys[keys == 0] = 1
    return keys


def xor_of(keys: npt.NDArray[np.uint64]) -> int:
    """All index keys of an array that is not empty, xored."""
    return int(keys[0]) if len(keys) == 1 else int(np.bitwise_xor.reduce(keys))


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """XXH3-64 (seed 0) over a part's payload. Never UNKNOWN_CHECKSUM: 0 becomes 1.

    Finds what memory, drives and networks do to bytes; anybody can make others with an equal one.
    Of more than 64 KiB it is computed without the interpreter lock.
    """
    return xxhash.xxh3_64_intdigest(payload) or 1


class RunningChecksum:
    """`checksum` of a payload that comes in pieces."""

    __slots__ = ("_sum",)

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_64()

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        self._sum.update(piece)

    @property
    def value(self) -> int:
        """Of all pieces so far."""
        return self._sum.intdigest() or 1


def _prefixed(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
