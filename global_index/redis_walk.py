"""From blocks' values in Redis to leading runs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from global_index.index import MAX_HOLDERS, Holder, HolderHit

_WORD = np.dtype(">u2")


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Who holds some consecutive blocks of a chain: one entry for each (block, number)."""

    blocks: int
    places: npt.NDArray[np.intp]
    numbers: npt.NDArray[np.intp]
    tiers: npt.NDArray[np.uint8]
    malformed: int
    """Values that no writer of ours wrote; they count as absent."""


def decode(values: Sequence[bytes | None]) -> Window:
    """Understand a reply of blocks' values. O(bytes)."""
    sizes = np.fromiter((len(value) if value else 0 for value in values), np.intp, len(values))
    malformed = 0
    if np.any((sizes % 2 == 1) | (sizes > 2 * MAX_HOLDERS)):
        bad = (sizes % 2 == 1) | (sizes > 2 * MAX_HOLDERS)
        malformed = int(bad.sum())
        values = [None if is_bad else value for value, is_bad in zip(values, bad, strict=True)]
        sizes[bad] = 0
    words = np.frombuffer(b"".join([value for value in values if value]), _WORD)
    places = np.repeat(np.arange(len(values), dtype=np.intp), sizes // 2)
    tiers = (words & 7).astype(np.uint8)
    return Window(len(values), places, (words >> 3).astype(np.intp), tiers, malformed)


class ChainWalk:
    """Leading runs over windows of a chain that come one after the other; pure.

    Exact with holes and with tiers alternating: a number's run goes on only while every block
    names it, so no window may be skipped.
    """

    def __init__(self) -> None:
        self._walked = 0
        self._active = np.zeros(0, np.intp)
        self._counts = np.zeros((0, 3), np.int64)
        self._ended: list[HolderHit] = []

    @property
    def is_over(self) -> bool:
        return self._walked > 0 and self._active.size == 0

    def add(self, window: Window) -> None:
        """Walk the next blocks. O(entries + active numbers x blocks)."""
        if window.blocks == 0:
            return
        if self._walked == 0:
            self._active = np.unique(window.numbers[window.places == 0])
            self._counts = np.zeros((self._active.size, 3), np.int64)
        place_of = np.full(MAX_HOLDERS, -1, np.intp)
        place_of[self._active] = np.arange(self._active.size)
        rows = place_of[window.numbers]
        held = np.zeros((self._active.size, window.blocks), np.uint8)
        known = rows >= 0
        held[rows[known], window.places[known]] = window.tiers[known]
        missing = held == 0
        runs = np.where(missing.any(axis=1), missing.argmax(axis=1), window.blocks)
        in_run = np.arange(window.blocks) < runs[:, None]
        is_hbm = (held & 1) != 0
        is_dram = ((held & 2) != 0) & ~is_hbm
        self._counts += np.stack(
            [runs, (is_hbm & in_run).sum(axis=1), (is_dram & in_run).sum(axis=1)], axis=1
        )
        self._walked += window.blocks
        goes_on = runs == window.blocks
        self._ended += self._hits(~goes_on)
        self._active, self._counts = self._active[goes_on], self._counts[goes_on]

    def keep(self, numbers: npt.NDArray[np.intp]) -> None:
        """Walk on for these only; runs of others that have not ended are left out of `hits`."""
        stays = np.isin(self._active, numbers)
        self._active, self._counts = self._active[stays], self._counts[stays]

    def hits(self) -> list[HolderHit]:
        return self._ended + self._hits(np.ones(self._active.size, bool))

    def _hits(self, chosen: npt.NDArray[np.bool_]) -> list[HolderHit]:
        return [
            HolderHit(Holder(number), hit, hbm, dram)
            for number, (hit, hbm, dram) in zip(
                self._active[chosen].tolist(), self._counts[chosen].tolist(), strict=True
            )
        ]
