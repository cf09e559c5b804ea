"""Names and bytes of the index in Redis; pure. One place knows them.

    P{tag}KKKKKKKK      who has block K (8 raw bytes): sorted big-endian words `number << 3 | tiers`
    P{tag}r<n>.<t>.<s>  reverse: slice s of what number n has in tier t, a set of signed integers
    P{tag}f<n>          fence: the token whose writes of number n are taken

A block's tag and slice come from its key's low bits, so a chain spreads over a cluster's masters,
one script's keys share a slot, and number n can be cleared by naming 16 x 256 small sets: nothing
is ever searched for. A slice of up to 512 members is an intset, 8 bytes a row.
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

SLICES = 256
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

    def slice(self, tag: int, number: Holder, tier: Tier, part: int) -> bytes:
        return self._heads[tag] + b"r%d.%d.%d" % (number, tier, part)

    def slices(self, tag: int, number: Holder, tier: Tier) -> list[bytes]:
        """All reverse sets of one tag."""
        head = self._heads[tag] + b"r%d.%d." % (number, tier)
        return [head + b"%d" % part for part in range(SLICES)]

    def slices_of(self, tag: int, number: Holder, tiers: Sequence[int], keys: Keys) -> list[bytes]:
        """The reverse set of each row; all keys are of `tag`."""
        head = self._heads[tag] + b"r%d." % number
        parts = ((keys >> np.uint64(4)) & np.uint64(SLICES - 1)).tolist()
        return [head + b"%d.%d" % (tier, part) for tier, part in zip(tiers, parts, strict=True)]

    def registry(self, name: str) -> str:
        """A key of the registry; all of them share one slot."""
        return f"{self.prefix}{{i}}{name}"


def tags_of(keys: Keys) -> npt.NDArray[np.intp]:
    return (keys & np.uint64(len(TAGS) - 1)).astype(np.intp)


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
