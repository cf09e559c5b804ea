"""What the processes of a server cost: CPU seconds and memory, from /proc, by their names.

Threads that have ended count no more: a difference of two looks is of those that lived in both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUIET_SECONDS = 0.3
QUIET_SHARE = 0.05
"""Of a core: less is what an idle server uses for its heartbeats."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process so far."""

    name: str
    cpu_seconds: float
    own_bytes: int
    """Anonymous memory: not what it shares with others, as the store's pool."""


def costs(session: int) -> list[Cost]:
    """Of all processes of a session; those that have ended are left out."""
    return list(_costs(session))


def cpu_seconds(session: int) -> float:
    return sum(cost.cpu_seconds for cost in costs(session))


def await_quiet(session: int, timeout_seconds: float = 60.0) -> None:
    """Return when the session's processes have nothing left to do. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    before = cpu_seconds(session)
    while True:
        time.sleep(QUIET_SECONDS)
        after = cpu_seconds(session)
        if after - before <= QUIET_SHARE * QUIET_SECONDS:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"session {session} does not get quiet")
        before = after


def _costs(session: int) -> Iterator[Cost]:
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            # The name may hold blanks and brackets; the fields behind it do not.
            name, _, fields = (directory / "stat").read_text().rpartition(")")
            row = fields.split()
            if int(row[3]) != session:
                continue
            status = (directory / "status").read_text()
            seconds = sum(_thread_seconds(thread) for thread in (directory / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        anonymous = [line.split()[1] for line in status.splitlines() if "RssAnon" in line]
        own_bytes = 1024 * int(anonymous[0]) if anonymous else 0
        yield Cost(name.partition("(")[2], seconds, own_bytes)


def _thread_seconds(thread: Path) -> float:
    """To the nanosecond, where the process' own sum has hundredths of a second."""
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
