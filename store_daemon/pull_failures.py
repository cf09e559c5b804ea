"""What a failed pull is counted as, and whether the peer is to blame. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from client_sdk.transport.base import BusyHereError
from emberkv_proto.errors import (
    CorruptionError,
    DeadlineError,
    EmberError,
    InvalidRequestError,
    LeaseExpiredError,
    StaleIncarnationError,
    UnavailableError,
)

_REASONS: Mapping[type[EmberError], str] = {
    BusyHereError: "busy_here",
    DeadlineError: "deadline",
    LeaseExpiredError: "lease",
    StaleIncarnationError: "incarnation",
    CorruptionError: "checksum",
    UnavailableError: "unavailable",
    InvalidRequestError: "protocol",
}


def failure_reason(error: EmberError) -> str:
    """The counter of an error; "refused" is a peer that answered with an error of its own."""
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), "refused")


def is_blamed(
    error: EmberError, has_landed: bool, waited_seconds: float, blame_seconds: float
) -> bool:
    """Whether the breaker counts this. A tight deadline that passed is no failure of the peer."""
    if isinstance(error, BusyHereError):
        return False
    if isinstance(error, DeadlineError):
        return not has_landed and waited_seconds >= blame_seconds
    return isinstance(error, UnavailableError | InvalidRequestError | CorruptionError)
