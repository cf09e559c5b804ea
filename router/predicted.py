"""Chains just routed to an engine, which count as present there until events can tell. Pure.

Without it the siblings of a burst, milliseconds apart, would each find an empty index and scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PredictedChains:
    """Index keys per engine with an expiry. Time is passed in, monotonic seconds."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._expiry: dict[str, dict[int, float]] = {}
        self._notes: deque[tuple[float, str, Sequence[int]]] = deque()

    def note(self, url: str, keys: Sequence[int], now: float) -> None:
        """The chain `keys` was sent to the engine at `url`. O(len(keys))."""
        self.expire(now)
        if not keys:
            return
        expires_at = now + self._ttl_seconds
        self._expiry.setdefault(url, {}).update(dict.fromkeys(keys, expires_at))
        self._notes.append((expires_at, url, keys))

    def hit_blocks(self, url: str, keys: Sequence[int], now: float) -> int:
        """Return how many leading blocks of `keys` are predicted. O(log len(keys)).

        Each note sets a whole prefix, so what is alive of a chain is a prefix of it and the end can
        be found by bisection.
        """
        alive = self._expiry.get(url)
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

    def forget(self, url: str) -> None:
        """The engine died or was restarted: nothing is there any more."""
        self._expiry.pop(url, None)

    def expire(self, now: float) -> None:
        """Drop what is over. Amortised O(1) per key noted."""
        while self._notes and self._notes[0][0] <= now:
            _, url, keys = self._notes.popleft()
            alive = self._expiry.get(url)
            if alive is None:
                continue
            for key in keys:
                if alive.get(key, now + 1) <= now:
                    del alive[key]
            if not alive:
                del self._expiry[url]

    def check_integrity(self) -> None:
        noted = {(url, key) for _, url, keys in self._notes for key in keys}
        held = {(url, key) for url, alive in self._expiry.items() for key in alive}
        assert held <= noted, "a predicted block that no note will expire"
        assert all(self._expiry.values()), "an engine listed without predicted blocks"
        expiries = [expires_at for expires_at, _, _ in self._notes]
        assert expiries == sorted(expiries), "notes out of order"
