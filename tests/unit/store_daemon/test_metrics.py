"""What a scraper reads of a daemon: every counter, the conservation law, bounded labels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from emberkv_proto.events import BlocksRemoved
from emberkv_proto.types import AcquirePolicy, Incarnation, NodeId, SaltId, Seq, Tier
from store_daemon.histogram import Histogram
from store_daemon.life import Life
from store_daemon.metric_families import TENANT_SERIES, MetricSources
from store_daemon.metrics import COUNTERS, HELP, StoreCollector
from store_daemon.publisher import Publisher
from store_daemon.tenants import Quota
from store_daemon.transport.tcp import TcpTransport
from tests.helpers.store import SmallStore, chain, small_namespace

SPACE = small_namespace(5000)
PACKAGE = Path(__file__).parent.parent.parent.parent / "store_daemon"
UNITS = (
    "_bytes", "_seconds", "_blocks", "_parts", "_slots", "_events", "_info", "_ratio", "_segments",
    "_records", "_ok", "_bytes_per_second",
)  # fmt: skip
COUNTS = {  # gauges that count things named by themselves
    "leases", "sessions", "prefetches", "moves_in_flight", "event_seq", "event_subscribers",
    "draining", "state", "incarnation", "tenants", "limited_tenants", "index_rebuilt",
    "ssd_write_amplification",
}  # fmt: skip


@dataclass
class Scraped:
    """A store that tells a real publisher, and what its metrics say."""

    small: SmallStore
    publisher: Publisher
    registry: CollectorRegistry

    def families(self) -> dict[str, Metric]:
        text = generate_latest(self.registry).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """Of the sample with these labels."""
        found = self.registry.get_sample_value(f"emberkv_store_{name}", labels)
        assert found is not None, f"{name} {labels} is not there"
        return found

    def gaps(self) -> list[float]:
        return [self.value("unconserved_blocks", tier=tier) for tier in ("dram", "ssd")]


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[Scraped]:
    small = SmallStore(tmp_path)
    publisher = Publisher(NodeId("node-1"), Incarnation(1), small.store)
    small.store.set_sink(publisher)
    registry = CollectorRegistry()
    life = Life(NodeId("node-1"), "serving")
    transport = TcpTransport(Incarnation(1))
    sources = MetricSources(small.store, publisher, life, small.index, None, transport)
    registry.register(StoreCollector(sources))
    yield Scraped(small, publisher, registry)
    await small.close()


def test_every_counter_of_the_code_is_exported_and_explained() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for inside in re.findall(r"counters\[([^\]]+)\]", path.read_text()):
            if 'f"' not in inside:
                used |= set(re.findall(r'"([a-z_]+)"', inside))
    assert "hit_blocks_dram" in used, "the search finds nothing"
    assert used <= COUNTERS.keys(), f"not exported: {sorted(used - COUNTERS.keys())}"
    metrics = {name for name, _ in COUNTERS.values()}
    assert metrics <= HELP.keys(), f"not explained: {sorted(metrics - HELP.keys())}"
    assert HELP.keys() <= metrics, f"explained, but not there: {sorted(HELP.keys() - metrics)}"


def test_one_metric_has_one_set_of_label_names() -> None:
    labels: dict[str, set[tuple[str, ...]]] = {}
    for name, own in COUNTERS.values():
        labels.setdefault(name, set()).add(tuple(own))
    assert {name: found for name, found in labels.items() if len(found) > 1} == {}


async def test_names_carry_units_and_all_say_what_they_are(scraped: Scraped) -> None:
    scraped.small.put(scraped.small.open(SPACE), chain(SPACE, 4))
    families = scraped.families()
    assert len(families) > 60
    for name, family in families.items():
        assert name.startswith("emberkv_store_")
        bare = name.removeprefix("emberkv_store_")
        assert len(family.documentation) > 4, name
        assert family.documentation[0].isupper() or family.documentation[0].isdigit(), name
        if family.type != "counter":
            assert f"_{bare}".endswith(UNITS) or bare in COUNTS, f"{name} has no unit"


async def test_stored_less_removed_is_what_is_resident_whatever_happens(scraped: Scraped) -> None:
    small, session = scraped.small, scraped.small.open(SPACE)
    for seed in range(12):  # more than the pool takes
        small.put(session, chain(SPACE, 7, seed))
        assert scraped.gaps() == [0, 0]
    await small.flush()
    assert scraped.value("blocks", tier="ssd") > 0
    assert scraped.gaps() == [0, 0]
    lease = small.store.acquire(session, chain(SPACE, 7, 0), AcquirePolicy.WAIT_COMPLETE, 5.0)
    if lease is not None:
        await small.store.wait(session, lease.id, lease.usable - 1, 5.0)
        small.store.release(session, [lease.id])
    await small.store.operations.evict_bytes(Tier.DRAM, None, 1)
    assert scraped.gaps() == [0, 0]
    await small.store.operations.clear(None, None)
    assert scraped.gaps() == [0, 0]
    assert scraped.value("blocks", tier="dram") == 0


async def test_an_event_too_many_shows(scraped: Scraped) -> None:
    scraped.small.put(scraped.small.open(SPACE), chain(SPACE, 4))
    scraped.publisher.emit(BlocksRemoved(Tier.DRAM, np.array([1, 2], np.uint64)))
    assert scraped.gaps() == [-2, 0]


async def test_only_tenants_with_a_quota_have_series_and_not_too_many(scraped: Scraped) -> None:
    tenants = scraped.small.store.holdings.tenants
    for number in range(400):
        tenants.of(SaltId(number.to_bytes(16, "big")))
    assert scraped.families()["emberkv_store_tenant_bytes"].samples == []
    tenants.set_quota(SaltId(b"a" * 16), Quota(dram_bytes=5))
    name = (b"a" * 16).hex()
    assert scraped.value("tenant_limit_bytes", tenant=name, tier="dram") == 5
    assert scraped.value("tenant_limit_bytes", tenant=name, tier="ssd") == 0
    for number in range(400):
        tenants.set_quota(SaltId(number.to_bytes(16, "big")), Quota(dram_bytes=5))
    samples = scraped.families()["emberkv_store_tenant_bytes"].samples
    assert len({sample.labels["tenant"] for sample in samples}) == TENANT_SERIES
    assert scraped.value("limited_tenants") == 401


async def test_reuse_and_idleness_are_measured(scraped: Scraped) -> None:
    small, session = scraped.small, scraped.small.open(SPACE)
    hashes = chain(SPACE, 4)
    small.put(session, hashes)
    small.clock.now += 30
    lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 0.0)
    assert lease is not None
    small.store.release(session, [lease.id])
    assert scraped.value("reuse_gap_seconds_bucket", le="10.0") == 0
    assert scraped.value("reuse_gap_seconds_bucket", le="60.0") == 1
    small.clock.now += 100
    for seed in range(100, 112):
        small.put(session, chain(SPACE, 7, seed))
    assert scraped.value("evicted_idle_seconds_count") > 4
    assert scraped.value("evicted_idle_seconds_sum") >= 400


async def test_followers_of_the_events_are_counted(scraped: Scraped) -> None:
    scraped.small.put(scraped.small.open(SPACE), chain(SPACE, 4))
    publisher = scraped.publisher
    assert scraped.value("event_lag_events") == 0
    stream = publisher.subscribe(Incarnation(1), Seq(1))
    await anext_of(stream)
    assert scraped.value("event_subscribers") == 1
    scraped.small.put(scraped.small.open(SPACE), chain(SPACE, 4, 9))
    assert scraped.value("event_lag_events") > 0
    await stream.aclose()
    assert scraped.value("event_subscribers") == 0
    stale = publisher.subscribe(Incarnation(99), Seq(1))
    await anext_of(stale)
    await stale.aclose()
    assert scraped.value("event_gaps_total") == 1
    pages = publisher.snapshot_pages()
    async for _ in pages:
        pass
    assert scraped.value("event_snapshots_total") == 1


async def anext_of(stream: AsyncIterator[object]) -> object:
    """`anext`, with a deadline."""
    return await asyncio.wait_for(stream.__anext__(), 30)


def test_a_histogram_counts_at_most_each_bound() -> None:
    histogram = Histogram((1, 10, 100))
    for value in (0, 1, 1.5, 10, 99, 1000):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("10.0", 4), ("100.0", 5), ("+Inf", 6)]
    assert (histogram.count, histogram.sum) == (6, 1111.5)
    with pytest.raises(AssertionError):
        Histogram((1, 1))
