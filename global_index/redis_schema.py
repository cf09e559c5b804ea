"""Names and bytes of the index in Redis; pure. One place knows them.

    P{tag}KKKKKKKK      who has block K (8 raw bytes): sorted big-endian words `number << 3 | tiers`
    P{tag}r<n>.<t>.<b>.<s>  reverse: slice s of 2^b of what number n has in tier t, integers
    P{tag}f<n>          fence: `token:b`, whose writes of number n are taken and how it is sliced

A block's tag and slice come from its key's low bits, so a chain spreads over a cluster's masters,
one script's keys share a slot, and number n can be cleared by naming its sets: nothing is ever
searched for. A slice of up to 512 members is an intset, 8 bytes a row; so the slices of a number
grow in count with its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from emberkv_proto.events import Keys
from emberkv_proto.types import Tier
from global_index.index import Holder

TAGS = (
    "18", "5x", "dj", "3r", "d2", "pv", "uh", "iy", "ly", "h9", "uv", "q6", "9s", "5f", "dt", "ha",
)  # fmt: skip
"""Their slots lie 1,024 apart, so any cluster that splits the slots evenly gets an even share."""

MAX_SLICE_BITS = 12
SLICE_ROWS = 256
"""Wanted in a slice on average; twice as many still fit into Redis's default for an intset."""

DEFAULT_PREFIX = "ek"


class RedisSchema:
    """Key names under one prefix."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self.prefix = prefix
        self._heads = [f"{prefix}{{{tag}}}".encode() for tag in TAGS]
        self._head_bytes = np.array([list(head) for head in self._heads], np.uint8)

    def blocks(self, keys: Keys) -> list[bytes]:
        """Names of the blocks' values, in the order of `keys`."""
        head = self._head_bytes.shape[1]
        names = np.empty((keys.size, head + 8), np.uint8)
        names[:, :head] = self._head_bytes[tags_of(keys)]
        names[:, head:] = keys.astype("<u8").view(np.uint8).reshape(-1, 8)
        return [bytes(name) for name in names.view(f"V{head + 8}").ravel().tolist()]

    def fence(self, tag: int, number: Holder) -> bytes:
        return self._heads[tag] + b"f%d" % number

    def slice(self, tag: int, number: Holder, tier: Tier, bits: int, part: int) -> bytes:
        return self._heads[tag] + b"r%d.%d.%d.%d" % (number, tier, bits, part)

    def slices(self, tag: int, number: Holder, tier: Tier, bits: int) -> list[bytes]:
        """All reverse sets of one tag and tier."""
        return [self.slice(tag, number, tier, bits, part) for part in range(1 << bits)]

    def slices_of(
        self, tag: int, number: Holder, tiers: Sequence[int], bits: int, keys: Keys
    ) -> list[bytes]:
        """The reverse set of each row; all keys are of `tag`."""
        head = self._heads[tag] + b"r%d." % number
        parts = parts_of(keys, bits).tolist()
        return [
            head + b"%d.%d.%d" % (tier, bits, part) for tier, part in zip(tiers, parts, strict=True)
        ]

    def registry(self, name: str) -> str:
        """A key of the registry; all of them share one slot."""
        return f"{self.prefix}{{i}}{name}"


def tags_of(keys: Keys) -> npt.NDArray[np.intp]:
    return (keys & np.uint64(len(TAGS) - 1)).astype(np.intp)


def parts_of(keys: Keys, bits: int) -> npt.NDArray[np.intp]:
    """The slice of each key, by the bits above its tag's."""
    return ((keys >> np.uint64(4)) & np.uint64((1 << bits) - 1)).astype(np.intp)


def slice_bits_for(rows: int) -> int:
    """Into how many slices, as a power of two, each tag of so many rows in a tier is cut."""
    bits = 0
    while bits < MAX_SLICE_BITS and rows > len(TAGS) * SLICE_ROWS << bits:
        bits += 1
    return bits


def members_of(keys: Keys) -> list[int]:
    """Keys as the signed integers that a reverse set keeps in 8 bytes."""
    members: list[int] = keys.view(np.int64).tolist()
    return members


def keys_of(members: Sequence[bytes]) -> Keys:
    """The inverse of `members_of`, from a reply.

    Raises ValueError on what is no integer of 64 bits.
    """
    if not members:
        return np.zeros(0, np.uint64)
    return np.array([int(member) for member in members], np.int64).view(np.uint64)
