"""What Prometheus is told of engines' event streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from global_index.hbm.engines import EngineView, StreamState
from global_index.hbm.rows import RowCounts

_STREAM_COUNTERS = {
    "messages": "Messages taken over.",
    "repeated": "Messages that were known already.",
    "malformed_messages": "Messages that could not be read.",
    "malformed_events": "Events that break their own format.",
    "unknown_events": "Events of kinds that are not known.",
    "other_media": "Events of the engine's own CPU or disk tiers.",
    "losses": "Connections lost.",
    "gaps": "Times that messages were found missing.",
    "replays": "Times that a replay was asked for.",
    "failed_replays": "Replays that were not answered as they should.",
    "lost": "Times that missed messages could not be had again.",
    "restarts": "New lives of the engine.",
}
_OUTCOMES = tuple(field.name for field in fields(RowCounts))


def engine_metrics(engines: Iterable[EngineView], refused: int) -> Iterator[Metric]:
    prefix = "emberkv_index_engine_"
    rows = GaugeMetricFamily(prefix + "rows", "Blocks in HBM.", labels=["engine"])
    current = GaugeMetricFamily(prefix + "current", "1: in answers.", labels=["engine"])
    pending = GaugeMetricFamily(
        prefix + "pending_blocks", "Waiting for their parent.", labels=["engine"]
    )
    dropped = CounterMetricFamily(
        prefix + "dropped_rows", "Refused: the index is full.", labels=["engine"]
    )
    blocks = CounterMetricFamily(
        prefix + "blocks",
        "Engine blocks of all events, by what became of them (cleared: times).",
        labels=["engine", "outcome"],
    )
    counters = {
        name: CounterMetricFamily(prefix + name, text, labels=["engine"])
        for name, text in _STREAM_COUNTERS.items()
    }
    for engine in engines:
        label = [str(engine.key)]
        rows.add_metric(label, engine.digest.blocks)
        current.add_metric(label, float(engine.state is StreamState.CURRENT))
        pending.add_metric(label, engine.pending_blocks)
        dropped.add_metric(label, engine.dropped)
        for outcome in _OUTCOMES:
            blocks.add_metric([*label, outcome], getattr(engine.blocks, outcome))
        for name, family in counters.items():
            family.add_metric(label, getattr(engine.streamed, name))
    yield from (rows, current, pending, dropped, blocks, *counters.values())
    yield GaugeMetricFamily(
        prefix + "refused", "Announced engines whose events are not followed.", refused
    )
