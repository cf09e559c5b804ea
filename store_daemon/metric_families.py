"""Metrics of the daemon beside the store's own counters: state, events, pins, tenants, peers.

Labels are bounded: tiers, methods, states, reasons, and at most TENANT_SERIES
tenants that have a quota of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from emberkv_proto import __version__
from emberkv_proto.types import Tier
from store_daemon.histogram import Histogram, Measures
from store_daemon.life import STATES, Life
from store_daemon.local_index import LocalIndex
from store_daemon.peers import PeerPuller
from store_daemon.publisher import Publisher
from store_daemon.store import BlockStore
from store_daemon.transport.base import Transport, TransportReport

PREFIX = "emberkv_store_"
TENANT_SERIES = 256


@dataclass(frozen=True, slots=True)
class MetricSources:
    """What the daemon's metrics are read from."""

    store: BlockStore
    publisher: Publisher
    life: Life
    index: LocalIndex
    puller: PeerPuller | None
    transport: Transport


TRANSPORT_HELP = {
    "served_bytes": "Bytes that peers got from this node.",
    "refused_reads": "Reads of peers that no lease covered.",
    "one_sided_bytes": "Bytes that this node read out of peers' memory by RDMA.",
    "pushed_bytes": "Bytes that peers' UCX agents wrote into this node's pool.",
    "plain_bytes": "Bytes that came over plain TCP though the transport is ucx.",
    "restarted_reads": "Reads that began again because another one took their UCX agent with it.",
    "quarantines": "Reads and writes that failed in the middle; each cost a UCX agent.",
    "placed_bytes": "Bytes that engines on other hosts have written into staged slots.",
    "refused_writes": "Writes of such engines outside what their stage covers.",
    "replaced_agents": "UCX agents that ended and were made anew.",
}
"""What the counts of a `TransportReport` mean."""


def families(sources: MetricSources) -> Iterator[Metric]:
    yield from _life(sources)
    yield from _events(sources.publisher)
    yield from _pins(sources.store)
    yield from _tenants(sources.store)
    yield from _histograms(sources.store.holdings.measures)
    yield from _index(sources.index)
    replicas = sources.store.holdings.replicas
    yield _gauge("replica_bytes", "DRAM that replicas of others' blocks take.", replicas.bytes)
    if sources.puller is not None:
        yield from _peers(sources.puller)
    yield from _transport(sources.transport.report())


def conservation_gap(publisher: Publisher, store: BlockStore, tier: Tier) -> int:
    """Stored - removed over all events that were sent, less what the catalog says is resident."""
    ledger = publisher.ledger(tier)
    return ledger.stored_blocks - ledger.removed_blocks - store.holdings.blocks_of(tier)


def _life(sources: MetricSources) -> Iterator[Metric]:
    build = GaugeMetricFamily(
        PREFIX + "build_info", "1, with the version that runs.", labels=["version"]
    )
    build.add_metric([__version__], 1)
    yield build
    state = GaugeMetricFamily(
        PREFIX + "state", "1 for the state that the daemon is in.", labels=["state"]
    )
    for name in STATES:
        state.add_metric([name], name == sources.life.state)
    yield state
    yield _gauge("uptime_seconds", "Since the process began.", sources.life.uptime_seconds)
    yield _gauge(
        "incarnation", "Number of this life; grows at each start.", sources.publisher.incarnation
    )


def _events(publisher: Publisher) -> Iterator[Metric]:
    yield _gauge("event_subscribers", "Indexes that follow the events.", publisher.subscribers)
    yield _gauge(
        "event_replayable_events",
        "Events that a subscriber who was away can still be replayed.",
        publisher.seq - publisher.oldest_seq + 1,
    )
    yield _gauge(
        "event_lag_events",
        "How far the slowest subscriber is behind the newest event.",
        publisher.lag_events,
    )
    yield _counter(
        "event_gaps", "Subscriptions that had to be told to take a snapshot.", publisher.gaps
    )
    yield _counter("event_snapshots", "Snapshots that were sent whole.", publisher.snapshots)


def _pins(store: BlockStore) -> Iterator[Metric]:
    pins = store.holdings.pins
    blocks = GaugeMetricFamily(PREFIX + "pinned_blocks", "Blocks under pins.", labels=["kind"])
    blocks.add_metric(["hard"], len(pins.hard))
    blocks.add_metric(["soft"], len(pins.soft))
    yield blocks
    yield _gauge("hard_pinned_bytes", "What hard pins keep.", pins.hard_bytes)
    yield _gauge("hard_pin_limit_bytes", "What hard pins may keep.", pins.limit_bytes)


def _tenants(store: BlockStore) -> Iterator[Metric]:
    """Those with a quota of their own; others would make as many series as there are tenants."""
    limited = store.holdings.tenants.limited()
    used = GaugeMetricFamily(
        PREFIX + "tenant_bytes", "What a tenant with a quota holds.", labels=["tenant", "tier"]
    )
    limit = GaugeMetricFamily(
        PREFIX + "tenant_limit_bytes", "Its quota; 0: none.", labels=["tenant", "tier"]
    )
    evicted = CounterMetricFamily(
        PREFIX + "tenant_evicted_blocks", "Evicted for its quota.", labels=["tenant"]
    )
    for usage in limited[:TENANT_SERIES]:
        name = usage.salt_id.hex()
        used.add_metric([name, "dram"], usage.dram_bytes)
        used.add_metric([name, "ssd"], usage.ssd_bytes)
        limit.add_metric([name, "dram"], usage.quota.dram_bytes or 0)
        limit.add_metric([name, "ssd"], usage.quota.ssd_bytes or 0)
        evicted.add_metric([name], usage.evicted_blocks)
    yield from (used, limit, evicted)
    yield _gauge("tenants", "Tenants that are known.", len(store.holdings.tenants))
    yield _gauge("limited_tenants", "Tenants with a quota of their own.", len(limited))


def _histograms(measures: Measures) -> Iterator[Metric]:
    yield _histogram(
        "reuse_gap_seconds",
        "Since the last use of the last block of each hit, when it was asked for again.",
        measures.reuse_gap_seconds,
    )
    yield _histogram(
        "evicted_idle_seconds",
        "Since the last use of each block that left DRAM for room.",
        measures.evicted_idle_seconds,
    )
    calls = HistogramMetricFamily(
        PREFIX + "call_seconds",
        "Time in the daemon of local sessions' calls; a sample.",
        labels=["method"],
    )
    for method, histogram in sorted(measures.call_seconds.items()):
        calls.add_metric([method], histogram.buckets(), histogram.sum)
    yield calls


def _index(index: LocalIndex) -> Iterator[Metric]:
    yield _gauge(
        "index_rebuilt",
        "1 when the local index was lost or damaged and was filled from the segments.",
        int(index.was_rebuilt),
    )
    yield _counter(
        "unreadable_rows", "Entries of the local index that were no rows.", index.unreadable_rows
    )


def _peers(puller: PeerPuller) -> Iterator[Metric]:
    counters = puller.counters
    yield _counter("pulls", "Pulls that went to a peer.", counters.pulls)
    yield _counter("pulled_bytes", "Bytes that came from peers.", counters.pulled_bytes)
    yield _counter(
        "unheld_pulls", "Pulls for which no peer holds the first block.", counters.unheld
    )
    yield _counter(
        "shared_pull_blocks",
        "Blocks that were wanted while another pull was bringing them.",
        counters.shared_blocks,
    )
    yield _counter(
        "followed_blocks",
        "Blocks that came from a node while it computed them.",
        counters.followed_blocks,
    )
    yield _counter(
        "pull_guesses", "Nodes that were asked for blocks before the index was.", counters.guesses
    )
    yield _counter(
        "wrong_pull_guesses", "Of them, those that lent nothing.", counters.wrong_guesses
    )
    yield _counter(
        "quick_leases", "Leases asked for at peers' transport ports.", puller.quick_leases
    )
    by_peer = CounterMetricFamily(
        PREFIX + "peer_bytes", "Bytes that came from peers, by peer.", labels=["peer"]
    )
    for node_id, count in sorted(counters.from_peer.items()):
        by_peer.add_metric([node_id], count)
    yield by_peer
    failures = CounterMetricFamily(
        PREFIX + "pull_failures", "Pulls that failed, by reason.", labels=["reason"]
    )
    for reason, count in sorted(counters.failures.items()):
        failures.add_metric([reason], count)
    yield failures


def _transport(report: TransportReport) -> Iterator[Metric]:
    lanes = GaugeMetricFamily(
        PREFIX + "transport_info",
        "1 for each network path that blocks can take between nodes.",
        labels=["transport", "lane", "rdma"],
    )
    for lane in report.lanes or ("",):
        lanes.add_metric([report.name, lane, str(report.has_rdma).lower()], 1)
    yield lanes
    yield _gauge(
        "transport_quarantined_bytes",
        "Ranges of failed reads that wait until nothing can be written into them any more.",
        report.quarantined_bytes,
    )
    for name, count in report.counts.items():
        yield _counter(f"transport_{name}", TRANSPORT_HELP[name], count)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text)
    family.add_metric([], histogram.buckets(), histogram.sum)
    return family
