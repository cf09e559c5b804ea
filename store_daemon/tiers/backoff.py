"""When to try again what failed. Pure: the clock is passed in."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


class Backoff:
    """Each failure in a row doubles the pause, up to half a minute; a success ends it."""

    def __init__(self) -> None:
        self.why: str | None = None
        """The last failure; None while it works."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._retry_at = 0.0

    def failed(self, why: str, now: float) -> None:
        self.why = why
        self._retry_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def worked(self) -> None:
        self.why = None
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._retry_at = 0.0

    def is_resting(self, now: float) -> bool:
        """Whether it failed so lately that it is not to be tried."""
        return now < self._retry_at

    def is_due(self, now: float) -> bool:
        """Whether it failed and may be tried again."""
        return self.why is not None and now >= self._retry_at
