"""A rate that may be exceeded once and is then waited for. Pure: the clock is passed in."""

from __future__ import annotations

BURST_SECONDS = 1.0


class TokenBucket:
    """What is spent may go into debt; `delay` says how long until that is paid off.

    So over any time no more is begun than the rate allows, one second's worth, and the last piece.
    """

    def __init__(self, per_second: int, now: float) -> None:
        self.per_second = per_second
        """0 is no limit. May be changed."""
        self._tokens = per_second * BURST_SECONDS
        self._at = now

    def spend(self, amount: int, now: float) -> None:
        self._refill(now)
        if self.per_second:
            self._tokens -= amount

    def delay(self, now: float) -> float:
        """Seconds until there is something to spend; 0 when there is."""
        if not self.per_second:
            return 0.0
        self._refill(now)
        return max(0.0, -self._tokens / self.per_second)

    def _refill(self, now: float) -> None:
        if not self.per_second:
            self._tokens, self._at = 0.0, now  # what was free does not count afterwards
            return
        gained = max(0.0, now - self._at) * self.per_second
        self._tokens = min(self._tokens + gained, self.per_second * BURST_SECONDS)
        self._at = now
