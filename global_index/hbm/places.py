"""Where an engine's blocks stand in our chain: our hashes from its tokens and extra keys. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from emberkv_proto.chains import chain_hashes, chain_start
from emberkv_proto.hashing import ExtraKey
from emberkv_proto.page_hashes import first_in_events
from emberkv_proto.request_keys import adapter_key, media_key, salt_bytes
from emberkv_proto.types import BlockHash, HashScheme, NamespaceId
from global_index.hbm.events import EngineHash, EngineStored

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChainForm:
    """What an engine's hashes of ours are made of, beside the tokens."""

    namespace_id: NamespaceId
    block_tokens: int
    engine_block_tokens: int = 0
    """0: taken from the first event."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and weights id of each adapter that is known; blocks of others are not indexed."""
    scheme: HashScheme = HashScheme.EMBER


@dataclass(slots=True, eq=False)
class Part:
    """An engine block that shares a block of ours with others."""

    before: EngineHash | None
    """The one before it in the same block of ours."""
    tokens: bytes
    """Its own, packed; empty where our block ends, since nothing goes on from it."""
    keys: tuple[ExtraKey, ...]
    """Media that it is the first to touch."""
    members: tuple[EngineHash, ...]
    """Where our block ends: all the others of it."""
    missing: int = 0
    """How many members are not resident."""

    @property
    def ends_block(self) -> bool:
        return not self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Of one engine block. `part` is None where it is a whole block of ours."""

    whole: BlockHash | None
    """Of our last block that ends at or before the end of this one; None: no hash is possible."""
    part: Part | None = None


NOWHERE = Place(None)
"""Of a block with extra keys that we do not understand, and of all that follow it."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a run of engine blocks goes on from."""

    whole: BlockHash
    tail: bytes = b""
    """Packed tokens since."""
    keys: tuple[ExtraKey, ...] = ()
    members: tuple[EngineHash, ...] = ()
    """The engine blocks of the tail."""


class Placing:
    """Computes the places of one engine's blocks."""

    def __init__(self, form: ChainForm) -> None:
        self._form = form
        self._adapters = {name: adapter_key(name, weights) for name, weights in form.adapters}

    def root(self, run: EngineStored) -> Start:
        """Of a run that starts a prompt."""
        return Start(chain_start(self._form.scheme, self._form.namespace_id, salt_bytes(run.salt)))

    def understood_blocks(self, run: EngineStored) -> int:
        """Leading blocks of which a hash can be made."""
        if self._form.scheme is HashScheme.UNKNOWN:
            return 0
        if self._form.scheme is HashScheme.SGLANG and (
            run.adapter
            or any(run.media)
            or run.block_tokens != self._form.block_tokens
            or not _is_as_said(run)
        ):
            return 0
        return run.understood_blocks if not run.adapter or run.adapter in self._adapters else 0

    def places(self, run: EngineStored, start: Start) -> Iterator[Place]:
        """One for each block of `run`, whose tokens must be there for all of them."""
        blocks = self.understood_blocks(run)
        if blocks:
            yield from self._hashed(run, start, blocks)
        for _ in range(len(run.hashes) - blocks):
            yield NOWHERE

    def _hashed(self, run: EngineStored, start: Start, blocks: int) -> Iterator[Place]:
        size, ours = run.block_tokens, self._form.block_tokens
        tail = np.frombuffer(start.tail, "<u4")
        tokens = np.concatenate((tail, run.tokens[: blocks * size])).astype("<u4", copy=False)
        first = len(start.tail) // _TOKEN_BYTES
        keys: dict[int, tuple[ExtraKey, ...]] = {0: start.keys} if start.keys else {}
        parts: list[Part | None] = []
        members = start.members
        for number in range(blocks):
            mine, offset = divmod(first + number * size, ours)
            fresh: tuple[ExtraKey, ...] = ()
            for medium in run.media[number] if run.media else ():
                key = media_key(medium.identifier, medium.offset_tokens + offset)
                if key not in keys.get(mine, ()):
                    keys[mine] = (*keys.get(mine, ()), key)
                    fresh = (*fresh, key)
            if size == ours:
                parts.append(None)
                continue
            before = members[-1] if members else None
            if offset + size < ours:
                own = tokens[first + number * size :][:size].tobytes()
                parts.append(Part(before, own, fresh, ()))
                members = (*members, run.hashes[number])
            else:
                parts.append(Part(before, b"", fresh, tuple(dict.fromkeys(members))))
                members = ()
        whole = [start.whole, *self._hashes(run, start, tokens, keys)]
        for number, part in enumerate(parts):
            yield Place(whole[(first + (number + 1) * size) // ours], part)

    def _hashes(
        self,
        run: EngineStored,
        start: Start,
        tokens: np.ndarray,
        media: Mapping[int, tuple[ExtraKey, ...]],
    ) -> list[BlockHash]:
        form = self._form
        adapter = (self._adapters[run.adapter],) if run.adapter else ()
        keys: Mapping[int, tuple[ExtraKey, ...]] | tuple[ExtraKey, ...] = adapter
        if media:
            full = range(len(tokens) // form.block_tokens)
            keys = {number: (*adapter, *media.get(number, ())) for number in full}
        return chain_hashes(
            form.scheme,
            form.namespace_id,
            tokens,
            form.block_tokens,
            extra_keys=keys,
            parent=start.whole,
        )


def _is_as_said(run: EngineStored) -> bool:
    """Whether SGLang's own hash of a prompt's first page is made of what its event says.

    A request's `extra_key` is in the hash (format "dynamo") and not in the event; what a page of a
    draft model's bigrams is made of is not either. All that follows goes on from the first page.
    """
    if run.parent is not None:
        return True
    first, number = run.tokens[: run.block_tokens], run.hashes[0]
    return isinstance(number, int) and number % (1 << 64) in first_in_events(
        first, salt_bytes(run.salt)
    )
