"""What reclaim keeps: pinned and read records are re-appended, within bounds, without a gap."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from store_daemon.tiers import segments
from store_daemon.tiers.changes import Kept, TierChanges, choose_kept
from store_daemon.tiers.live_rows import LiveRows
from store_daemon.tiers.reclaim import CORRUPT_LIMIT
from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.ssd import SsdTier
from tests.helpers.ssd import (
    SEGMENT_BYTES,
    Store,
    assert_reads_back,
    crash_copy,
    payload_of,
    read,
    record,
    store,
    stored,
)


def fill(tier: SsdTier, numbers: range, length: int = 5000) -> list[SsdRow]:
    """Append one by one, without reclaim."""
    rows: list[SsdRow] = []
    for number in numbers:
        rows += stored(tier.append([record(number, length)]))
    return rows


def turn_over(tier: SsdTier, numbers: range) -> TierChanges:
    """Append with reclaim before each; what happened to rows meanwhile."""
    total = TierChanges()
    for number in numbers:
        changes = tier.reclaim()
        total.gone += changes.gone
        total.moved += changes.moved
        stored(tier.append([record(number)]))
    return total


def test_records_that_were_read_outlive_their_segment(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = fill(s.tier, range(1, 8))
        hot = rows[2]
        assert_reads_back(s.tier, [hot])
        changes = turn_over(s.tier, range(10, 40))
        moved = [move for move in changes.moved if move.old == hot]
        assert len(moved) == 1
        assert not {row.key for row in changes.gone} & {hot.key} or s.tier.reappended_records
        assert s.tier.reappended_records == len(changes.moved)
        assert rows[0] in changes.gone
        assert rows[0] not in [move.old for move in changes.moved]


def test_a_record_read_all_the_time_stays_for_ever_and_one_read_once_stays_once(
    tmp_path: Path,
) -> None:
    with store(tmp_path, segments=4) as s:
        hot, once, _ = fill(s.tier, range(1, 4))
        read(s.tier, once)
        kept_once = 0
        for number in range(10, 120):
            assert read(s.tier, hot) == payload_of(1, 5000)
            changes = s.tier.reclaim()
            for move in changes.moved:
                if move.old.key == hot.key:
                    assert move.old == hot
                    hot = move.new
                kept_once += move.old.key == once.key
            assert hot not in changes.gone
            stored(s.tier.append([record(number)]))
        assert kept_once == 1
        assert hot.segment > 3
        assert s.tier.holds(hot)


def test_a_reader_with_the_old_row_gets_the_bytes_from_the_new_place(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        old = fill(s.tier, range(1, 8))[0]
        read(s.tier, old)
        turn_over(s.tier, range(10, 25))
        assert not s.tier.holds(old)
        assert read(s.tier, old) == payload_of(1, 5000)
        assert s.tier.failed_reads == 0


def test_pinned_records_are_kept_before_read_ones_and_only_half_a_segment(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = fill(s.tier, range(1, 8))
        first = [row for row in rows if row.segment == rows[0].segment]
        pinned = {row.key for row in first[-2:]}
        s.tier.keep(lambda row: row.key in pinned, lambda row: False)
        for row in first:
            read(s.tier, row)
        changes = turn_over(s.tier, range(10, 22))
        kept = [move.old for move in changes.moved if move.old in first]
        assert pinned <= {row.key for row in kept}
        size = sum(segments.record_bytes(row.length) for row in kept)
        assert size <= SEGMENT_BYTES // 2
        assert len(kept) < len(first)
        assert set(first) - set(kept) <= set(changes.gone)


def test_a_record_pinned_while_others_are_copied_outlives_its_segment(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = fill(s.tier, range(1, 8))
        first = [row for row in rows if row.segment == rows[0].segment]
        read(s.tier, first[0])
        asked: set[SsdRow] = set()

        def is_pinned(row: SsdRow) -> bool:
            """From the second question on: the first chose what to copy."""
            was_asked = row in asked
            asked.add(row)
            return row == first[-1] and was_asked

        s.tier.keep(is_pinned, lambda row: False)
        changes = turn_over(s.tier, range(10, 22))
        moved = [move.new for move in changes.moved if move.old == first[-1]]
        assert len(moved) == 1
        assert first[-1] not in changes.gone
        assert_reads_back(s.tier, moved)


def test_a_segment_that_is_mostly_pinned_stays_where_it_is(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = fill(s.tier, range(1, 9))
        first = [row for row in rows if row.segment == rows[0].segment]
        pinned = {row.key for row in first[1:]}
        s.tier.keep(lambda row: row.key in pinned, lambda row: False)
        changes = turn_over(s.tier, range(10, 60))
        assert not changes.moved
        assert not set(changes.gone) & set(first)
        assert all(s.tier.holds(row) for row in first)
        s.tier.keep(lambda row: False, lambda row: False)
        assert set(first) <= set(turn_over(s.tier, range(60, 70)).gone)


def test_a_tier_full_of_pinned_records_takes_no_more_and_loses_none(tmp_path: Path) -> None:
    with store(tmp_path, segments=3) as s:
        s.tier.keep(lambda row: True, lambda row: False)
        rows: list[SsdRow] = []
        failed = 0
        for number in range(1, 40):
            changes = s.tier.reclaim()
            assert not changes.gone
            for move in changes.moved:
                rows[rows.index(move.old)] = move.new
            (result,) = s.tier.append([record(number)])
            if isinstance(result, SsdRow):
                rows.append(result)
            else:
                assert "full" in result.reason
                failed += 1
        assert failed
        assert set(s.tier.recovered_rows()) == set(rows)
        assert_reads_back(s.tier, rows)
        assert s.tier.write_amplification < 3.5  # 12 KiB for a record of 5000 bytes


def test_reclaim_makes_progress_though_everything_was_read(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        s.tier.keep(lambda row: False, lambda row: True)
        for number in range(1, 120):
            s.tier.reclaim()
            assert s.tier.used_bytes <= 3 * SEGMENT_BYTES
            row = stored(s.tier.append([record(number)]))[0]
            read(s.tier, row)
            assert s.tier.used_bytes <= 4 * SEGMENT_BYTES
        assert s.tier.reappended_records > 20
        rows = s.tier.recovered_rows()
        assert_reads_back(s.tier, rows)
        assert 1.0 < s.tier.write_amplification < 6.0


def test_amplification_counts_what_was_moved_and_payload_counts_once(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        assert s.tier.write_amplification == 0.0
        rows = fill(s.tier, range(1, 4), length=4096)
        before = s.tier.write_amplification
        assert 2.0 <= before < 2.5  # a header page for each payload page, one for the segment
        for row in rows:
            read(s.tier, row)
        turn_over(s.tier, range(10, 40))
        assert s.tier.reappended_bytes == 3 * 4096
        assert s.tier.payload_bytes_written == 3 * 4096 + 30 * 5000
        assert s.tier.bytes_written > s.tier.payload_bytes_written + s.tier.reappended_bytes


def test_moved_rows_are_found_after_a_restart(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        old = fill(s.tier, range(1, 8))[0]
        read(s.tier, old)
        turn_over(s.tier, range(10, 25))
        live = set(s.tier.recovered_rows())
        assert old.key in {row.key for row in live}
    with store(tmp_path, segments=4) as s:
        assert set(s.tier.recovered_rows()) == live
        assert_reads_back(s.tier, list(live))


@pytest.mark.parametrize("lost", [False, True], ids=["index kept", "index lost"])
def test_a_kill_between_re_append_and_removal_leaves_one_copy_live_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    crashed = tmp_path / "crashed"

    def kill_here(s: Store) -> None:
        real = LiveRows.drop_segments

        def copy_first(rows: LiveRows, numbers: Iterable[int]) -> list[SsdRow]:
            if not crashed.exists():
                crash_copy(tmp_path / "running", crashed)
            return real(rows, numbers)

        monkeypatch.setattr(LiveRows, "drop_segments", copy_first)

    with store(tmp_path / "running", segments=4) as s:
        rows = fill(s.tier, range(1, 15))
        hot = rows[1]
        read(s.tier, hot)
        kill_here(s)
        changes = s.tier.reclaim()
        new = next(move.new for move in changes.moved if move.old == hot)
    if lost:
        shutil.rmtree(crashed / "rocksdb")
    with store(crashed, segments=4) as s:
        found = {row.key: row for row in s.tier.recovered_rows()}
        assert found[hot.key] == new
        assert_reads_back(s.tier, list(found.values()))
        assert {row.key for row in rows} == found.keys()
        assert s.tier.corrupt_segments == 0


def test_a_record_that_went_bad_is_not_re_appended(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = fill(s.tier, range(1, 8))
        for row in rows[:2]:
            read(s.tier, row)
        with s.tier.segment_path(rows[0]).open("r+b") as file:
            file.seek(rows[0].offset + 4096 + 10)
            file.write(b"\xff\xff\xff")
        changes = turn_over(s.tier, range(10, 25))
        moved = [move.old for move in changes.moved]
        assert rows[0] not in moved
        assert rows[0] in changes.gone
        assert rows[1] in moved


def test_a_segment_with_several_bad_records_is_set_aside_and_the_good_ones_move(
    tmp_path: Path,
) -> None:
    with store(tmp_path, segments=8) as s:
        rows = fill(s.tier, range(1, 14))
        first = [row for row in rows if row.segment == rows[0].segment]
        path = s.tier.segment_path(first[0])
        assert len(first) > CORRUPT_LIMIT
        read(s.tier, first[-1])
        with path.open("r+b") as file:
            for row in first[:CORRUPT_LIMIT]:
                file.seek(row.offset + 4096)
                file.write(b"\xff\xff\xff")
        for number, row in enumerate(first[:CORRUPT_LIMIT]):
            assert not s.tier.wants_upkeep, f"after {number}"
            with pytest.raises(Exception, match="checksum"):
                read(s.tier, row)
            s.tier.forget([row])  # as the store does
        assert s.tier.wants_upkeep
        changes = s.tier.upkeep()
        assert [move.old for move in changes.moved] == [first[-1]]
        assert changes.lost == first[CORRUPT_LIMIT:-1]
        assert not path.exists()
        assert path.with_name(path.name + ".corrupt").exists()
        assert s.tier.corrupt_segments == 1
        assert not s.tier.wants_upkeep
        rest = s.tier.recovered_rows()
        assert {row.key for row in rest} == {row.key for row in rows[len(first) :]} | {
            first[-1].key
        }
        assert_reads_back(s.tier, rest)


def test_choice_takes_pinned_first_and_what_fits_of_the_rest() -> None:
    rows = [record(n, 4096).placed(1, 4096 + 8192 * n) for n in range(5)]
    kept = choose_kept(rows, lambda row: row == rows[4], lambda row: row != rows[1], 3 * 8192)
    assert kept == Kept([rows[4]], [rows[0], rows[2]])
    assert choose_kept(rows, lambda row: True, lambda row: True, 5 * 8192) == Kept(rows, [])
    assert choose_kept(rows, lambda row: True, lambda row: True, 5 * 8192 - 1) is None
    assert choose_kept(rows, lambda row: False, lambda row: True, 8191) == Kept([], [])
    assert choose_kept([], lambda row: True, lambda row: True, 0) == Kept([], [])
