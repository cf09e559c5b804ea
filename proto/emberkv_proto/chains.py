"""A request's block hashes, by whichever scheme its engine's blocks are known by.

Routers, the index and the command line hash prompts for engines of any kind; they all do it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberkv_proto.hashing import ExtraKey, Tokens, block_hashes, chain_root
from emberkv_proto.page_hashes import page_hashes, page_seed, rooted, unrooted
from emberkv_proto.types import BlockHash, HashScheme, NamespaceId

NO_PARENT = BlockHash(b"")
"""Before the first page of an SGLang chain without a salt."""


def chain_start(scheme: HashScheme, namespace_id: NamespaceId, salt: bytes = b"") -> BlockHash:
    """What `parent` of a chain's first block is, for `chain_hashes`."""
    if scheme is HashScheme.SGLANG:
        return rooted(namespace_id, [page_seed(salt)])[0] if salt else NO_PARENT
    return chain_root(namespace_id, salt)


def chain_hashes(
    scheme: HashScheme,
    namespace_id: NamespaceId,
    tokens: Tokens,
    block_tokens: int,
    *,
    salt: bytes = b"",
    extra_keys: Mapping[int, Sequence[ExtraKey]] | Sequence[ExtraKey] = (),
    parent: BlockHash | None = None,
) -> list[BlockHash]:
    """As `block_hashes`; no hash where the scheme has no place for what is asked, or is not known.

    Raises:
        InvalidRequestError: block_tokens < 1 or a token id out of range.
    """
    if scheme is HashScheme.EMBER:
        return block_hashes(
            namespace_id, tokens, block_tokens, salt=salt, extra_keys=extra_keys, parent=parent
        )
    if scheme is HashScheme.UNKNOWN or extra_keys:
        return []
    before = None
    if parent is not None:
        before = unrooted(namespace_id, parent) if parent else b""
    return rooted(namespace_id, page_hashes(tokens, block_tokens, salt=salt, parent=before))
