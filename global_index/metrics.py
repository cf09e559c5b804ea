"""Prometheus metrics of a `GlobalIndex`, read from it when asked; the hot path counts nothing.

Usable by a router that embeds the index: `registry.register(IndexCollector(index))`. Scrapes must
come on the index's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from global_index.embedded import GlobalIndex
from global_index.hbm.metrics import engine_metrics
from global_index.ingest import Exactness
from global_index.membership import Liveness

_QUERY_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2)
_NODE_COUNTERS = {
    "events": "Events applied.",
    "duplicates": "Batches with nothing new.",
    "gaps": "Times that events were found missing.",
    "replays": "Times that a replay was asked for.",
    "snapshots": "Snapshots taken over.",
    "failed_snapshots": "Snapshots that ended early.",
    "digest_mismatches": "Audits that differed.",
    "bucket_repairs": "Mismatches mended without a snapshot.",
    "repaired_buckets": "Buckets whose rows were replaced.",
    "stale": "Messages of a dead incarnation, refused.",
}


class IndexCollector(Collector):
    """Rows, bytes and every node's stream."""

    def __init__(self, index: GlobalIndex) -> None:
        self._index = index

    def collect(self) -> Iterable[Metric]:
        if self._index.shared is not None:
            from global_index.redis_metrics import redis_metrics

            yield from redis_metrics(self._index.shared)
        size, nodes = self._index.size(), self._index.nodes()
        yield GaugeMetricFamily("emberkv_index_blocks", "Distinct blocks.", size.blocks)
        yield GaugeMetricFamily(
            "emberkv_index_capacity_blocks", "Distinct blocks at most.", size.capacity_blocks
        )
        yield GaugeMetricFamily("emberkv_index_table_bytes", "Memory of tables.", size.table_bytes)
        yield CounterMetricFamily(
            "emberkv_index_faults", "Tasks restarted after an error of ours.", self._index.faults
        )
        yield GaugeMetricFamily(
            "emberkv_index_watchers", "Who watches the nodes.", self._index.watch.watchers
        )
        seed = self._index.seed_counts
        yield GaugeMetricFamily(
            "emberkv_index_seed_blocks", "Blocks that another index gave at start.", seed.blocks
        )
        yield CounterMetricFamily(
            "emberkv_index_seed_failures", "Starts from another index that failed.", seed.failures
        )
        rows = GaugeMetricFamily("emberkv_index_rows", "Visible rows.", labels=["node", "tier"])
        lag = GaugeMetricFamily(
            "emberkv_index_lag_seconds", "Age of the newest event or report.", labels=["node"]
        )
        live = GaugeMetricFamily("emberkv_index_node_ok", "1: in answers.", labels=["node"])
        exact = GaugeMetricFamily("emberkv_index_node_exact", "1: exact.", labels=["node"])
        anomalies = CounterMetricFamily(
            "emberkv_index_anomalies", "Stored twice or removed when absent.", labels=["node"]
        )
        dropped = CounterMetricFamily(
            "emberkv_index_dropped_rows", "Refused: the index is full.", labels=["node"]
        )
        counters = {
            name: CounterMetricFamily(f"emberkv_index_{name}", text, labels=["node"])
            for name, text in _NODE_COUNTERS.items()
        }
        for node in nodes:
            for digest in node.tiers:
                rows.add_metric([node.node_id, digest.tier.name.lower()], digest.blocks)
            lag.add_metric([node.node_id], node.lag_seconds)
            live.add_metric([node.node_id], float(node.liveness is Liveness.OK))
            exact.add_metric([node.node_id], float(node.exactness is Exactness.EXACT))
            anomalies.add_metric([node.node_id], node.anomalies)
            dropped.add_metric([node.node_id], node.dropped)
            for name, family in counters.items():
                family.add_metric([node.node_id], getattr(node.counts, name))
        yield from (rows, lag, live, exact, anomalies, dropped, *counters.values())
        yield from engine_metrics(self._index.engines(), self._index.refused_engines)
        losses = CounterMetricFamily(
            "emberkv_index_stream_losses", "Connections lost or refused.", labels=["address"]
        )
        malformed = CounterMetricFamily(
            "emberkv_index_malformed_messages", "Messages that broke a rule.", labels=["address"]
        )
        for address, counts in self._index.streams().items():
            losses.add_metric([address], counts.losses)
            malformed.add_metric([address], counts.malformed)
        yield from (losses, malformed)
        yield from self._lookups()
        if self._index.discovery is not None:
            from global_index.kube.metrics import kube_metrics

            yield from kube_metrics(self._index.discovery)

    def _lookups(self) -> Iterable[Metric]:
        """Of names that stand for many daemons."""
        found = GaugeMetricFamily(
            "emberkv_index_name_addresses", "In the last answer for a name.", labels=["name"]
        )
        failures = CounterMetricFamily(
            "emberkv_index_lookup_failures", "Lookups of a name that failed.", labels=["name"]
        )
        for name, counts in self._index.lookups().items():
            found.add_metric([str(name)], counts.addresses)
            failures.add_metric([str(name)], counts.failures)
        yield from (found, failures)


class IndexMetrics:
    """The registry of an index that is served alone."""

    def __init__(self, index: GlobalIndex) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(IndexCollector(index))
        self.query_seconds = Histogram(
            "emberkv_index_query_seconds",
            "Time in the index per query.",
            buckets=_QUERY_BUCKETS,
            registry=self.registry,
        )
