"""Chains just routed to an engine, which count as present there until events can tell. Pure.

Without it the siblings of a burst, milliseconds apart, would each find an empty index and scatter.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Generation:
    """Expiries of keys by engine, of all notes that began within one time to live."""

    __slots__ = ("began", "expiry")

    def __init__(self, began: float) -> None:
        self.began = began
        self.expiry: dict[str, dict[int, float]] = {}


class PredictedChains:
    """Index keys per engine with an expiry. Time is passed in, monotonic seconds.

    What is over is not taken out key by key: notes go to the younger of two generations, and the
    older one is dropped as a whole once all in it is over.
    """

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._old = _Generation(0.0)
        self._young = _Generation(0.0)

    def note(self, url: str, keys: Sequence[int], now: float) -> None:
        """The chain `keys` was sent to the engine at `url`. O(len(keys)), at C speed."""
        self.expire(now)
        if not keys:
            return
        expires_at = now + self._ttl_seconds
        self._young.expiry.setdefault(url, {}).update(dict.fromkeys(keys, expires_at))

    def hit_blocks(self, url: str, keys: Sequence[int], now: float) -> int:
        """Return how many leading blocks of `keys` are predicted. O(log len(keys)).

        Each note sets a whole prefix, so what is alive of a chain in a generation is a prefix of it
        and the end can be found by bisection.
        """
        return max(
            _alive_blocks(generation.expiry.get(url), keys, now)
            for generation in (self._young, self._old)
        )

    def hits(self, keys: Sequence[int], now: float) -> dict[str, int]:
        """`hit_blocks` of every engine that has any, by URL."""
        found: dict[str, int] = {}
        if not keys:
            return found
        last, total, guess = keys[-1], len(keys), 0
        inside = outside = last
        """The last block that is in the guess, and the first that is not."""
        for generation in (self._young, self._old):
            for url, alive in generation.expiry.items():
                known = found.get(url, 0)
                # Most engines part from a chain where others do: at its shared beginning.
                if known < guess and alive.get(inside, now) > now >= alive.get(outside, now):
                    found[url] = guess
                    continue
                # What is alive is a beginning: without the next key there is no more to find.
                if known == total or alive.get(keys[known], now) <= now:
                    continue
                if alive.get(last, now) > now:
                    found[url] = total
                    continue
                found[url] = guess = _alive_blocks(alive, keys, now)
                inside, outside = keys[guess - 1], keys[guess]
        return found

    def forget(self, url: str) -> None:
        """The engine died or was restarted: nothing is there any more."""
        self._young.expiry.pop(url, None)
        self._old.expiry.pop(url, None)

    def expire(self, now: float) -> None:
        """Drop what is over, once in a time to live."""
        if now - self._young.began >= self._ttl_seconds:
            self._old = self._young
            self._young = _Generation(now)
            if now - self._old.began >= 2 * self._ttl_seconds:
                self._old = _Generation(now)

    def check_integrity(self) -> None:
        assert self._old.began <= self._young.began, "generations out of order"
        for generation in (self._old, self._young):
            assert all(generation.expiry.values()), "an engine listed without predicted blocks"


def _alive_blocks(alive: dict[int, float] | None, keys: Sequence[int], now: float) -> int:
    if not alive:
        return 0
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if alive.get(keys[middle], now) > now:
            low = middle + 1
        else:
            high = middle
    return low
