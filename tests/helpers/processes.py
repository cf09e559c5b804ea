"""Processes that carry a word in their command line, as the kernel lists them."""

from __future__ import annotations

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
