"""Prometheus metrics of the SSD tier: what each drive holds and has endured, what reclaim costs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from store_daemon.tiers.ssd import OK, SsdTier

PREFIX = "emberkv_store_ssd_"


def ssd_metrics(ssd: SsdTier) -> Iterator[Metric]:
    yield from _drives(ssd)
    counters: dict[str, tuple[str, float]] = {
        "written_bytes": ("To all drives, in this life.", ssd.bytes_written),
        "payload_bytes": ("Payload that was appended, in this life.", ssd.payload_bytes_written),
        "appended_records": ("Records that were appended.", ssd.appended_records),
        "failed_records": ("Records that could not be appended.", ssd.failed_records),
        "reclaimed_segments": ("Segments removed to make room.", ssd.reclaimed_segments),
        "reappended_records": ("Records kept when theirs was.", ssd.reappended_records),
        "reappended_bytes": ("Payload of those.", ssd.reappended_bytes),
        "unkept_records": ("Records that reclaim had no room to keep.", ssd.unkept_records),
        "corrupt_segments": ("Segments set aside as damaged.", ssd.corrupt_segments),
        "torn_records": ("Records cut by a crash and dropped.", ssd.torn_records),
        "dropped_rows": ("Rows of the local index without a record.", ssd.rows_dropped),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value)
    gauges: dict[str, tuple[str, float]] = {
        "write_amplification": ("Bytes written per payload byte.", ssd.write_amplification),
        "live_records": ("Records that can be read.", ssd.live_records),
        "live_bytes": ("What those take, of the bytes used.", ssd.live_bytes),
        "write_delay_seconds": (
            "How long writes wait for ssd.write_bytes_per_second.",
            ssd.write_delay_seconds,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=value)


def _drives(ssd: SsdTier) -> Iterator[Metric]:
    labels = ["drive"]
    gauges = {
        "used_bytes": GaugeMetricFamily(PREFIX + "drive_used_bytes", "Taken.", labels=labels),
        "capacity_bytes": GaugeMetricFamily(
            PREFIX + "drive_capacity_bytes", "There are.", labels=labels
        ),
        "segments": GaugeMetricFamily(PREFIX + "drive_segments", "In use.", labels=labels),
    }
    counters = {
        "written_bytes_total": CounterMetricFamily(
            PREFIX + "drive_wear_bytes", "Ever written, over all lives.", labels=labels
        ),
        "failed_reads": CounterMetricFamily(
            PREFIX + "drive_failed_reads", "Refused by the drive.", labels=labels
        ),
        "failed_writes": CounterMetricFamily(
            PREFIX + "drive_failed_writes", "Refused by the drive.", labels=labels
        ),
    }
    is_ok = GaugeMetricFamily(
        PREFIX + "drive_ok", "1 when it works, 0 when degraded.", labels=labels
    )
    for state in ssd.drive_states():
        drive = [str(state.path)]
        is_ok.add_metric(drive, state.state == OK)
        for field, gauge in gauges.items():
            gauge.add_metric(drive, getattr(state, field))
        for field, counter in counters.items():
            counter.add_metric(drive, getattr(state, field))
    yield is_ok
    yield from gauges.values()
    yield from counters.values()
