"""What engines tell of their own KV cache, in one form for all engines and versions.

An engine's hash is opaque: it names a block for removal and as a parent, and is never compared
with ours, which is recomputed from the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EngineHash = int | bytes
"""A block as its engine calls it: an integer of 64 bits, signed or not, or the raw digest."""


@dataclass(frozen=True, slots=True)
class MediaAt:
    """An image or sound in an engine block; `offset_tokens` counts from the block's first token."""

    identifier: str
    offset_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class EngineStored:
    """Blocks that follow each other are now in HBM."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    """The block before the first; None at the start of a prompt."""
    tokens: npt.NDArray[np.uint32]
    """Of all blocks; empty where the engine does not say."""
    block_tokens: int
    group: int
    is_full: bool
    """The group's layers need every block: full or mla attention. Others are not counted."""
    salt: str
    adapter: str
    media: tuple[tuple[MediaAt, ...], ...]
    """For each block; empty when no block has any."""
    understood_blocks: int
    """Leading blocks whose extra keys are all understood."""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """Blocks left HBM."""

    hashes: tuple[EngineHash, ...]
    group: int


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Nothing is left in the engine's HBM cache. Its other tiers are not meant."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True, eq=False)
class EngineMessage:
    """One published message, and how many of its events were left out and why."""

    events: tuple[EngineEvent, ...]
    dp_rank: int | None
    other_media: int = 0
    """Of the engine's own CPU or disk tiers."""
    unknown: int = 0
    """Of a kind that is not known."""
    malformed: int = 0
