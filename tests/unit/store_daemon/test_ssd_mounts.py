"""Drives that really fail: a full file system, one made read-only, one unmounted. Needs root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_daemon.config import SsdSection
from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.ssd import OK, SsdFailure, SsdTier
from tests.helpers.ssd import SEGMENT_BYTES, assert_reads_back, read, record, store, stored
from tests.helpers.store import FakeClock


def mount(path: Path, *options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode()}")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[SsdSection]:
    """Drive a is a file system of 1 MiB of its own, drive b is not."""
    (tmp_path / "a").mkdir()
    mount(tmp_path / "a", "-o", "size=1m")
    try:
        yield SsdSection(
            paths=(tmp_path / "a", tmp_path / "b"),
            capacity_bytes=14 * SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            direct_io=False,
        )
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "a")], check=False, capture_output=True)


def on_drive(tier: SsdTier, rows: list[SsdRow], name: str) -> list[SsdRow]:
    return [row for row in rows if tier.segment_path(row).parent.name == name]


def fill_up(directory: Path) -> Path:
    filler = directory / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_a_full_drive_leaves_the_writing_to_the_other_until_it_has_room(
    tmp_path: Path, config: SsdSection
) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=config) as s:
        before = stored(s.tier.append([record(n) for n in range(1, 20)]))
        assert on_drive(s.tier, before, "a")
        filler = fill_up(tmp_path / "a")
        during = stored(s.tier.append([record(n) for n in range(20, 50)]))
        assert "No space left" in s.tier.state
        assert_reads_back(s.tier, before + during)
        clock.now += 1
        s.tier.upkeep()
        assert "No space left" in s.tier.state
        filler.unlink()
        clock.now += 60
        s.tier.upkeep()
        assert s.tier.state == OK
        after = stored(s.tier.append([record(n) for n in range(50, 70)]))
        assert on_drive(s.tier, after, "a")
        assert_reads_back(s.tier, before + during + after)


def test_a_drive_that_became_read_only_still_serves_what_it_has(
    tmp_path: Path, config: SsdSection
) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=config) as s:
        before = stored(s.tier.append([record(n) for n in range(1, 20)]))
        bind = ["mount", "--bind", str(tmp_path / "a"), str(tmp_path / "a")]
        subprocess.run(bind, check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path / "a")], check=True)
        try:
            during = stored(s.tier.append([record(n) for n in range(30, 60)]))
            assert len(on_drive(s.tier, during, "b")) > 20
            assert "Read-only" in s.tier.state
            s.tier.upkeep()
            assert_reads_back(s.tier, before + during)
        finally:
            subprocess.run(["umount", str(tmp_path / "a")], check=True)
        clock.now += 60
        s.tier.upkeep()
        assert s.tier.state == OK


def test_an_unmounted_drive_is_missed_and_nothing_is_written_to_its_mount_point(
    tmp_path: Path, config: SsdSection
) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=config) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 40)]))
        lost, kept = on_drive(s.tier, rows, "a"), on_drive(s.tier, rows, "b")
        subprocess.run(["umount", "-l", str(tmp_path / "a")], check=True)
        more = stored(s.tier.append([record(n) for n in range(40, 70)]))
        with pytest.raises(FileNotFoundError):
            read(s.tier, lost[0])
        changes = s.tier.upkeep()
        assert set(lost) <= set(changes.lost)
        assert list((tmp_path / "a").iterdir()) == []
        for _ in range(5):
            clock.now += 60
            s.tier.upkeep()
        assert "missing; mount it" in s.tier.state
        assert list((tmp_path / "a").iterdir()) == []
        assert_reads_back(s.tier, kept)
        s.tier.reclaim()
        stored(s.tier.append([record(n) for n in range(70, 73)]))
        left = {row.key for row in s.tier.recovered_rows()}
        assert {row.key for row in more[-3:]} <= left


def test_with_the_only_drive_full_records_fail_and_reads_go_on(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    mount(tmp_path / "ssd", "-o", "size=1m")
    clock = FakeClock()
    config = SsdSection(
        path=tmp_path / "ssd",
        capacity_bytes=14 * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
        direct_io=False,
    )
    try:
        with store(tmp_path, clock=clock, config=config) as s:
            rows = stored(s.tier.append([record(n) for n in range(1, 10)]))
            filler = fill_up(tmp_path / "ssd")
            for number in range(10, 40):
                (result,) = s.tier.append([record(number)])
                if isinstance(result, SsdRow):
                    rows.append(result)
            assert isinstance(result, SsdFailure)
            clock.now += 1
            s.tier.upkeep()
            assert "No space left" in s.tier.state
            assert_reads_back(s.tier, rows)
            filler.unlink()
            clock.now += 60
            s.tier.upkeep()
            assert s.tier.state == OK
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "ssd")], check=False)
