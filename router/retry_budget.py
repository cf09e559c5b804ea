"""How many retries a router may make: a share of its requests, so that retries make no storm. Pure.

One engine that dies costs a few; when every engine fails, sending each request several times
would only keep them from recovering.
"""

from __future__ import annotations


class RetryBudget:
    """Fills by `share` with each request up to `burst`, which it begins with."""

    def __init__(self, share: float, burst: int) -> None:
        self._share = share
        self._burst = float(burst)
        self._left = float(burst)

    def requested(self) -> None:
        """A request came."""
        self._left = min(self._burst, self._left + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made; then it is counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def check_integrity(self) -> None:
        assert 0 <= self._left <= self._burst
