"""The check of what is stored: it finds every bad record once, and only bad ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from store_daemon.tiers.segments import SsdRow, record_bytes
from store_daemon.tiers.ssd import ScrubStep, SsdTier
from tests.helpers.ssd import drives, read, record, store, stored


def whole_pass(tier: SsdTier, most_bytes: int = 1 << 20) -> ScrubStep:
    """All steps to the end of the pass, added up."""
    total = ScrubStep()
    while not total.is_end:
        done = tier.scrub(most_bytes)
        total.records += done.records
        total.read_bytes += done.read_bytes
        total.corrupt += done.corrupt
        total.unreadable += done.unreadable
        total.is_end = done.is_end
    return total


def spoil(tier: SsdTier, row: SsdRow, at: int = 4096) -> None:
    with tier.segment_path(row).open("r+b") as file:
        file.seek(row.offset + at)
        byte = file.read(1)
        file.seek(row.offset + at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("most_bytes", [1, 20_000, 1 << 20])
def test_every_record_is_read_once_and_bad_ones_are_named(tmp_path: Path, most_bytes: int) -> None:
    with store(tmp_path, config=drives(tmp_path, "ab")) as s:
        rows = stored(s.tier.append([record(n, 3000 + n) for n in range(1, 41)]))
        bad = [rows[3], rows[17], rows[39]]
        for row, at in zip(bad, (0, 4096, 4096 + 3000), strict=True):
            spoil(s.tier, row, at)
        done = whole_pass(s.tier, most_bytes)
        assert done.records == 40
        assert done.read_bytes == sum(record_bytes(row.length) for row in rows)
        assert done.read_bytes == s.tier.live_bytes
        assert sorted(done.corrupt, key=lambda row: row.part + row.offset) == sorted(
            bad, key=lambda row: row.part + row.offset
        )
        assert not done.unreadable
        s.tier.forget(bad)
        again = whole_pass(s.tier, most_bytes)
        assert (again.records, again.corrupt) == (37, [])


def test_a_step_stops_when_it_has_read_enough_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n, 4096) for n in range(1, 11)]))
        first = s.tier.scrub(3 * 8192)
        assert (first.records, first.read_bytes, first.is_end) == (3, 3 * 8192, False)
        spoil(s.tier, rows[1])
        spoil(s.tier, rows[4])
        assert whole_pass(s.tier).corrupt == [rows[4]]
        s.tier.scrub(8192)
        s.tier.restart_scrub()
        assert whole_pass(s.tier).records == 10


def test_records_that_go_or_move_while_their_segment_waits_are_no_errors(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 8)]))
        read(s.tier, rows[2])
        s.tier.scrub(1)
        s.tier.forget(rows[1:2])
        for number in range(10, 30):
            s.tier.reclaim()
            stored(s.tier.append([record(number)]))
        done = whole_pass(s.tier)
        assert not done.corrupt
        assert not done.unreadable


def test_scrubbing_is_no_use_that_keeps_a_record(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        stored(s.tier.append([record(n) for n in range(1, 8)]))
        whole_pass(s.tier)
        for number in range(10, 30):
            assert not s.tier.reclaim().moved
            stored(s.tier.append([record(number)]))


def test_a_bad_sector_is_named_and_doubts_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 8)]))

        def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset == rows[1].offset:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            done = whole_pass(s.tier)
        assert rows[1] in done.unreadable
        assert not done.corrupt
        assert s.tier.wants_upkeep
        assert not s.tier.upkeep()


def test_a_pass_over_nothing_ends_at_once(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        done = s.tier.scrub(1 << 20)
        assert (done.records, done.is_end) == (0, True)


@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_segments_of_which_no_row_lives_are_passed_over(tmp_path: Path, most_bytes: int) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n, 12_000) for n in range(1, 31)]))
        first, *between, last = sorted({row.segment for row in rows})
        assert len(between) >= 3
        s.tier.forget([row for row in rows if row.segment in (first, *between[1:])])
        done = whole_pass(s.tier, most_bytes)
        assert done.records == sum(row.segment in (between[0], last) for row in rows)
        s.tier.forget(rows)
        assert whole_pass(s.tier, most_bytes).records == 0
