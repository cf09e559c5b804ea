"""Blocks whose writeback failed, to be tried again. Pure: the clock is passed in.

One pause for all: it doubles while the drive fails, up to a minute, and ends with the first write
that succeeds. A block that fails although the drive works is given up after a few attempts.
"""

from __future__ import annotations

from store_daemon.block import Block

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
MOST_ATTEMPTS = 4
"""Failures of one block while the drive works."""
RETRY_BLOCKS = 32
"""Blocks that one retry takes: enough to find out whether the drive works again."""


class Retries:
    """At most `limit` blocks; what fails beyond that is for the next start of the daemon."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._attempts: dict[Block, int] = {}
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_at = 0.0

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, block: Block) -> bool:
        return block in self._attempts

    def failed(self, block: Block, attempts: int, is_drive_failing: bool, now: float) -> bool:
        """A write failed after so many before it; False: the block is given up."""
        if not is_drive_failing:
            attempts += 1
        if attempts >= MOST_ATTEMPTS or len(self._attempts) >= self._limit:
            return False
        self._attempts[block] = attempts
        self._next_at = max(self._next_at, now + self._pause_seconds)
        return True

    def due(self, now: float) -> dict[Block, int]:
        """Blocks to try now and their failures so far; they are taken out. Doubles the pause."""
        if not self._attempts or now < self._next_at:
            return {}
        chosen = dict(list(self._attempts.items())[:RETRY_BLOCKS])
        for block in chosen:
            del self._attempts[block]
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        self._next_at = now + self._pause_seconds
        return chosen

    def worked(self, now: float) -> None:
        """A write succeeded: the rest need not wait."""
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_at = now

    def check_integrity(self) -> None:
        assert len(self._attempts) <= self._limit
        assert all(0 <= attempts < MOST_ATTEMPTS for attempts in self._attempts.values())
        assert FIRST_PAUSE_SECONDS <= self._pause_seconds <= LONGEST_PAUSE_SECONDS
