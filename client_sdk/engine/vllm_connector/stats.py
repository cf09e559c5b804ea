"""Counters of the connector, as vLLM's log lines and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "lookups": "Requests looked up in the store.",
    "failed_lookups": "Lookups that the daemon did not answer, or not in time.",
    "hit_blocks": "Blocks that lookups found beyond the engine's own.",
    "loaded_blocks": "Blocks copied from the store into the engine; of hybrid models, parts.",
    "failed_blocks": "Blocks that a lookup promised and no copy brought; recomputed.",
    "saved_blocks": "Blocks copied from the engine into the store; of hybrid models, parts.",
    "present_blocks": "Blocks that the store had already when they were to be saved.",
    "skipped_blocks": "Blocks that the store had no room for.",
    "lost_saves": "Saves that failed: the daemon was away or answered too late.",
    "uncacheable_requests": "Requests that more than tokens shapes, or of an engine that is off.",
    "prefetched_requests": "Requests whose blocks were sent for while others were before them.",
    "handovers_out": "Prompts whose blocks another engine was told of.",
    "handovers_in": "Prompts that another engine had computed.",
    "late_handovers": "Of these, those whose blocks had not all come in time.",
    "pin_failures": "Pools that the GPU's driver would not pin, or not give back.",
    "errors": "Calls of the engine that failed inside the connector.",
}


@dataclass
class EmberStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since they were last taken."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + by

    def aggregate(self, other: KVConnectorStats) -> EmberStats:
        for name, by in other.data.items():
            self.count(name, by)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class EmberPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:emberkv_<counter>_total`, per engine."""

    def __init__(
        self, config: Any, types: Any, labels: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(config, types, labels, per_engine)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(
                name=f"vllm:emberkv_{name}", documentation=text, labelnames=labels
            )
            self._counters[name] = {n: metric.labels(*row) for n, row in per_engine.items()}

    def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, by in data.items():
            self._counters[name][engine_idx].inc(by)
