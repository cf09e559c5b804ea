"""What one tenant has left: requests and tokens a minute, requests at once. Pure.

Buckets hold a minute's worth and fill evenly. A cost beyond a full bucket is let through when it is
full, into debt, or a prompt longer than a minute's tokens could never run.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.keys import TenantLimits

MINUTE = 60.0


class Bucket:
    """One limit by the minute. Time is passed in, monotonic seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def seconds_until(self, cost: int, now: float) -> float:
        """How long until `cost` may be taken; 0: now."""
        self._fill(now)
        missing = min(cost, self.per_minute) - self._level
        return max(0.0, missing * MINUTE / self.per_minute)

    def take(self, cost: int, now: float) -> None:
        """Take it, whatever is left."""
        self._fill(now)
        self._level -= cost

    def give_back(self, cost: int, now: float) -> None:
        """What was taken was not used after all."""
        self._fill(now)
        self._level = min(float(self.per_minute), self._level + cost)

    def resize(self, per_minute: int, now: float) -> None:
        """A changed limit: what was used stays used, of a smaller one the same share.

        Else what was right under a large limit would shut the tenant out for long.
        """
        self._fill(now)
        if per_minute >= self.per_minute:
            self._level += per_minute - self.per_minute
        elif self._level > 0:
            self._level *= per_minute / self.per_minute
        self.per_minute = per_minute

    def check_integrity(self) -> None:
        assert self._level <= self.per_minute

    def _fill(self, now: float) -> None:
        filled = self._level + max(0.0, now - self._at) * self.per_minute / MINUTE
        self._level = min(float(self.per_minute), filled)
        self._at = max(self._at, now)


@dataclass(frozen=True, slots=True)
class Overdrawn:
    """A limit that does not allow a request now."""

    limit: str
    seconds: float


class TenantBudget:
    """The limits of one tenant and what it has used of them."""

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self.active = 0
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def enter(self, now: float) -> Overdrawn | None:
        """Count a request in, or say what is against it; then nothing was counted."""
        most = self.limits.concurrent_requests
        if most is not None and self.active >= most:
            return Overdrawn(f"{most} requests at once", 1.0)
        if self._requests is not None:
            wait = self._requests.seconds_until(1, now)
            if wait > 0:
                return Overdrawn(f"{self._requests.per_minute} requests a minute", wait)
            self._requests.take(1, now)
        self.active += 1
        return None

    def leave(self) -> None:
        assert self.active > 0, "more requests left than came"
        self.active -= 1

    def spend_prompt(self, tokens: int, now: float) -> Overdrawn | None:
        """Take a prompt's tokens, or say when they may be taken."""
        if self._tokens is None:
            return None
        wait = self._tokens.seconds_until(tokens, now)
        if wait > 0:
            return Overdrawn(f"{self._tokens.per_minute} tokens a minute", wait)
        self._tokens.take(tokens, now)
        return None

    def return_prompt(self, tokens: int, now: float) -> None:
        """No engine got the prompt whose tokens were taken."""
        if self._tokens is not None:
            self._tokens.give_back(tokens, now)

    def spend_answer(self, tokens: int, now: float) -> None:
        """Take what was generated, into debt if need be."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def change(self, limits: TenantLimits, now: float) -> None:
        """Limits of a reloaded file; what is running goes on."""
        self._requests = _changed(self._requests, limits.requests_per_minute, now)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute, now)
        self.limits = limits

    def check_integrity(self) -> None:
        assert self.active >= 0
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.check_integrity()


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _changed(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
