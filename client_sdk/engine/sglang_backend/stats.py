"""Counters of the backend: for SGLang's own storage metrics, and as Prometheus counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from prometheus_client import Counter

COUNTERS = {
    "lookups": "Chains of pages looked up in the store.",
    "failed_lookups": "Lookups that the daemon did not answer, or not in time.",
    "hit_pages": "Pages that lookups found.",
    "loaded_pages": "Pages copied from the store into the host pool.",
    "failed_pages": "Pages that were asked for and not brought; recomputed.",
    "corrupt_pages": "Pages that differ from their checksum; recomputed.",
    "saved_pages": "Pages copied from the host pool into the store.",
    "present_pages": "Pages that the store had already when they were to be saved.",
    "skipped_pages": "Pages that the store had no room for.",
    "lost_saves": "Saves that failed: the daemon was away or answered too late.",
    "errors": "Calls of SGLang that failed inside the backend.",
}
_exported: dict[str, Counter] = {}


@dataclass(frozen=True, slots=True)
class Moved:
    """One batch that was copied."""

    pages: int
    gigabytes_per_second: float


@dataclass(slots=True)
class _Batches:
    loaded: list[Moved] = field(default_factory=list)
    saved: list[Moved] = field(default_factory=list)


class BackendStats:
    """Counts of one backend since it was made. Threads may share it."""

    MAX_BATCHES = 4096
    """What is kept for SGLang until it asks; it asks when it logs metrics."""

    def __init__(self, *, exports: bool) -> None:
        """`exports`: also as `sglang:emberkv_<counter>_total` of this process."""
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._batches = _Batches()
        self._lock = threading.Lock()
        self._counters = _export() if exports else {}

    def count(self, name: str, by: int = 1) -> None:
        if not by:
            return
        with self._lock:
            self._counts[name] += by
        if name in self._counters:
            self._counters[name].inc(by)

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def loaded(self, moved: Moved) -> None:
        with self._lock:
            _keep(self._batches.loaded, moved, self.MAX_BATCHES)

    def saved(self, moved: Moved) -> None:
        with self._lock:
            _keep(self._batches.saved, moved, self.MAX_BATCHES)

    def take_batches(self) -> _Batches:
        """The batches since the last call."""
        with self._lock:
            batches, self._batches = self._batches, _Batches()
            return batches

    def check_integrity(self) -> None:
        with self._lock:
            assert self._counts.keys() == COUNTERS.keys(), "a counter nobody described"
            assert all(count >= 0 for count in self._counts.values()), "a count below 0"


def _keep(batches: list[Moved], moved: Moved, most: int) -> None:
    batches.append(moved)
    del batches[:-most]


def _export() -> dict[str, Counter]:
    """Made once a process: a backend may be attached again."""
    if not _exported:
        _exported.update(
            {name: Counter(f"sglang:emberkv_{name}", text) for name, text in COUNTERS.items()}
        )
    return _exported
