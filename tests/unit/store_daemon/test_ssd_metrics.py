"""What is exported of the SSD tier agrees with the tier, drive by drive."""

from __future__ import annotations

from pathlib import Path

from store_daemon.ssd_metrics import ssd_metrics
from store_daemon.tiers.ssd import SsdTier
from tests.helpers.ssd import drives, record, store, stored
from tests.helpers.store import FakeClock


def samples(tier: SsdTier) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("emberkv_store_ssd_"), sample.labels.get("drive", "")): float(
            sample.value
        )
        for metric in ssd_metrics(tier)
        for sample in metric.samples
    }


def test_drives_and_counters_are_exported(tmp_path: Path) -> None:
    with store(tmp_path, clock=FakeClock(), config=drives(tmp_path)) as s:
        stored(s.tier.append([record(n) for n in range(1, 30)]))
        a, b = str(tmp_path / "a"), str(tmp_path / "b")
        found = samples(s.tier)
        assert found["drive_ok", a] == found["drive_ok", b] == 1
        assert found["drive_used_bytes", a] + found["drive_used_bytes", b] == s.tier.used_bytes
        assert found["drive_wear_bytes_total", a] > 0
        assert found["appended_records_total", ""] == 29
        assert found["live_records", ""] == 29
        assert found["write_amplification", ""] == s.tier.write_amplification
        (tmp_path / "a").rename(tmp_path / "away")
        (tmp_path / "a").mkdir()
        s.tier._drives[0].is_doubted = True
        s.tier.upkeep()
        found = samples(s.tier)
        assert (found["drive_ok", a], found["drive_ok", b]) == (0, 1)
        assert found["drive_segments", a] == 0
