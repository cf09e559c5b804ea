"""Slots that rest: a writer who was cut off may still write to them for a while. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from store_daemon.tiers.slots import Slot


class Limbo:
    """Neither free nor anybody's, until their time is over.

    In the pool file they stay STAGED: a daemon that starts meanwhile lets them rest anew.
    """

    def __init__(self) -> None:
        self._resting: list[tuple[float, Slot]] = []

    def __iter__(self) -> Iterator[Slot]:
        for _, slot in self._resting:
            yield slot

    def rest(self, slots: Iterable[Slot], until: float) -> None:
        self._resting += [(until, slot) for slot in slots]

    def rested(self, now: float) -> list[Slot]:
        """Take out the slots that may be used again."""
        over = [slot for until, slot in self._resting if now >= until]
        self._resting = [entry for entry in self._resting if now < entry[0]]
        return over

    def check_integrity(self) -> None:
        """Assert that each slot rests once, and is neither free nor occupied."""
        places = [(slot.extent.number, slot.number) for slot in self]
        assert len(set(places)) == len(places), "a slot rests twice"
        for slot in self:
            assert slot.number not in slot.extent.free, "a resting slot is free"
            assert slot.number not in slot.extent.occupants, "a resting slot is occupied"
