"""SGLang's page hashes as block hashes.

    page(i)  = SHA256(page(i-1) || tokens of page i as u32 little endian)
    page(-1) = nothing; with a cache salt, SHA256 over it (see `page_seed`)
    block(i) = page(i) XOR BLAKE3(namespace id)

SGLang hands its storage page hashes and no tokens, so they are what its blocks are known by. Only
they say nothing of the model: what is mixed in here keeps namespaces apart, as the root of our own
chain does. It is undone by itself, so a block hash leads back to the page hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import blake3
import numpy as np

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import Tokens, pack_tokens
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash, NamespaceId

PageHash = bytes
"""32 bytes, SGLang's own; 64 hex digits in its calls, the first 8 bytes in its events."""
_SEED_TAG = b"sglang-cache-namespace-v1"
_EVENT_SALT_TAG = b"sglang-cache-salt-v1\0"
_EVENT_SEED_TAG = b"sglang-kv-event-namespace-v1"


def page_hashes(
    tokens: Tokens, page_tokens: int, *, salt: bytes = b"", parent: PageHash | None = None
) -> list[PageHash]:
    """Hashes of the full pages of `tokens`, as SGLang computes them.

    Args:
        salt: the request's cache salt; SGLang's `extra_key` has no place here.
        parent: page hash before tokens[0], to go on with a chain; then `salt` is in it already.

    Raises:
        InvalidRequestError: page_tokens < 1 or a token id out of 0..2**32-1.
    """
    if page_tokens < 1:
        raise InvalidRequestError(f"page_tokens {page_tokens} must be at least 1")
    packed = pack_tokens(tokens)
    page_bytes = 4 * page_tokens
    previous = parent if parent is not None else page_seed(salt)
    hashes: list[PageHash] = []
    sha256 = hashlib.sha256
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        previous = sha256(previous + packed[start : start + page_bytes]).digest()
        hashes.append(previous)
    return hashes


def rooted(namespace_id: NamespaceId, pages: Sequence[PageHash]) -> list[BlockHash]:
    """Block hashes in a namespace. O(pages), by numpy.

    Raises:
        InvalidRequestError: a page hash that has not 32 bytes.
    """
    if not pages:
        return []
    if set(map(len, pages)) != {BLOCK_HASH_BYTES}:
        raise InvalidRequestError("a page hash has 32 bytes")
    mask = np.frombuffer(blake3.blake3(namespace_id).digest(), np.uint8)
    rows = np.frombuffer(b"".join(pages), np.uint8).reshape(-1, BLOCK_HASH_BYTES)
    mixed = (rows ^ mask).tobytes()
    return [
        BlockHash(mixed[start : start + BLOCK_HASH_BYTES])
        for start in range(0, len(mixed), BLOCK_HASH_BYTES)
    ]


def unrooted(namespace_id: NamespaceId, block_hash: BlockHash) -> PageHash:
    """The page hash that `rooted` made a block hash of."""
    return bytes(rooted(namespace_id, [block_hash])[0])


def page_seed(salt: bytes) -> bytes:
    """What stands before the first page: no extra key, and the salt with its length."""
    return _seed(_SEED_TAG, salt) if salt else b""


def first_in_events(tokens: Tokens, salt: bytes = b"") -> frozenset[int]:
    """By which numbers, of 64 bits, SGLang's events may call a prompt's first page of these tokens.

    For a request without `extra_key`: in the format "dynamo" one with it has another number, in
    the default format it has not. Pages of a salted request are chained by another seed there than
    in the storage.
    """
    before = hashlib.sha256(_EVENT_SALT_TAG + salt).digest() if salt else b""
    plain = hashlib.sha256(before + pack_tokens(tokens)).digest()[:8]
    numbers = {plain}
    if salt:
        numbers.add(hashlib.sha256(_seed(_EVENT_SEED_TAG, salt) + plain).digest()[:8])
    return frozenset(int.from_bytes(number, "big") for number in numbers)


def _seed(tag: bytes, salt: bytes) -> bytes:
    """No extra key, and the salt with its length."""
    part = b"\x01" + len(salt).to_bytes(8, "little") + salt
    return hashlib.sha256(tag + b"\x00" + part).digest()
