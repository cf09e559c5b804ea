"""One engine's health: what the active probe says, and what requests meet. Pure.

    UNKNOWN --probe ok--> HEALTHY --failures, or refused--> OPEN --after a pause--> probe again

Only HEALTHY engines get requests. A success of a request clears the requests' failures, one of the
probe only the probe's: an engine whose /health is fine while its completions fail still opens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

FAILED_STATUSES = frozenset({502, 503, 504})
"""By which an engine, or what stands before it, says that it cannot serve."""


class HealthState(str, Enum):
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """How many failures in a row open it, and how long it stays open before a probe."""

    failures: int
    open_seconds: float


class Health:
    """State of one engine. Times are monotonic seconds, passed in."""

    def __init__(
        self, limits: BreakerLimits, now: float, changed: Callable[[], None] | None = None
    ) -> None:
        self._limits = limits
        self._changed = changed
        self.state = HealthState.UNKNOWN
        self.since = now
        """When the state was entered."""
        self._request_failures = 0
        self._probe_failures = 0
        self._open_until = now

    @property
    def is_healthy(self) -> bool:
        return self.state is HealthState.HEALTHY

    def may_probe(self, now: float) -> bool:
        """Whether the breaker lets an active probe through now."""
        return self.state is not HealthState.OPEN or now >= self._open_until

    def probe_succeeded(self, now: float) -> None:
        self._probe_failures = 0
        if self.state is not HealthState.HEALTHY:
            self._request_failures = 0
            self._enter(HealthState.HEALTHY, now)

    def probe_failed(self, now: float) -> None:
        """A probe without an OK in time. From OPEN one is enough to stay open."""
        self._probe_failures += 1
        if self.state is not HealthState.HEALTHY or self._probe_failures >= self._limits.failures:
            self._open(now)

    def refused(self, now: float) -> None:
        """Nothing listens there: no need to count."""
        self._open(now)

    def request_succeeded(self) -> None:
        self._request_failures = 0

    def request_failed(self, now: float) -> None:
        """Closed before a response, too late, or 502 to 504."""
        self._request_failures += 1
        if self._request_failures >= self._limits.failures:
            self._open(now)

    def check_integrity(self) -> None:
        if self.state is HealthState.HEALTHY:
            assert self._request_failures < self._limits.failures
            assert self._probe_failures < self._limits.failures
        assert self._request_failures >= 0
        assert self._probe_failures >= 0

    def _open(self, now: float) -> None:
        self._open_until = now + self._limits.open_seconds
        self._request_failures = 0
        self._probe_failures = 0
        if self.state is HealthState.UNKNOWN:
            return  # never seen well: not broken, still starting; the probe goes on
        if self.state is not HealthState.OPEN:
            self._enter(HealthState.OPEN, now)

    def _enter(self, state: HealthState, now: float) -> None:
        self.state = state
        self.since = now
        if self._changed is not None:
            self._changed()
