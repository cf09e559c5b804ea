"""How much memory this process may still take: of the machine, and of its control groups.

Pure but for reading small files under the roots it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Limits from here on (v1 has no word for "none") are none."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What may still be taken, and who says so."""

    free_bytes: int
    limited_by: str
    fix: str


def memory_rooms(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[MemoryRoom]:
    """Of the machine and of each limited control group above this process."""
    rooms = []
    available = _field(_read(proc / "meminfo"), "MemAvailable:")
    if available is not None:
        rooms.append(
            MemoryRoom(available * 1024, "this machine", "lower dram.capacity_bytes or add memory")
        )
    for directory, limit_file, usage_file in _groups(_read(proc / "self/cgroup"), cgroups):
        limit, usage = _number(directory / limit_file), _number(directory / usage_file)
        if limit is None or usage is None or limit >= NO_LIMIT:
            continue
        cache = _file_cache(_read(directory / "memory.stat"))
        rooms.append(
            MemoryRoom(
                max(0, limit - max(0, usage - cache)),
                f"the control group {directory} (limit {limit} bytes)",
                "raise its memory limit or lower dram.capacity_bytes; the pool counts against it",
            )
        )
    return rooms


def _groups(text: str, root: Path) -> list[tuple[Path, str, str]]:
    """Directories of this process's memory groups, from its own up, v2 and v1."""
    found: list[tuple[Path, str, str]] = []
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            base, files = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        # In a container the own group is often mounted as the root: each level is looked for.
        depths = range(len(parts), -1, -1)
        found += [(base.joinpath(*parts[:depth]), *files) for depth in depths]
    return found


def _file_cache(stat: str) -> int:
    """Bytes of files that the kernel drops when memory is short."""
    for prefix in ("total_", ""):
        values = [_field(stat, f"{prefix}{name}") for name in ("inactive_file", "active_file")]
        if any(value is not None for value in values):
            return sum(value or 0 for value in values)
    return 0


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == name and fields[1].isdigit():
            return int(fields[1])
    return None


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
