"""How long an acquire lets the daemon bring blocks when the caller does not say. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import AcquirePolicy

LONGEST_SECONDS = 600.0
"""The daemon goes on no longer than this."""
MAX_WAIT_SECONDS = 3600.0
WAIT_SLICE_SECONDS = 0.05
"""A wait is cut into slices, so that other threads' calls and heartbeats come in between."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Of the policy TIMEOUT: a base, and a share for each 1024 tokens that are asked for."""

    base_seconds: float = 1.0
    seconds_per_1024_tokens: float = 0.25

    def __post_init__(self) -> None:
        """Raises InvalidRequestError unless both are finite and not negative."""
        for name in ("base_seconds", "seconds_per_1024_tokens"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise InvalidRequestError(f"{name} {value} must be a finite number, 0 or more")

    def deadline_seconds(self, policy: AcquirePolicy, tokens: int) -> float:
        """Deadline of an acquire over so many tokens; 0 leaves it to the daemon.

        BEST_EFFORT waits for nothing, WAIT_COMPLETE for as long as the daemon does.
        """
        if policy is not AcquirePolicy.TIMEOUT:
            return 0.0
        return min(
            self.base_seconds + self.seconds_per_1024_tokens * tokens / 1024, LONGEST_SECONDS
        )


DEFAULT_PATIENCE = Patience()


def check_seconds(seconds: float) -> float:
    """Raises InvalidRequestError unless it is a number in 0..3600."""
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequestError(f"{seconds} seconds is not in 0..{MAX_WAIT_SECONDS:g}")
    return float(seconds)
