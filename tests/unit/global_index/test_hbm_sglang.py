"""What SGLang tells of its cache, by the hashes that its storage pages are known by."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from emberkv_proto.chains import chain_hashes
from emberkv_proto.events import BlocksStored
from emberkv_proto.hashing import index_key
from emberkv_proto.page_hashes import page_hashes, rooted
from emberkv_proto.types import HashScheme, NamespaceId
from global_index.hbm.events import EngineRemoved, EngineStored, MediaAt
from global_index.hbm.places import ChainForm
from global_index.hbm.rows import EngineRows

SPACE = NamespaceId(b"sglang-namespace")
TOKENS = [(7 * i * i + 3 * i) % 50000 for i in range(64)]


def told(pages: list[bytes]) -> tuple[int, ...]:
    """The hashes of pages as SGLang's events carry them."""
    return tuple(struct.unpack(">q", page[:8])[0] for page in pages)


def stored(
    pages: list[bytes],
    tokens: list[int],
    parent: bytes | None = None,
    *,
    salt: str = "",
    size: int = 16,
    adapter: str = "",
    media: tuple[tuple[MediaAt, ...], ...] = (),
) -> EngineStored:
    before = None if parent is None else told([parent])[0]
    ids = np.array(tokens, np.uint32)
    blocks = len(tokens) // size
    return EngineStored(
        told(pages)[:blocks], before, ids, size, 0, True, salt, adapter, media, blocks
    )


def rows(scheme: HashScheme = HashScheme.SGLANG, block_tokens: int = 16) -> EngineRows:
    return EngineRows(ChainForm(SPACE, block_tokens, scheme=scheme))


def keys_stored(engine: EngineRows, event: EngineStored) -> list[int]:
    changes = engine.apply([event])
    engine.check_integrity()
    assert all(isinstance(change, BlocksStored) for change in changes)
    return [int(key) for change in changes for key in change.keys]


def pages_in_events(salt: str) -> list[bytes]:
    """Whose first 8 bytes SGLang's events carry: salted requests have another seed there."""
    seed = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else None
    return page_hashes(TOKENS, 16, parent=seed)


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_rows_are_those_of_the_backends_blocks(salt: str) -> None:
    blocks = rooted(SPACE, page_hashes(TOKENS, 16, salt=salt.encode()))
    pages = pages_in_events(salt)
    asked = chain_hashes(HashScheme.SGLANG, SPACE, TOKENS, 16, salt=salt.encode())
    assert asked == blocks
    engine = rows()
    head = keys_stored(engine, stored(pages[:2], TOKENS[:32], salt=salt))
    tail = keys_stored(engine, stored(pages[2:], TOKENS[32:], pages[1], salt=salt))
    assert head + tail == [index_key(block) for block in blocks]
    engine.apply([EngineRemoved(told(pages[1:2]), 0)])
    assert engine.rows == 3


def test_a_child_that_comes_before_its_parent_finds_its_place() -> None:
    pages = page_hashes(TOKENS, 16)
    engine = rows()
    assert keys_stored(engine, stored(pages[2:], TOKENS[32:], pages[1])) == []
    assert len(keys_stored(engine, stored(pages[:2], TOKENS[:32]))) == 4


def namespaced(page: bytes, extra_key: str | None, salt: str) -> int:
    """SGLang's hash of a page in events of the format "dynamo"."""
    seed = hashlib.sha256(b"sglang-kv-event-namespace-v1")
    for part in (extra_key, salt or None):
        raw = (part or "").encode()
        seed.update(b"\0" if part is None else b"\x01" + len(raw).to_bytes(8, "little") + raw)
    digest = hashlib.sha256(seed.digest() + page[:8]).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_blocks_of_an_extra_key_that_their_hash_tells_of_are_counted_and_not_indexed(
    salt: str,
) -> None:
    pages = pages_in_events(salt)
    plain = [namespaced(page, None, salt) if salt else told([page])[0] for page in pages]
    keyed = [namespaced(page, "user-1", salt) for page in pages]
    engine = rows()
    event = stored(pages, TOKENS, salt=salt)
    for hashes in (keyed, plain):
        first, rest = hashes[:2], hashes[2:]
        head = replace(event, hashes=tuple(first), tokens=event.tokens[:32], understood_blocks=2)
        tail = replace(
            event,
            hashes=tuple(rest),
            parent=first[-1],
            tokens=event.tokens[32:],
            understood_blocks=2,
        )
        expected = 2 if hashes is plain else 0
        assert len(keys_stored(engine, head)) == len(keys_stored(engine, tail)) == expected
    assert engine.counts.not_understood == len(pages)
    assert engine.rows == len(pages)
    engine.apply([EngineRemoved(tuple(keyed), 0)])
    engine.check_integrity()
    assert engine.rows == len(pages)


def test_what_the_page_hash_does_not_tell_is_not_indexed() -> None:
    pages = page_hashes(TOKENS, 16)
    medium = ((MediaAt("image", 3),), (), (), ())
    for engine, event in (
        (rows(), stored(pages, TOKENS, media=medium)),
        (rows(), stored(pages, TOKENS, adapter="a")),
        (rows(), stored(page_hashes(TOKENS, 8), TOKENS, size=8)),
        (rows(HashScheme.UNKNOWN), stored(pages, TOKENS)),
    ):
        assert keys_stored(engine, event) == []
        assert engine.counts.not_understood + engine.counts.odd_sizes > 0
    assert chain_hashes(HashScheme.UNKNOWN, SPACE, TOKENS, 16) == []
