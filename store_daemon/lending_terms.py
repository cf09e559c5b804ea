"""What a lender is given: its times, and its threads."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LendingTimes:
    """Seconds: a session's lease without heartbeat, and how long a peer's request may take."""

    lease_seconds: float
    peer_seconds: float


@dataclass(frozen=True, slots=True)
class Readers:
    """The threads that move blocks to DRAM."""

    executor: Executor
    threads: int
