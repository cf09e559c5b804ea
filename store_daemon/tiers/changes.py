"""What the SSD tier did on its own account, for the catalog to follow; and what reclaim keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from store_daemon.tiers import segments
from store_daemon.tiers.segments import SsdRow


@dataclass(frozen=True, slots=True)
class Moved:
    """A record that was re-appended: the same part with the same bytes at another place."""

    old: SsdRow
    new: SsdRow


@dataclass(slots=True)
class TierChanges:
    """To be followed like this: first what moved, then what went, then what came back."""

    gone: list[SsdRow] = field(default_factory=list)
    """Reclaimed."""
    lost: list[SsdRow] = field(default_factory=list)
    """Not readable any more; where DRAM still has the bytes they may be written again."""
    moved: list[Moved] = field(default_factory=list)
    found: list[SsdRow] = field(default_factory=list)
    """On a drive that came back."""

    def __bool__(self) -> bool:
        return bool(self.gone or self.lost or self.moved or self.found)


@dataclass(frozen=True, slots=True)
class Kept:
    """Records of a segment to re-append when it is reclaimed."""

    pinned: Sequence[SsdRow]
    """Must outlive the segment."""
    read: Sequence[SsdRow]
    """Worth it, as far as there is room."""


def choose_kept(
    rows: Iterable[SsdRow],
    is_pinned: Callable[[SsdRow], bool],
    is_used: Callable[[SsdRow], bool],
    limit_bytes: int,
) -> Kept | None:
    """What fits in `limit_bytes`, headers included, so that reclaim frees room. Pure.

    None if the pinned records alone do not fit: such a segment is better left where it is.
    """
    pinned: list[SsdRow] = []
    used: list[SsdRow] = []
    for row in rows:
        if is_pinned(row):
            pinned.append(row)
        elif is_used(row):
            used.append(row)
    left = limit_bytes - sum(segments.record_bytes(row.length) for row in pinned)
    if left < 0:
        return None
    kept: list[SsdRow] = []
    for row in used:
        size = segments.record_bytes(row.length)
        if size <= left:
            kept.append(row)
            left -= size
    return Kept(pinned, kept)
