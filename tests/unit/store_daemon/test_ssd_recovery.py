"""Start of the SSD tier after every kind of end: what was acknowledged is there, bytes and all.

A crash is played by copying the directories while the tier is open.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from store_daemon.local_index import IndexContent, LocalIndex
from store_daemon.recovery import recover
from store_daemon.tiers import segments
from store_daemon.tiers.row_table import RowTable, newest
from store_daemon.tiers.segment_file import create_segment
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow
from store_daemon.tiers.ssd import SsdTier
from tests.helpers.ssd import (
    NODE,
    SEGMENT_BYTES,
    Store,
    assert_reads_back,
    crash_copy,
    record,
    section,
    store,
    stored,
)


def lose_index(directory: Path) -> None:
    shutil.rmtree(directory / "rocksdb")


def segment_path(directory: Path, number: int) -> Path:
    return directory / "ssd" / segments.segment_name(number)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def by_number(tier: SsdTier) -> list[SsdRow]:
    return sorted(tier.recovered_rows(), key=lambda row: row.block_hash)


def crashed(
    tmp_path: Path, count: int, after: Callable[[Store, list[SsdRow]], None] | None = None
) -> tuple[Path, list[SsdRow]]:
    """A directory of a tier that was killed after `count` records of 5000 bytes."""
    target = tmp_path / "crashed"
    with store(tmp_path / "running") as s:
        rows = stored(s.tier.append([record(n) for n in range(1, count + 1)]))
        if after is not None:
            after(s, rows)
        crash_copy(tmp_path / "running", target)
    return target, rows


@pytest.mark.parametrize("lost", [False, True], ids=["index kept", "index lost"])
def test_kill_loses_nothing_with_or_without_the_index(tmp_path: Path, lost: bool) -> None:
    directory, rows = crashed(tmp_path, 30)
    if lost:
        lose_index(directory)
    with store(directory) as s:
        assert s.index.was_rebuilt is lost
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)
        assert (s.tier.corrupt_segments, s.tier.torn_records) == (0, 0)
        more = stored(s.tier.append([record(n) for n in range(31, 35)]))
        assert min(row.segment for row in more) > max(row.segment for row in rows)
    with store(directory) as s:
        assert by_number(s.tier) == rows + more


def test_recovering_twice_gives_the_same(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    lose_index(directory)
    for _ in range(3):
        with store(directory) as s:
            assert by_number(s.tier) == rows
        names = sorted(path.name for path in (directory / "ssd").iterdir())
        lose_index(directory)
    assert len(names) == 3 + len({row.segment for row in rows})


def test_recovery_changes_no_payload_and_new_records_touch_none(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    with store(directory) as s:
        for number in range(100, 200, 10):
            more = stored(s.tier.append([record(n) for n in range(number, number + 10)]))
            assert_reads_back(s.tier, more)
        assert_reads_back(s.tier, rows)


HEADER = segments.RECORD_HEADER_BYTES
CUTS = [0, 1, 8, 60, HEADER - 1, HEADER, 4095, 4096, 4097, 8192, 4096 + 4999]
DAMAGES: dict[str, Callable[[Path, int, int], None]] = {
    "truncated": lambda path, at, end: _truncate(path, at),
    "zeroed": lambda path, at, end: overwrite(path, at, bytes(end - at)),
    "flipped": lambda path, at, end: overwrite(path, at, bytes([path.read_bytes()[at] ^ 0x40])),
    "garbage behind": lambda path, at, end: overwrite(path, at, b"\xa5" * (end - at)),
}


def _truncate(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.truncate(at)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_torn_tail_is_cut_at_the_torn_record(
    tmp_path: Path, cut: int, damage: Callable[[Path, int, int], None]
) -> None:
    """The index is lost, so only the records speak; the last but one is damaged at byte `cut`."""
    directory, rows = crashed(tmp_path, 4)
    lose_index(directory)
    torn = rows[2]
    path = segment_path(directory, torn.segment)
    # Bytes of the header page behind the header, and the padding, are nobody's.
    harmless = damage is DAMAGES["flipped"] and cut in (HEADER, 4095)
    damage(path, torn.offset + cut, torn.offset + PAGE_BYTES + 5000)
    with store(directory) as s:
        survivors = rows if harmless else rows[:2]
        assert by_number(s.tier) == survivors
        assert_reads_back(s.tier, survivors)
        clean_end = damage is DAMAGES["zeroed"] and cut == 0
        at_end = damage is DAMAGES["truncated"] and cut == 0
        assert s.tier.torn_records == (0 if harmless or clean_end or at_end else 1)
        more = stored(s.tier.append([record(3), record(9)]))
        assert_reads_back(s.tier, survivors + more)


@pytest.mark.parametrize("cut", [0, 60, 4096, 4096 + 4999])
def test_tear_behind_rows_of_the_index_costs_none_of_them(tmp_path: Path, cut: int) -> None:
    """Record 5 was not acknowledged: it is not in the index and its end is missing."""
    with store(tmp_path / "running") as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 4)]))
        crash_copy(tmp_path / "running", tmp_path / "before")
        torn = stored(s.tier.append([record(4)]))[0]
        crash_copy(tmp_path / "running", tmp_path / "after")
    directory = tmp_path / "before"
    shutil.rmtree(directory / "ssd")
    shutil.copytree(tmp_path / "after" / "ssd", directory / "ssd")
    path = segment_path(directory, torn.segment)
    overwrite(path, torn.offset + cut, bytes(torn.end - torn.offset - cut))
    with store(directory) as s:
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)


def test_whole_record_without_a_row_is_adopted(tmp_path: Path) -> None:
    with store(tmp_path / "running") as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 4)]))
        shutil.copytree(tmp_path / "running", tmp_path / "before")
        rows += stored(s.tier.append([record(4)]))
        shutil.rmtree(tmp_path / "before" / "ssd")
        shutil.copytree(tmp_path / "running" / "ssd", tmp_path / "before" / "ssd")
    with store(tmp_path / "before") as s:
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)


def test_damage_before_acknowledged_rows_costs_only_the_damaged_one(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 4)
    overwrite(segment_path(directory, 1), rows[1].offset, b"\xff" * 4096)
    with store(directory) as s:
        assert by_number(s.tier) == rows  # found out when it is read
        assert_reads_back(s.tier, [rows[0], rows[2], rows[3]])


def test_payload_that_looks_like_a_record_is_not_taken_for_one(tmp_path: Path) -> None:
    """A stranger's payload holds a record header for the place where it will be stored."""
    with store(tmp_path / "running") as s:
        first = stored(s.tier.append([record(1)]))[0]
        forged_offset = first.end + PAGE_BYTES
        forged = record(666, 4096).placed(first.segment, forged_offset)
        carrier = record(2, 8192)
        content = segments.pack_record_header(forged).ljust(4096, b"\0") + bytes(
            record(666, 4096).payload
        )
        carrier.payload[:8192] = content
        rows = [first, *stored(s.tier.append([carrier, record(3)]))]
        shutil.copytree(tmp_path / "running", tmp_path / "crashed")
    lose_index(tmp_path / "crashed")
    overwrite(segment_path(tmp_path / "crashed", 1), rows[1].offset, b"\xff" * 4096)
    with store(tmp_path / "crashed") as s:
        assert by_number(s.tier) == [first]


def test_damaged_footer_is_replaced_by_reading_the_records(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    lose_index(directory)
    first = segment_path(directory, 1)
    size = first.stat().st_size
    overwrite(first, size - 2 * PAGE_BYTES + 50, b"\xff")
    overwrite(segment_path(directory, 2), segment_path(directory, 2).stat().st_size - 4096, b"x")
    with store(directory) as s:
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)


@pytest.mark.parametrize("lost", [False, True], ids=["index kept", "index lost"])
def test_damaged_segment_header_costs_no_record(tmp_path: Path, lost: bool) -> None:
    directory, rows = crashed(tmp_path, 30)
    if lost:
        lose_index(directory)
    overwrite(segment_path(directory, 1), 0, b"\xff" * PAGE_BYTES)
    with store(directory) as s:
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)
        assert s.tier.corrupt_segments == 1


@pytest.mark.parametrize("lost", [False, True], ids=["index kept", "index lost"])
@pytest.mark.parametrize("content", [b"\xa5" * SEGMENT_BYTES, b"short", b"\xa5" * 5000])
def test_unreadable_segment_is_set_aside_and_the_rest_goes_on(
    tmp_path: Path, lost: bool, content: bytes
) -> None:
    directory, rows = crashed(tmp_path, 30)
    if lost:
        lose_index(directory)
    segment_path(directory, 2).write_bytes(content)
    rest = [row for row in rows if row.segment != 2]
    with store(directory) as s:
        assert by_number(s.tier) == rest
        assert_reads_back(s.tier, rest)
        assert s.tier.corrupt_segments == 1
        assert s.tier.rows_dropped == (0 if lost else len(rows) - len(rest))
        aside = directory / "ssd" / (segments.segment_name(2) + ".corrupt")
        assert aside.read_bytes() == content
        more = stored(s.tier.append([record(n) for n in range(31, 40)]))
        assert 2 not in {row.segment for row in more}
        assert_reads_back(s.tier, more)
    with store(directory) as s:
        assert s.tier.corrupt_segments == 0
        assert by_number(s.tier) == rest + more


def test_set_aside_files_count_as_used_and_are_reclaimed_first(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    segment_path(directory, 2).write_bytes(b"\xa5" * SEGMENT_BYTES)
    count = len({row.segment for row in rows})
    with store(directory, segments=count) as s:
        before = s.tier.used_bytes
        assert not s.tier.reclaim()
        assert s.tier.used_bytes == before - SEGMENT_BYTES
        assert not list((directory / "ssd").glob("*.corrupt"))


def test_rows_of_a_segment_deleted_by_hand_are_dropped(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    segment_path(directory, 2).unlink()
    rest = [row for row in rows if row.segment != 2]
    with store(directory) as s:
        assert by_number(s.tier) == rest
        assert s.tier.rows_dropped == len(rows) - len(rest)
    with store(directory) as s:
        assert s.tier.rows_dropped == 0
        assert set(s.index.content().sealed) == {row.segment for row in rest}


def test_all_segments_deleted_by_hand_is_an_empty_tier_with_new_numbers(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    shutil.rmtree(directory / "ssd")
    with store(directory) as s:
        assert s.tier.recovered_rows() == []
        more = stored(s.tier.append([record(1)]))
        assert more[0].segment > max(row.segment for row in rows)


def test_number_of_a_segment_is_not_used_again_after_it_was_removed(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        row = stored(s.tier.append([record(1)]))[0]
        s.tier.forget([row])
    assert not list((tmp_path / "ssd").glob("seg-*"))
    with store(tmp_path) as s:
        assert stored(s.tier.append([record(2)]))[0].segment > row.segment


def test_forgotten_and_replaced_rows_do_not_come_back_after_a_kill(tmp_path: Path) -> None:
    again: list[SsdRow] = []

    def change(s: Store, rows: list[SsdRow]) -> None:
        s.tier.forget(rows[:3])
        again.extend(stored(s.tier.append([record(5, 700)])))

    directory, rows = crashed(tmp_path, 12, change)
    sealed = set(rows[5:]) | set(again)
    with store(directory) as s:
        live = set(s.tier.recovered_rows())
        assert live >= sealed
        assert rows[4] not in live
        # Segment 1 was sealed with its rows in the index: what is missing there stays forgotten.
        assert not live & set(rows[:3])


@pytest.mark.parametrize("size", [0, SEGMENT_BYTES])
def test_segment_whose_creation_was_killed_is_removed_not_blamed(tmp_path: Path, size: int) -> None:
    directory, rows = crashed(tmp_path, 6)
    unborn = segment_path(directory, 9)
    unborn.write_bytes(bytes(size))
    with store(directory) as s:
        assert not unborn.exists()
        assert by_number(s.tier) == rows
        assert (s.tier.corrupt_segments, s.tier.torn_records) == (0, 0)


def test_empty_open_segment_is_removed(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 6)
    path = segment_path(directory, 9)
    os.close(create_segment(path, 9, SEGMENT_BYTES, True))
    with store(directory) as s:
        assert not path.exists()
        assert by_number(s.tier) == rows


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 6)
    for name in ("notes.txt", "seg-12.ember", "seg-0000000000000001.ember.bak"):
        (directory / "ssd" / name).write_text("mine")
    with store(directory) as s:
        assert by_number(s.tier) == rows
    for name in ("notes.txt", "seg-12.ember", "seg-0000000000000001.ember.bak"):
        assert (directory / "ssd" / name).read_text() == "mine"


def test_segment_under_another_name_gives_no_rows(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    lose_index(directory)
    shutil.copy(segment_path(directory, 1), segment_path(directory, 77))
    with store(directory) as s:
        assert by_number(s.tier) == rows
        assert s.tier.corrupt_segments == 1


def test_changed_segment_size_keeps_the_old_segments(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    index = LocalIndex.open(directory, NODE)
    tier = SsdTier.open(section(directory, segments=20, segment_bytes=4 * SEGMENT_BYTES), index)
    assert by_number(tier) == rows
    more = stored(tier.append([record(n, 60000) for n in range(50, 55)]))
    assert_reads_back(tier, rows + more)
    tier.check_integrity()
    tier.close()
    index.close()


def test_corrupt_index_is_rebuilt_from_the_segments(tmp_path: Path) -> None:
    directory, rows = crashed(tmp_path, 30)
    for path in (directory / "rocksdb").iterdir():
        path.write_bytes(b"\xa5" * 5000)
    with store(directory) as s:
        assert s.index.was_rebuilt
        assert by_number(s.tier) == rows
        assert_reads_back(s.tier, rows)
    with store(directory) as s:
        assert not s.index.was_rebuilt
        assert by_number(s.tier) == rows


def test_the_newest_record_of_a_part_stands() -> None:
    rows = [
        record(1).placed(1, 4096),
        record(2).placed(1, 20480),
        record(1, part=1).placed(1, 40960),
        record(1).placed(2, 4096),
        record(1).placed(2, 20480),
    ]
    assert newest(RowTable.of(rows)).tolist() == [False, True, True, False, True]


def test_hashes_that_only_begin_alike_are_two_blocks() -> None:
    rows = [record(n).placed(1, 4096 * 3 * n) for n in range(1, 5)]
    assert len({row.block_hash[:8] for row in rows}) == 1
    assert newest(RowTable.of(rows)).all()


def test_recovery_of_an_empty_directory_is_empty(tmp_path: Path) -> None:
    found = recover(tmp_path, IndexContent(), 0, direct_io=True)
    assert (found.segments, found.set_aside, found.highest_number) == ((), (), 0)
