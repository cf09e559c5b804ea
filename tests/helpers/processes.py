"""Processes as the kernel shows them: found by a word of their command line, and how large."""

from __future__ import annotations

import os
from pathlib import Path


def pids_with(word: str) -> list[int]:
    """Live processes with `word` in their arguments; zombies have none."""
    return [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _has(path, word)
    ]


def _has(cmdline: Path, word: str) -> bool:
    try:
        return word.encode() in cmdline.read_bytes()
    except OSError:
        return False  # it ended meanwhile


def private_bytes(pid: int) -> int:
    """Resident memory that is the process's own: not files, not a mapped pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel does not say RssAnon of {pid}")


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def state_of(pid: int) -> str:
    """R, S, T for stopped, Z for ended and not waited for; X when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children_of(pid: int) -> list[int]:
    """Of all its threads; empty when it has ended."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:  # noqa: PERF203 - the thread ended meanwhile
            continue
    return sorted(found)
