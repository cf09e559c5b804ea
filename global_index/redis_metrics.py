"""Prometheus metrics of an index that is shared through Redis, read from it when asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from global_index.redis_shared import SharedIndex

_TEXTS = {
    "link_connects": "Connections made.",
    "link_losses": "Connections lost or given up.",
    "link_late": "Calls that Redis did not answer in time.",
    "link_full": "Writes refused because Redis is at its maxmemory.",
    "reader_queries": "Chains asked for.",
    "reader_away": "Queries answered from this process's rows alone.",
    "reader_malformed": "Values and records that no writer of ours wrote.",
    "reader_unknown": "Hits of numbers that no record names.",
    "writer_rows": "Rows changed in Redis by events.",
    "writer_compared": "Nodes compared as a whole.",
    "writer_repaired": "Rows that differed when compared.",
    "writer_fenced": "Writes refused because another writer has the node.",
    "writer_lost": "Times that Redis had been emptied.",
    "writer_audits": "Counts of a node's rows in Redis.",
    "writer_drifted": "Counts that differed.",
    "lease_won": "Leases on daemons taken.",
    "lease_lost": "Leases that ran out or were taken.",
    "lease_passed_on": "Leases left to newcomers.",
    "tidy_forgotten": "Nodes taken out of Redis because nobody followed them any more.",
}


def redis_metrics(shared: SharedIndex) -> Iterable[Metric]:
    """Gauges and counters `emberkv_index_redis_*`."""
    state = shared.state()
    for name, text, value in (
        ("up", "1: Redis answers.", float(state.is_up)),
        ("writers", "Processes that share the daemons.", state.writers),
        ("leases", "Daemons that this process follows for all.", state.leases),
        ("exact_nodes", "Own nodes whose rows in Redis are as here.", state.exact_nodes),
        ("queued_rows", "Changes that wait to be written.", state.queued_rows),
    ):
        yield GaugeMetricFamily(f"emberkv_index_redis_{name}", text, value)
    counts: dict[str, Any] = {
        "link": shared.link.counts,
        "reader": shared.reader.counts,
        "writer": shared.writer.counts,
        "lease": shared.counts,
        "tidy": shared.tidied,
    }
    for part, of_part in counts.items():
        for name, value in asdict(of_part).items():
            full = f"{part}_{name}"
            yield CounterMetricFamily(f"emberkv_index_redis_{full}", _TEXTS[full], value)
