"""What reads and writes between pools of different hosts are described with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from emberkv_proto.errors import DeadlineError, UnavailableError
from emberkv_proto.types import Incarnation


class ReadCancelledError(UnavailableError):
    """The reader gave up; the peer is not to blame."""


class BusyHereError(DeadlineError):
    """This side has no connection or thread free; that says nothing of the peer."""


@dataclass(frozen=True, slots=True)
class TransportAddress:
    """Where, how and in which life of its daemon a pool can be read."""

    transport: str
    address: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` bytes from `remote_offset` of the peer's pool to `local_offset` of ours."""

    local_offset: int
    remote_offset: int
    length: int


class Cancellation:
    """Ends blocking reads from another thread. Cancelled once, it stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aborts: list[Callable[[], None]] = []
        self._is_cancelled = False

    def cancel(self) -> None:
        """Abort every read in flight that carries this; later ones fail at once."""
        with self._lock:
            self._is_cancelled = True
            for abort in self._aborts:
                abort()

    @contextmanager
    def aborting_with(self, abort: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call `abort` (quick, from any thread) while the body runs.

        Raises ReadCancelledError when it is cancelled already.
        """
        with self._lock:
            self._check()
            self._aborts.append(abort)
        try:
            yield
        finally:
            with self._lock:
                self._aborts.remove(abort)

    def check(self) -> None:
        """Raises ReadCancelledError once cancelled."""
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._is_cancelled:
            raise ReadCancelledError("the read was cancelled")


class Peer(Protocol):
    """A connected owner of blocks, as the transport that made it knows it."""

    @property
    def address(self) -> TransportAddress: ...
