"""What this node has learnt of a peer: whether to ask it, and how fast it sends. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """One trial is allowed; its outcome decides."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    failures_to_open: int = 3
    open_seconds: float = 5.0
    assumed_bytes_per_second: float = 2e9
    """Of a peer that was never measured, or not lately: optimistic, so that it is tried."""
    memory_seconds: float = 30.0
    """A measured speed older than this says nothing any more."""
    newest_weight: float = 0.3


class PeerHealth:
    """Breaker and bandwidth of one peer. `now` is monotonic seconds."""

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._opened_at: float | None = None
        self._is_trial_running = False
        self._bytes_per_second: float | None = None
        self._measured_at = 0.0

    def state(self, now: float) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        if now - self._opened_at < self._limits.open_seconds:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def may_try(self, now: float) -> bool:
        """Whether a request may go to the peer now. Changes nothing."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._is_trial_running
        )

    def begin(self, now: float) -> None:
        """A request goes out; `succeed`, `fail` or `abandon` must follow."""
        assert self.may_try(now), "asked an unhealthy peer"
        self._is_trial_running = self.state(now) is BreakerState.HALF_OPEN

    def succeed(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._is_trial_running = False

    def fail(self, now: float) -> None:
        self._failures += 1
        if self._is_trial_running or self._failures >= self._limits.failures_to_open:
            self._opened_at = now
        self._is_trial_running = False

    def abandon(self) -> None:
        """The request ended without telling anything of the peer."""
        self._is_trial_running = False

    def measured(self, sent_bytes: int, seconds: float, now: float) -> None:
        """Blend one transfer into the speed."""
        speed = sent_bytes / max(seconds, 1e-9)
        weight = self._limits.newest_weight
        known = self._known_speed(now)
        self._bytes_per_second = speed if known is None else known + weight * (speed - known)
        self._measured_at = now

    def bytes_per_second(self, now: float) -> float:
        """How fast the peer sends, as measured or assumed."""
        return self._known_speed(now) or self._limits.assumed_bytes_per_second

    def check_integrity(self) -> None:
        """Assert that the breaker is open exactly from enough failures on."""
        assert self._failures >= 0
        if self._failures < self._limits.failures_to_open:
            assert self._opened_at is None
        assert not self._is_trial_running or self._opened_at is not None

    def _known_speed(self, now: float) -> float | None:
        is_fresh = now - self._measured_at <= self._limits.memory_seconds
        return self._bytes_per_second if is_fresh else None
