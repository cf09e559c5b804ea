"""Measures how long engines prefill, from when requests are sent and first bytes come. Pure.

A request's own time to its first byte tells little under load: it waits behind others, and an
engine may prefill several at once. So what is measured is a stretch: from the moment an engine has
something to prefill until it has nothing, or has answered `MAX_MEMBERS` requests. Its tokens are
those of the requests that were answered in it. A stretch counts when each of them came to a good
end and said what it had cached; one that was aborted, failed or told nothing voids it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

MAX_MEMBERS = 8


@dataclass(frozen=True, slots=True)
class Worked:
    """What an engine did between two moments, for one request or several."""

    computed_tokens: int = 0
    attention_pairs: int = 0
    """Computed tokens times the mean context each of them attends to."""
    dram_tokens: int = 0
    ssd_tokens: int = 0
    peer_tokens: int = 0

    def __add__(self, other: Worked) -> Worked:
        return Worked(
            self.computed_tokens + other.computed_tokens,
            self.attention_pairs + other.attention_pairs,
            self.dram_tokens + other.dram_tokens,
            self.ssd_tokens + other.ssd_tokens,
            self.peer_tokens + other.peer_tokens,
        )


class _Stretch:
    __slots__ = ("began", "ended", "is_void", "members", "told", "worked")

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended: float | None = None
        self.members = 0
        self.told = 0
        self.worked = Worked()
        self.is_void = False


class Watched:
    """One request on its way through an engine; leaving the block without `told` voids it."""

    __slots__ = ("_answered_in", "_is_told", "_sent_in", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, sent_in: _Stretch) -> None:
        self._stopwatch = stopwatch
        self._sent_in = sent_in
        self._answered_in: _Stretch | None = None
        self._is_told = False

    def answered(self) -> None:
        """The first byte of its body came. May be repeated."""
        if self._answered_in is None:
            self._answered_in = self._stopwatch.answered()

    def told(self, worked: Worked) -> None:
        """The answer ended well, and this is what it took until its first byte."""
        stretch = self._answered_in
        if stretch is None or self._is_told:
            return
        self._is_told = True
        stretch.told += 1
        stretch.worked = worked if stretch.told == 1 else stretch.worked + worked
        self._stopwatch.settle(stretch)

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """As leaving the block."""
        if self._is_told:
            return
        self._sent_in.is_void = True
        if self._answered_in is None:
            self._stopwatch.gave_up()
        else:
            self._answered_in.is_void = True


class Stopwatch:
    """The stretches of one engine. `measured` gets each good one: the work and its seconds."""

    def __init__(
        self, clock: Callable[[], float], measured: Callable[[Worked, float], None]
    ) -> None:
        self._clock = clock
        self._measured = measured
        self._prefilling = 0
        self._stretch: _Stretch | None = None

    def send(self) -> Watched:
        """A request goes to the engine now."""
        if self._stretch is None:
            self._stretch = _Stretch(self._clock())
        self._prefilling += 1
        return Watched(self, self._stretch)

    def answered(self) -> _Stretch:
        stretch = self._stretch
        assert stretch is not None, "an answer outside any stretch"
        stretch.members += 1
        self._prefilling -= 1
        if not self._prefilling or stretch.members >= MAX_MEMBERS:
            stretch.ended = self._clock()
            self._stretch = _Stretch(stretch.ended) if self._prefilling else None
        return stretch

    def gave_up(self) -> None:
        """A request will not be answered: who knows how long the engine worked on it."""
        assert self._stretch is not None, "a request outside any stretch"
        self._stretch.is_void = True
        self._prefilling -= 1
        if not self._prefilling:
            self._stretch.ended = self._clock()
            self._stretch = None

    def settle(self, stretch: _Stretch) -> None:
        if stretch.ended is not None and stretch.told == stretch.members and not stretch.is_void:
            stretch.is_void = True  # told once
            self._measured(stretch.worked, stretch.ended - stretch.began)

    def check_integrity(self) -> None:
        assert self._prefilling >= 0, f"{self._prefilling} requests prefill"
        assert (self._stretch is None) == (self._prefilling == 0)
        if self._stretch is not None:
            assert self._stretch.ended is None, "the running stretch has ended"
            assert self._stretch.told <= self._stretch.members < MAX_MEMBERS
