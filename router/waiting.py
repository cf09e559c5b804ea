"""Requests that wait for an engine with room: who is next, who must go when too many wait. Pure.

The higher class goes first, within a class the one that came first. Room for another model is no
room: a waiter stands only behind those of its own model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, TypeVar


class Priority(IntEnum):
    """Class of a request; the smaller value goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class BadPriorityError(ValueError):
    """The header names no class."""


_BY_NAME = {b"high": Priority.HIGH, b"normal": Priority.NORMAL, b"low": Priority.LOW}


def read_priority(header: bytes | None, in_body: object) -> Priority:
    """The class a request asks for: by the header, else by the sign of the body's `priority`.

    In the body smaller is sooner and 0 is normal, as vLLM has it; what is no number is left for the
    engine to judge.

    Raises:
        BadPriorityError: the header says something else than high, normal or low.
    """
    if header is not None:
        named = _BY_NAME.get(header.strip().lower())
        if named is None:
            raise BadPriorityError("x-emberkv-priority must be high, normal or low")
        return named
    if type(in_body) is not int or in_body == 0:
        return Priority.NORMAL
    return Priority.HIGH if in_body < 0 else Priority.LOW


class Place:
    """One request's place in the line. Subclassed by whoever waits on it."""

    __slots__ = ("model", "priority")

    def __init__(self, model: str, priority: Priority) -> None:
        self.model = model
        self.priority = priority


P = TypeVar("P", bound=Place)


class WaitingLine(Generic[P]):
    """At most `limit` places. O(1) to join and leave."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lines: dict[Priority, dict[P, None]] = {priority: {} for priority in Priority}
        self._models: Counter[tuple[Priority, str]] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[P]:
        """In the order in which they are served."""
        for line in self._lines.values():
            yield from tuple(line)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.limit

    def count(self, priority: Priority) -> int:
        return len(self._lines[priority])

    def ahead(self, model: str, priority: Priority) -> int:
        """How many of this model a newcomer of this class would stand behind."""
        return sum(self._models[(other, model)] for other in Priority if other <= priority)

    def displaceable(self, priority: Priority) -> P | None:
        """Who has to go for a newcomer of this class: the last of the lowest class below it."""
        for other in reversed(Priority):
            if other <= priority:
                return None
            if self._lines[other]:
                return next(reversed(self._lines[other]))
        return None

    def join(self, place: P) -> None:
        """Take a place at the end of its class. The line must not be full."""
        assert not self.is_full, "a place beyond the limit"
        assert place not in self._lines[place.priority], "a place taken twice"
        self._lines[place.priority][place] = None
        self._size += 1
        self._models[(place.priority, place.model)] += 1

    def leave(self, place: P) -> None:
        """Give the place up; nothing happens to one that is not in the line."""
        if place not in self._lines[place.priority]:
            return
        del self._lines[place.priority][place]
        self._size -= 1
        key = (place.priority, place.model)
        self._models[key] -= 1
        if not self._models[key]:
            del self._models[key]

    def check_integrity(self) -> None:
        assert len(self) == sum(map(len, self._lines.values()))
        assert len(self) <= self.limit, f"{len(self)} wait, {self.limit} may"
        counted = Counter((place.priority, place.model) for place in self)
        assert counted == self._models, f"{counted} != {self._models}"
