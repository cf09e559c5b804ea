"""Every error of the contract, and its gRPC status number.

EmberError
├── InvalidRequestError        3   the caller's bytes or values are wrong
│   ├── FrameError                 a local frame is malformed or too large
│   └── ConfigError                a setting is wrong; names the key and the fix
├── DeadlineError              4
├── UnknownNamespaceError      5
├── UnknownLeaseError          5
├── UnknownStageError          5
├── AccessDeniedError          7
├── PoolFullError              8
├── LayoutMismatchError        9
├── LeaseExpiredError          9
├── ChecksumUnknownError       9   nobody has computed it yet
├── StaleIncarnationError      9
├── PreflightError             9   the machine cannot carry the configuration
├── IntegrityError            13   an invariant of ours does not hold
├── UnavailableError          14   daemon, peer or index is away: a miss for the engine
│   └── DrainingError              the daemon takes no new work
├── CorruptionError           15   stored bytes do not match their checksum
└── UnauthenticatedError      16   the caller did not show the secret that is asked for
"""

from __future__ import annotations


class EmberError(Exception):
    """Base of all errors of the contract."""

    code = 2  # gRPC UNKNOWN


class InvalidRequestError(EmberError):
    code = 3


class FrameError(InvalidRequestError):
    """The stream cannot be trusted after it; the connection is closed."""


class ConfigError(InvalidRequestError):
    """Raised while settings are read; nothing has been started."""


class DeadlineError(EmberError):
    code = 4


class UnknownNamespaceError(EmberError):
    code = 5


class UnknownLeaseError(EmberError):
    """Released before, or never granted."""

    code = 5


class UnknownStageError(EmberError):
    """Committed or aborted before, or never granted."""

    code = 5


class AccessDeniedError(EmberError):
    code = 7


class PoolFullError(EmberError):
    code = 8


class LayoutMismatchError(EmberError):
    code = 9


class LeaseExpiredError(EmberError):
    code = 9


class ChecksumUnknownError(EmberError):
    code = 9


class StaleIncarnationError(EmberError):
    code = 9


class PreflightError(EmberError):
    """Raised at start with the numbers that do not fit."""

    code = 9


class IntegrityError(EmberError):
    code = 13


class UnavailableError(EmberError):
    code = 14


class DrainingError(UnavailableError):
    pass


class CorruptionError(EmberError):
    code = 15


class UnauthenticatedError(EmberError):
    code = 16


def _tree(base: type[EmberError]) -> dict[str, type[EmberError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found |= _tree(child)
    return found


ERROR_TYPES = _tree(EmberError)


def error_from_wire(type_name: str, message: str) -> EmberError:
    """Rebuild an error a server sent. An unknown name (a newer server) becomes an EmberError."""
    return ERROR_TYPES.get(type_name, EmberError)(message)
