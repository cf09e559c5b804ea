"""Prometheus metrics of the daemon.

Values are read from the store when they are asked for; nothing is counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from client_sdk import faults
from emberkv_proto.types import Tier
from store_daemon.facts import source_speeds
from store_daemon.metric_families import PREFIX, MetricSources, conservation_gap, families
from store_daemon.residency import STORED_TIERS
from store_daemon.room import free_slots, largest_free_bytes
from store_daemon.ssd_metrics import ssd_metrics

COUNTERS = {
    "hit_blocks_dram": ("hit_blocks", {"source": "dram"}),
    "hit_blocks_ssd": ("hit_blocks", {"source": "ssd"}),
    "hit_blocks_peer": ("hit_blocks", {"source": "peer"}),
    "missed_blocks": ("missed_blocks", {}),
    "evicted_blocks": ("evicted_blocks", {"to": "nowhere"}),
    "demoted_blocks": ("evicted_blocks", {"to": "ssd"}),
    "evicted_parts": ("evicted_parts", {"to": "nowhere"}),
    "demoted_parts": ("evicted_parts", {"to": "ssd"}),
    "promoted_blocks": ("promoted_blocks", {}),
    "not_worth_blocks": ("not_worth_blocks", {}),
    "withdrawn_moves": ("withdrawn_moves", {}),
    "prefetched_blocks": ("prefetched_blocks", {}),
    "cancelled_prefetches": ("ended_prefetches", {"by": "cancel"}),
    "expired_prefetches": ("ended_prefetches", {"by": "deadline"}),
    "refused_prefetches": ("refused_prefetches", {}),
    "moved_extents": ("moved_extents", {}),
    "kv_event_messages": ("kv_event_messages", {}),
    "kv_event_replays": ("kv_event_replays", {}),
    "kv_event_resyncs": ("kv_event_resyncs", {}),
    "kv_event_bad_requests": ("kv_event_bad_requests", {}),
    "staged_granted": ("staged_blocks", {"result": "granted"}),
    "staged_present": ("staged_blocks", {"result": "present"}),
    "staged_in_progress": ("staged_blocks", {"result": "in_progress"}),
    "staged_no_space": ("staged_blocks", {"result": "no_space"}),
    "no_space_promotions": ("no_space", {"while": "promotion"}),
    "no_space_pulls": ("no_space", {"while": "pull"}),
    "committed_parts": ("committed_parts", {}),
    "corrupt_blocks": ("corrupt_blocks", {}),
    "ssd_read_errors": ("ssd_read_errors", {}),
    "reclaimed_reads": ("reclaimed_reads", {}),
    "scrubbed_records": ("scrubbed_records", {}),
    "scrubbed_bytes": ("scrubbed_bytes", {}),
    "scrub_corrupt": ("scrub_corrupt_records", {}),
    "scrub_passes": ("scrub_passes", {}),
    "writeback_blocks": ("writeback_blocks", {"result": "written"}),
    "writeback_skipped_blocks": ("writeback_blocks", {"result": "skipped"}),
    "writeback_failed_blocks": ("writeback_blocks", {"result": "failed"}),
    "writeback_retried_blocks": ("writeback_blocks", {"result": "retried"}),
    "writeback_given_up_blocks": ("writeback_blocks", {"result": "given_up"}),
    "lease_limited_blocks": ("lease_limited_blocks", {}),
    "expired_leases": ("expired_leases", {}),
    "pulled_blocks": ("pulled_blocks", {}),
    "failed_pulls": ("failed_pulls", {}),
    "hints": ("hinted_chains", {"for": "queued"}),
    "handovers": ("hinted_chains", {"for": "handover"}),
    "kept_replicas": ("kept_replicas", {}),
    "shed_replicas": ("shed_replicas", {}),
    "read_through_blocks": ("read_through_blocks", {}),
    "policy_failures": ("policy_failures", {}),
    "failed_tasks": ("failed_tasks", {}),
    "reloads": ("reloads", {}),
    "failed_reloads": ("failed_reloads", {}),
    "peer_granted_blocks": ("peer_granted_blocks", {}),
    "recovered_blocks_dram": ("recovered_blocks", {"tier": "dram"}),
    "recovered_blocks_ssd": ("recovered_blocks", {"tier": "ssd"}),
    "recovered_unsummed_parts": ("recovered_unsummed_parts", {}),
    "unsummed_blocks_put_off": ("unsummed_blocks_put_off", {}),
    "over_quota_blocks": ("over_quota_evicted_blocks", {}),
    "over_quota_refused": ("over_quota_refused", {}),
    "over_quota_unwritten_blocks": ("over_quota_unwritten_blocks", {}),
    "refused_pins": ("refused_pins", {}),
    "unreadable_pins": ("pin_index_errors", {"what": "read"}),
    "failed_pin_deletions": ("pin_index_errors", {"what": "delete"}),
    "unwritten_victims_kept": ("unwritten_victims", {"result": "kept"}),
    "unwritten_victims_lost": ("unwritten_victims", {"result": "lost"}),
    "resp_commands": ("resp_commands", {}),
    "resp_hits": ("resp_values_asked", {"result": "hit"}),
    "resp_misses": ("resp_values_asked", {"result": "miss"}),
    "resp_stored_values": ("resp_values_stored", {}),
    "resp_refused_values": ("resp_values_refused", {}),
    "resp_unreadable_values": ("resp_values_unreadable", {}),
    "resp_errors": ("resp_errors", {"kind": "command"}),
    "resp_protocol_errors": ("resp_errors", {"kind": "protocol"}),
    "resp_failed_requests": ("resp_errors", {"kind": "internal"}),
    "resp_wrong_passwords": ("resp_errors", {"kind": "password"}),
    "resp_cut_connections": ("resp_connections_ended", {"why": "silence"}),
    "resp_refused_connections": ("resp_connections_ended", {"why": "refused"}),
}
"""Counter of the store -> metric (without prefix and suffix) and labels."""
HELP = {
    "hit_blocks": "Blocks that leases were granted over, by where they were then.",
    "missed_blocks": "Blocks that were asked for and not here; some of them came from peers.",
    "evicted_blocks": "Blocks that left DRAM for room, by where they are still.",
    "evicted_parts": "Window and state parts of blocks that left DRAM, by where they are still.",
    "promoted_blocks": "Blocks read from SSD into DRAM.",
    "not_worth_blocks": "Blocks on SSD or peers left out: computing them anew is faster.",
    "withdrawn_moves": "Moves from SSD that were called off before they began.",
    "prefetched_blocks": "Blocks that prefetches set in motion.",
    "ended_prefetches": "Prefetches that ended before all was brought.",
    "refused_prefetches": "Prefetches that were not begun: too many are in progress.",
    "moved_extents": "Extents that went from one size class to another.",
    "kv_event_messages": "Messages published over ZMQ for routers of others.",
    "kv_event_replays": "Times that missed ones were asked for.",
    "kv_event_resyncs": "Times that the sender fell behind, cleared and began anew.",
    "kv_event_bad_requests": "Requests for a replay that made no sense.",
    "staged_blocks": "Blocks that were asked to be staged, by what became of it.",
    "no_space": "Times that all of DRAM was held or staged.",
    "committed_parts": "Parts of blocks that were published.",
    "corrupt_blocks": "Blocks in DRAM whose checksum was wrong, taken out.",
    "ssd_read_errors": "Reads from SSD that failed or whose checksum was wrong.",
    "reclaimed_reads": "Reads from SSD that reclaim overtook.",
    "writeback_blocks": "Blocks on their way to SSD, by what became of them.",
    "unwritten_victims": "Victims of eviction that had no SSD copy yet, by what became of them.",
    "scrubbed_records": "Records on SSD that were checked in the background or on demand.",
    "scrubbed_bytes": "Read from SSD to check it.",
    "scrub_corrupt_records": "Records that a scrub found wrong, and dropped.",
    "scrub_passes": "Scrubs that went over all of the tier.",
    "expired_leases": "Leases that ran out without a heartbeat.",
    "pulled_blocks": "Blocks that came from peers.",
    "failed_pulls": "Pulls from peers that brought nothing.",
    "hinted_chains": "Chains that routers had brought: for a request that waits, or from the node"
    " that computes it.",
    "kept_replicas": "Pulled blocks kept like our own: used again, or pulled often enough.",
    "shed_replicas": "Replicas evicted because all of them were over their share.",
    "read_through_blocks": "Blocks read from SSD for a peer only, that left DRAM with its lease.",
    "policy_failures": "Eviction policies that broke and were replaced by lru.",
    "failed_tasks": "Tasks that must run as long as the daemon and have failed.",
    "reloads": "Times that the configuration was taken over while serving.",
    "failed_reloads": "Times that a changed configuration was refused.",
    "peer_granted_blocks": "Blocks that were lent to peers.",
    "recovered_blocks": "Blocks found at start.",
    "recovered_unsummed_parts": "Parts found in DRAM at start that nobody had summed; trusted.",
    "unsummed_blocks_put_off": "Checksums left until somebody needs them: too many were waiting.",
    "over_quota_evicted_blocks": "Blocks evicted because their tenant was over its quota.",
    "over_quota_refused": "Stages that were refused because their tenant was over its quota.",
    "over_quota_unwritten_blocks": "Blocks not copied to SSD because of their tenant's quota.",
    "lease_limited_blocks": "Blocks not leased because their session held all that it may.",
    "resp_commands": "Requests of Redis clients.",
    "resp_values_asked": "Values that Redis clients asked for, by whether they were known here.",
    "resp_values_stored": "Values that Redis clients stored.",
    "resp_values_refused": "Values too long, or without room in the pool or the door's quota.",
    "resp_values_unreadable": "Known values that could not be brought.",
    "resp_errors": "Requests of Redis clients answered with an error.",
    "resp_connections_ended": "Connections of Redis clients that were hung up on.",
    "refused_pins": "Blocks that were not pinned: hard pins were at their limit.",
    "pin_index_errors": "Times that hard pins could not be read from or struck off the index.",
}
"""Metric -> what it says of itself."""


class StoreCollector(Collector):
    """Reads a store on demand. Called on the store's loop."""

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._store = sources.store

    def collect(self) -> Iterator[Metric]:
        yield from families(self._sources)
        yield from self._tiers()
        yield from self._counts()
        store = self._store
        if store.ssd is not None:
            yield from ssd_metrics(store.ssd)
        gauges = {
            "leases": ("Leases that are held.", len(store.lender.leases)),
            "sessions": ("Open sessions.", len(store.sessions)),
            "staged_parts": ("Parts that sessions are writing.", store.staged_blocks),
            "moves_in_flight": (
                "Blocks on their way from SSD to DRAM.",
                store.lender.promoter.in_flight,
            ),
            "prefetches": ("Prefetches in progress.", len(store.lender.prefetches)),
            "writeback_queue_blocks": (
                "Blocks waiting for their SSD copy.",
                len(store.writeback) if store.writeback is not None else 0,
            ),
            "writeback_retrying_blocks": (
                "Blocks whose write failed and will be tried again.",
                store.writeback.retrying if store.writeback is not None else 0,
            ),
            "unwritten_victim_bytes": (
                "DRAM of victims that wait for their SSD copy.",
                store.holdings.departures.waiting_bytes,
            ),
            "pinned_blocks": ("Blocks under an operator's pin.", len(store.holdings.pins)),
            "hard_pinned_bytes": ("What hard pins keep.", store.holdings.pins.hard_bytes),
            "event_seq": ("Number of the newest event.", self._sources.publisher.seq),
            "draining": ("1 while the daemon takes no new work.", int(store.is_draining)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield from self._speeds()
        yield from self._room()
        yield CounterMetricFamily(
            PREFIX + "hole_blocks",
            "Blocks that came while their parent was in no tier.",
            value=store.holdings.catalog.holes,
        )

    def _room(self) -> Iterator[Metric]:
        """Only what is found in O(extents); status tells what could be evicted as well."""
        slots = self._store.holdings.pool.slots
        free = GaugeMetricFamily(
            PREFIX + "dram_free_bytes",
            "Free bytes: in extents of no class (stock), and in slots that serve one class only.",
            labels=["where"],
        )
        free.add_metric(["stock"], slots.stock_extents * slots.extent_bytes)
        free.add_metric(["free_slots"], slots.free_slot_bytes)
        yield free
        yield GaugeMetricFamily(
            PREFIX + "dram_largest_free_bytes",
            "The longest payload that can be allocated without evicting.",
            value=largest_free_bytes(slots),
        )
        allocatable = GaugeMetricFamily(
            PREFIX + "dram_free_slots",
            "Parts of blocks that can be allocated without evicting.",
            labels=["namespace", "part"],
        )
        for size_class in sorted(slots.classes()):
            labels = [size_class.namespace_id.hex()[:8], str(size_class.part)]
            allocatable.add_metric(labels, free_slots(slots, size_class).now)
        yield allocatable

    def _speeds(self) -> Iterator[Metric]:
        rate = GaugeMetricFamily(
            PREFIX + "read_bytes_per_second",
            "Median over the last reads, each while others go on beside it; 0: none lately.",
            labels=["source"],
        )
        seconds = GaugeMetricFamily(
            PREFIX + "read_seconds", "Median time of the last reads.", labels=["source"]
        )
        for speed in source_speeds(self._store, time.monotonic()):
            rate.add_metric([speed.source], speed.bytes_per_second)
            seconds.add_metric([speed.source], speed.read_seconds)
        yield from (rate, seconds)

    def _tiers(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(PREFIX + "blocks", "Resident blocks.", labels=["tier"])
        used = GaugeMetricFamily(PREFIX + "used_bytes", "Bytes taken.", labels=["tier"])
        capacity = GaugeMetricFamily(PREFIX + "capacity_bytes", "Bytes there are.", labels=["tier"])
        is_ok = GaugeMetricFamily(
            PREFIX + "tier_ok", "1 when the tier works, 0 when degraded or off.", labels=["tier"]
        )
        unconserved = GaugeMetricFamily(
            PREFIX + "unconserved_blocks",
            "Stored - removed by all events, less what is resident; anything but 0 is a bug.",
            labels=["tier"],
        )
        for state in self._store.tier_states():
            labels = [state.tier.name.lower()]
            blocks.add_metric(labels, state.blocks)
            used.add_metric(labels, state.used_bytes)
            capacity.add_metric(labels, state.capacity_bytes)
            is_ok.add_metric(labels, state.state == "ok")
            unconserved.add_metric(
                labels, conservation_gap(self._sources.publisher, self._store, state.tier)
            )
        yield from (blocks, used, capacity, is_ok, unconserved)

    def _counts(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        counters = self._store.holdings.counters
        for counter, (name, labels) in COUNTERS.items():
            family = families.get(name)
            if family is None:
                family = CounterMetricFamily(
                    PREFIX + name, HELP.get(name, name), labels=list(labels)
                )
                families[name] = family
            family.add_metric(list(labels.values()), counters[counter])
        made = CounterMetricFamily(
            f"{PREFIX}faults_made", "Faults made on purpose (EMBERKV_FAULTS).", labels=["point"]
        )
        for name, count in faults.acted().items():
            made.add_metric([name], count)
        families["faults"] = made
        for kind in ("stored", "removed"):
            family = CounterMetricFamily(
                f"{PREFIX}event_blocks_{kind}", f"Blocks in {kind} events.", labels=["tier"]
            )
            for tier in STORED_TIERS:
                family.add_metric([tier.name.lower()], self._moved(tier, kind))
            families[kind] = family
        yield from families.values()

    def _moved(self, tier: Tier, kind: str) -> int:
        ledger = self._store.holdings.catalog.ledgers[tier]
        return ledger.stored if kind == "stored" else ledger.removed
