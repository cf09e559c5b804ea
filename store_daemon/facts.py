"""What the store can tell of itself beyond its counters: measured speeds, and room in DRAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from store_daemon.bandwidth import ReadSpeed
from store_daemon.store import BlockStore


@dataclass(frozen=True, slots=True)
class SourceSpeed:
    """How fast a source of blocks was lately. 0 when nothing came from it."""

    source: str
    bytes_per_second: float
    """Of one read, while others went on beside it."""
    read_seconds: float


def source_speeds(store: BlockStore, now: float) -> list[SourceSpeed]:
    """Of SSD and peers; `now` is the store's monotonic clock."""
    speeds: dict[str, ReadSpeed] = {
        "ssd": store.lender.promoter.speed,
        "peer": store.lender.pulls.speed,
    }
    return [
        SourceSpeed(name, speed.bytes_per_second(now) or 0.0, speed.read_seconds(now) or 0.0)
        for name, speed in speeds.items()
    ]


def status_facts(store: BlockStore, now: float) -> Iterator[tuple[str, float]]:
    """Names and values for operators, beside the counters."""
    for speed in source_speeds(store, now):
        yield f"{speed.source}_read_bytes_per_second", speed.bytes_per_second
        yield f"{speed.source}_read_seconds", speed.read_seconds
