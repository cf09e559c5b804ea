"""Block keys of prompts, made anew only from where a prompt leaves all that were seen before.

A conversation grows at its end, and many begin alike, so the hashes of a prompt's beginning are
mostly known: they are kept by stretches of blocks, each under a digest of everything before it.
Digests are XXH3 with a seed of this process; a pair of prompts that collide would be routed by
wrong keys, and nothing worse.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from emberkv_proto.chains import chain_hashes
from emberkv_proto.hashing import index_keys, pack_tokens
from emberkv_proto.types import BlockHash, HashScheme, NamespaceId

STRETCH_BLOCKS = 16
KeyArray = npt.NDArray[np.uint64]


class ChainKind(NamedTuple):
    """What a chain's hashes depend on beside tokens and salt."""

    namespace_id: NamespaceId
    block_tokens: int
    scheme: HashScheme = HashScheme.EMBER


@dataclass(slots=True, eq=False)
class ChainKeys:
    """A prompt's blocks as the index knows them, in both forms that are asked for."""

    hashes: list[BlockHash]
    array: KeyArray
    numbers: list[int]


class _Stretch:
    __slots__ = ("hashes", "keys")

    def __init__(self, hashes: Sequence[BlockHash], keys: KeyArray) -> None:
        self.hashes = hashes
        self.keys = keys


@dataclass(slots=True, eq=False)
class Beginning:
    """What is known of a prompt's chain, and where to go on. Given back to `finish`."""

    kind: ChainKind
    salt: bytes
    packed: bytes
    digests: list[bytes]
    known: list[_Stretch]

    @property
    def known_blocks(self) -> int:
        return len(self.known) * STRETCH_BLOCKS

    @property
    def missing_blocks(self) -> int:
        return len(self.packed) // (4 * self.kind.block_tokens) - self.known_blocks

    def rest(self) -> list[BlockHash]:
        """Hash what is not known; nothing under a scheme that is not known.

        Touches nothing shared, so it may run in a thread.
        """
        kind = self.kind
        rest = np.frombuffer(
            self.packed, np.uint32, offset=4 * kind.block_tokens * self.known_blocks
        )
        parent = self.known[-1].hashes[-1] if self.known else None
        return chain_hashes(
            kind.scheme,
            kind.namespace_id,
            rest,
            kind.block_tokens,
            salt=self.salt,
            parent=parent,
        )


class ChainMemory:
    """The least recently used stretches, bounded by blocks. On the event loop."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks // STRETCH_BLOCKS
        self._stretches: OrderedDict[bytes, _Stretch] = OrderedDict()
        self._seed = int.from_bytes(os.urandom(8), "little")

    def keys(self, kind: ChainKind, tokens: npt.NDArray[np.uint32], salt: bytes) -> ChainKeys:
        """The keys of all whole blocks."""
        beginning = self.begin(kind, tokens, salt)
        return self.finish(beginning, beginning.rest())

    def begin(self, kind: ChainKind, tokens: npt.NDArray[np.uint32], salt: bytes) -> Beginning:
        """Find the longest beginning that is known."""
        packed = pack_tokens(tokens)
        step = 4 * kind.block_tokens * STRETCH_BLOCKS
        state = xxhash.xxh3_128(seed=self._seed)
        name = f"{kind.scheme.name} {kind.block_tokens} {len(salt)} ".encode()
        state.update(kind.namespace_id + name + salt)
        digests = []
        view = memoryview(packed)
        for at in range(0, len(packed) - step + 1, step):
            state.update(view[at : at + step])
            digests.append(state.digest())
        known: list[_Stretch] = []
        for digest in digests:
            stretch = self._stretches.get(digest)
            if stretch is None:
                break
            known.append(stretch)
        return Beginning(kind, salt, packed, digests, known)

    def finish(self, beginning: Beginning, rest: Sequence[BlockHash]) -> ChainKeys:
        """Keep what was hashed; return the whole chain."""
        known = beginning.known
        digests = beginning.digests[: len(known) + len(rest) // STRETCH_BLOCKS]
        fresh = index_keys(rest) if rest else np.empty(0, np.uint64)
        made = [
            _Stretch(
                rest[at : at + STRETCH_BLOCKS],
                fresh[at : at + STRETCH_BLOCKS].copy(),
            )
            for at in range(0, len(rest) - STRETCH_BLOCKS + 1, STRETCH_BLOCKS)
        ]
        for digest, stretch in zip(digests[len(known) :], made, strict=True):
            self._stretches[digest] = stretch
        # Beginnings last, so that they outlive what goes on from them.
        for digest in reversed(digests):
            if digest in self._stretches:
                self._stretches.move_to_end(digest)
        while len(self._stretches) > self._capacity:
            self._stretches.popitem(last=False)
        array = np.concatenate([*(item.keys for item in known), fresh]) if known else fresh
        array = array.astype(np.uint64, copy=False)
        hashes = [block for item in known for block in item.hashes]
        hashes += rest
        return ChainKeys(hashes, array, array.tolist())

    def check_integrity(self) -> None:
        assert len(self._stretches) <= self._capacity
        for stretch in self._stretches.values():
            assert len(stretch.keys) == STRETCH_BLOCKS
