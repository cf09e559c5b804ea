"""Several SSD directories: striping, one failing, one missing, two swapped, one replaced."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from emberkv_proto.errors import PreflightError
from store_daemon.config import SsdDriveSection, SsdSection
from store_daemon.local_index import LocalIndex
from store_daemon.tiers import drive as drive_module
from store_daemon.tiers import open_segment, segments
from store_daemon.tiers.drive_marker import (
    ADOPT_NAME,
    MARKER_NAME,
    KnownDrive,
    read_marker,
    read_wear,
)
from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.ssd import OK, SsdFailure, SsdTier
from tests.helpers.ssd import (
    NODE,
    SEGMENT_BYTES,
    assert_reads_back,
    drives,
    read,
    record,
    store,
    stored,
)
from tests.helpers.store import FakeClock


def fill(tier: SsdTier, numbers: range) -> list[SsdRow]:
    return stored(tier.append([record(number) for number in numbers]))


def directory_of(tier: SsdTier, row: SsdRow) -> str:
    return tier.segment_path(row).parent.name


def on_drive(tier: SsdTier, rows: list[SsdRow], name: str) -> list[SsdRow]:
    return [row for row in rows if directory_of(tier, row) == name]


def take_away(path: Path) -> Path:
    """As a drive that falls off the bus: its directory is an empty mount point."""
    away = path.with_name(path.name + "-away")
    path.rename(away)
    path.mkdir()
    return away


def put_back(path: Path) -> None:
    shutil.rmtree(path)
    path.with_name(path.name + "-away").rename(path)


def break_writes(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Every write to a segment in the directory of this name fails."""
    real = open_segment.create_segment

    def create(path: Path, *arguments: int) -> int:
        if path.parent.name == name:
            raise OSError(code, os.strerror(code))
        return real(path, *arguments)

    def refuse(directory: Path, *_: object) -> None:
        if directory.name == name:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(open_segment, "create_segment", create)
    monkeypatch.setattr(drive_module, "try_segment", refuse)


# -- striping --------------------------------------------------------------------------------------


def test_segments_go_where_most_is_free_and_numbers_are_unique(tmp_path: Path) -> None:
    config = SsdSection(
        paths=(
            SsdDriveSection(path=tmp_path / "big", capacity_bytes=20 * SEGMENT_BYTES),
            tmp_path / "small",
        ),
        capacity_bytes=4 * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )
    with store(tmp_path, config=config) as s:
        rows = fill(s.tier, range(1, 80))
        big, small = s.tier.drive_states()
        assert (big.capacity_bytes, small.capacity_bytes) == (
            20 * SEGMENT_BYTES,
            4 * SEGMENT_BYTES,
        )
        assert 0 < small.segments < 4 < big.segments
        assert (
            abs((big.capacity_bytes - big.used_bytes) - (small.capacity_bytes - small.used_bytes))
            <= SEGMENT_BYTES
        )
        assert s.tier.used_bytes == big.used_bytes + small.used_bytes
        assert s.tier.capacity_bytes == 24 * SEGMENT_BYTES
        assert_reads_back(s.tier, rows)
    with store(tmp_path, config=config) as s:
        assert set(s.tier.recovered_rows()) == set(rows)
        assert_reads_back(s.tier, rows)


def test_reclaim_takes_the_oldest_segment_of_all_drives(tmp_path: Path) -> None:
    config = drives(tmp_path, "abc", segments=3)
    with store(tmp_path, config=config) as s:
        rows: list[SsdRow] = []
        gone: list[SsdRow] = []
        for number in range(1, 120):
            gone += s.tier.reclaim().gone
            rows += fill(s.tier, range(number, number + 1))
        assert gone == rows[: len(gone)]
        assert set(s.tier.recovered_rows()) == set(rows[len(gone) :])
        used = [state.used_bytes for state in s.tier.drive_states()]
        assert min(used) >= SEGMENT_BYTES
        assert max(used) <= 3 * SEGMENT_BYTES
        assert sum(used) >= 6 * SEGMENT_BYTES


def test_drives_in_another_order_or_at_other_paths_are_understood(tmp_path: Path) -> None:
    with store(tmp_path, config=drives(tmp_path)) as s:
        rows = fill(s.tier, range(1, 40))
        s.tier.forget(rows[:2])
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "x").rename(tmp_path / "b")
    with store(tmp_path, config=drives(tmp_path, "ab")) as s:
        assert s.tier.state == OK
        assert set(s.tier.recovered_rows()) == set(rows[2:])
        assert_reads_back(s.tier, rows[2:])
        assert s.tier.rows_dropped == 0
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    both = SsdSection(
        paths=(tmp_path / "elsewhere", tmp_path / "a"),
        capacity_bytes=16 * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )
    with store(tmp_path, config=both) as s:
        assert set(s.tier.recovered_rows()) == set(rows[2:])


def test_lost_index_is_rebuilt_from_all_drives(tmp_path: Path) -> None:
    with store(tmp_path, config=drives(tmp_path, "abc")) as s:
        rows = fill(s.tier, range(1, 60))
    shutil.rmtree(tmp_path / "rocksdb")
    with store(tmp_path, config=drives(tmp_path, "abc")) as s:
        assert set(s.tier.recovered_rows()) == set(rows)
        assert_reads_back(s.tier, rows)


# -- one drive that cannot be written --------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_drive_that_refuses_writes_costs_nothing_stored_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        before = fill(s.tier, range(1, 30))
        with monkeypatch.context() as patch:
            break_writes(patch, "a", code)
            during = fill(s.tier, range(30, 60))
            fresh = [row for row in during if row.segment > before[-1].segment + 1]
            assert {directory_of(s.tier, row) for row in fresh} == {"b"}
            assert s.tier.state == f"degraded: {tmp_path / 'a'}: {OSError(code, os.strerror(code))}"
            states = {state.path.name: state for state in s.tier.drive_states()}
            assert states["b"].state == OK
            assert states["a"].state == s.tier.state
            assert states["a"].failed_writes == 1
            assert not s.tier.upkeep()
            assert_reads_back(s.tier, before + during)
            for _ in range(8):
                clock.now += 5
                s.tier.upkeep()
            assert states["a"].failed_writes < 10, "it is left alone for longer and longer"
        assert s.tier.state != OK
        clock.now += 30
        assert s.tier.wants_upkeep
        assert not s.tier.upkeep()
        assert s.tier.state == OK
        after = fill(s.tier, range(60, 80))
        assert on_drive(s.tier, after, "a")
        assert_reads_back(s.tier, before + during + after)


def test_a_write_that_fails_half_way_goes_whole_to_the_other_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    with store(tmp_path, config=drives(tmp_path)) as s:
        before = fill(s.tier, range(1, 3))
        broken = s.tier.segment_path(before[0]).parent

        def tear(fd: int, buffers: list[memoryview], offset: int) -> int:
            if Path(os.readlink(f"/proc/self/fd/{fd}")).parent == broken:
                if len(buffers) == 1 and offset:
                    raise OSError(errno.EIO, "broken")
                if offset:
                    real(fd, buffers[:1], offset)  # a header without its payload
                    raise OSError(errno.EIO, "broken")
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", tear)
            during = fill(s.tier, range(3, 9))
        assert {directory_of(s.tier, row) for row in during} == {"ab".replace(broken.name, "")}
        assert_reads_back(s.tier, before + during)
    shutil.rmtree(tmp_path / "rocksdb")
    with store(tmp_path, config=drives(tmp_path)) as s:
        assert set(s.tier.recovered_rows()) == {*before, *during}


def test_with_every_drive_broken_records_fail_with_each_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(tmp_path, clock=FakeClock(), config=drives(tmp_path)) as s:

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fail)
            (failure,) = s.tier.append([record(1)])
        assert isinstance(failure, SsdFailure)
        assert str(tmp_path / "a") in failure.reason
        assert str(tmp_path / "b") in failure.reason


# -- one drive that cannot be read -----------------------------------------------------------------


def test_a_drive_that_vanishes_is_lost_alone_and_its_rows_come_back_with_it(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        rows = fill(s.tier, range(1, 40))
        lost, kept = on_drive(s.tier, rows, "a"), on_drive(s.tier, rows, "b")
        assert lost
        assert kept
        away = take_away(tmp_path / "a")
        with pytest.raises(FileNotFoundError):
            read(s.tier, lost[0])
        assert s.tier.wants_upkeep
        changes = s.tier.upkeep()
        assert sorted(changes.lost, key=lambda row: row.block_hash) == lost
        assert not changes.gone
        assert "a" in s.tier.state
        assert "not this drive" in s.tier.state
        s.tier.check_integrity()
        assert_reads_back(s.tier, kept)
        with pytest.raises(FileNotFoundError):
            read(s.tier, lost[0])
        during = fill(s.tier, range(50, 60))
        again = fill(s.tier, range(int.from_bytes(lost[0].block_hash, "big"), 2))
        assert {directory_of(s.tier, row) for row in during + again} == {"b"}

        clock.now += 1
        assert not s.tier.upkeep(), "an empty directory is not the drive"
        assert "missing; mount it" in s.tier.state
        assert not (tmp_path / "a" / MARKER_NAME).exists()
        assert away.exists()

        put_back(tmp_path / "a")
        clock.now += 30
        changes = s.tier.upkeep()
        assert s.tier.state == OK
        back = [row for row in lost if row.key not in {row.key for row in again}]
        assert sorted(changes.found, key=lambda row: row.block_hash) == back
        assert_reads_back(s.tier, kept + during + again + back)
        more = fill(s.tier, range(60, 70))
        live = {*kept, *during, *again, *back, *more}
        assert set(s.tier.recovered_rows()) == live
    with store(tmp_path, config=drives(tmp_path)) as s:
        assert set(s.tier.recovered_rows()) == live
        assert_reads_back(s.tier, list(live))


def test_unreadable_segments_lose_the_drive_and_one_bad_sector_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with store(tmp_path, clock=FakeClock(), config=drives(tmp_path)) as s:
        rows = fill(s.tier, range(1, 40))
        bad = on_drive(s.tier, rows, "a")[-1]

        def sector(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset == bad.offset and Path(os.readlink(f"/proc/self/fd/{fd}")) == path:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        path = s.tier.segment_path(bad)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", sector)
            with pytest.raises(OSError, match="Input/output"):
                read(s.tier, bad)
            assert not s.tier.upkeep()
            assert s.tier.state == OK

        def drive(fd: int, buffers: list[memoryview], offset: int) -> int:
            if Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name == "a":
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", drive)
            with pytest.raises(OSError, match="Input/output"):
                read(s.tier, bad)
            lost = s.tier.upkeep().lost
        assert set(lost) == {row for row in rows if row.segment in {r.segment for r in lost}}
        assert bad in lost
        states = {state.path.name: state for state in s.tier.drive_states()}
        assert states["a"].failed_reads == 2
        assert "Input/output" in states["a"].state
        assert states["b"].state == OK


def test_reclaim_and_appends_pass_a_lost_drive_over(tmp_path: Path) -> None:
    config = drives(tmp_path, "ab", segments=3)
    with store(tmp_path, clock=FakeClock(), config=config) as s:
        rows = fill(s.tier, range(1, 12))
        take_away(tmp_path / "a")
        with pytest.raises(FileNotFoundError):
            read(s.tier, on_drive(s.tier, rows, "a")[0])
        s.tier.upkeep()
        for number in range(20, 60):
            s.tier.reclaim()
            fill(s.tier, range(number, number + 1))
            assert s.tier.used_bytes <= 3 * SEGMENT_BYTES
        put_back(tmp_path / "a")


# -- a drive that is missing at start --------------------------------------------------------------


def missing_at_start(tmp_path: Path) -> tuple[list[SsdRow], list[SsdRow]]:
    """Rows on a drive that is away now, and the others."""
    with store(tmp_path, config=drives(tmp_path)) as s:
        rows = fill(s.tier, range(1, 40))
        s.tier.forget(rows[-1:])
        parts = on_drive(s.tier, rows[:-1], "a"), on_drive(s.tier, rows[:-1], "b")
    take_away(tmp_path / "a")
    return parts


def test_a_drive_missing_at_start_is_a_warning_and_not_a_new_drive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost, kept = missing_at_start(tmp_path)
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        assert "missing; mount it" in caplog.text
        assert set(s.tier.recovered_rows()) == set(kept)
        assert s.tier.rows_dropped == len(lost)
        assert_reads_back(s.tier, kept)
        more = fill(s.tier, range(50, 60))
        assert {directory_of(s.tier, row) for row in more} == {"b"}
        assert [path.name for path in (tmp_path / "a").iterdir()] == []
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        assert set(s.tier.recovered_rows()) == {*kept, *more}
    put_back(tmp_path / "a")
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        assert s.tier.state == OK
        found = set(s.tier.recovered_rows())
        assert found >= {*kept, *more, *lost}
        assert_reads_back(s.tier, list(found))


def test_a_drive_that_comes_back_while_serving_brings_its_rows(tmp_path: Path) -> None:
    lost, kept = missing_at_start(tmp_path)
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        put_back(tmp_path / "a")
        clock.now += 1
        changes = s.tier.upkeep()
        assert set(changes.found) >= set(lost)
        assert_reads_back(s.tier, kept + changes.found)


def test_an_operator_can_put_an_empty_drive_in_place_of_a_missing_one(tmp_path: Path) -> None:
    _, kept = missing_at_start(tmp_path)
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        (tmp_path / "a" / ADOPT_NAME).touch()
        clock.now += 1
        assert not s.tier.upkeep()
        assert s.tier.state == OK
        assert not (tmp_path / "a" / ADOPT_NAME).exists()
        marker = read_marker(tmp_path / "a")
        assert marker is not None
        assert marker.node_id == NODE
        more = fill(s.tier, range(50, 80))
        assert on_drive(s.tier, more, "a")
    with store(tmp_path, config=drives(tmp_path)) as s:
        assert set(s.tier.recovered_rows()) == {*kept, *more}


def test_a_number_used_meanwhile_on_another_drive_does_not_mix_records_up(tmp_path: Path) -> None:
    """The index is lost while a drive is away, so its numbers are given out again."""
    lost, kept = missing_at_start(tmp_path)
    shutil.rmtree(tmp_path / "rocksdb")
    (tmp_path / "b").rename(tmp_path / "b-aside")
    clock = FakeClock()
    config = drives(tmp_path, "cd")
    with store(tmp_path, config=config) as s:
        more = fill(s.tier, range(100, 120))
        assert {row.segment for row in more} & {row.segment for row in lost}
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a-away").rename(tmp_path / "a")
    with store(tmp_path, clock=clock, config=drives(tmp_path, "cda")) as s:
        rows = s.tier.recovered_rows()
        assert set(more) <= set(rows)
        assert_reads_back(s.tier, rows)
    del kept


def test_a_drive_left_out_of_the_configuration_is_dropped_and_may_return(tmp_path: Path) -> None:
    with store(tmp_path, config=drives(tmp_path, "abc")) as s:
        rows = fill(s.tier, range(1, 60))
        left_out = on_drive(s.tier, rows, "c")
    with store(tmp_path, config=drives(tmp_path, "ab")) as s:
        assert s.tier.state == OK
        assert set(s.tier.recovered_rows()) == set(rows) - set(left_out)
        assert set(s.index.drives()) == {
            marker.drive_id for name in "ab" if (marker := read_marker(tmp_path / name)) is not None
        }
    with store(tmp_path, config=drives(tmp_path, "abc")) as s:
        assert set(s.tier.recovered_rows()) == set(rows)


# -- refusals --------------------------------------------------------------------------------------


def test_no_drive_at_all_is_refused_with_each_reason(tmp_path: Path) -> None:
    missing_at_start(tmp_path)
    take_away(tmp_path / "b")
    with (
        pytest.raises(PreflightError, match=r"no directory of ssd\.paths.*/a: .*/b: "),
        store(tmp_path, config=drives(tmp_path)),
    ):
        pass


def test_another_nodes_drive_the_same_drive_twice_and_a_strange_marker_are_refused(
    tmp_path: Path,
) -> None:
    with store(tmp_path, config=drives(tmp_path)):
        pass
    marker = tmp_path / "a" / MARKER_NAME
    own = marker.read_bytes()

    def refused(match: str) -> None:
        with (
            pytest.raises(PreflightError, match=match),
            store(tmp_path, config=drives(tmp_path)),
        ):
            pass

    marker.write_bytes((tmp_path / "b" / MARKER_NAME).read_bytes())
    refused("same drive")
    marker.write_bytes(json.dumps(json.loads(own) | {"node_id": "other"}).encode())
    refused("belongs to node 'other'")
    marker.write_bytes(json.dumps(json.loads(own) | {"format": 9}).encode())
    refused("format 9")
    for strange in (b"", b"[]", b"{}", b'{"drive_id": "../x", "node_id": "n", "format": 1}'):
        marker.write_bytes(strange)
        refused("not a marker of ours")
    marker.write_bytes(own)
    with store(tmp_path, config=drives(tmp_path)) as s:
        assert s.tier.state == OK


def test_a_drive_in_use_by_another_daemon_is_refused(tmp_path: Path) -> None:
    other = LocalIndex.open(tmp_path / "other", NODE)
    tier = SsdTier.open(drives(tmp_path, "b"), other)
    with pytest.raises(PreflightError, match="in use"), store(tmp_path, config=drives(tmp_path)):
        pass
    tier.close()
    other.close()


def test_path_and_paths_exclude_each_other_and_both_kinds_of_capacity_are_checked(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="not both"):
        SsdSection(path=tmp_path, paths=(tmp_path,), capacity_bytes=1 << 30)
    with pytest.raises(ValueError, match="names a directory twice"):
        SsdSection(paths=(tmp_path, tmp_path), capacity_bytes=1 << 30)
    with pytest.raises(ValueError, match=r"needs ssd\.capacity_bytes"):
        SsdSection(paths=(tmp_path,))
    with pytest.raises(ValueError, match="less than two segments"):
        SsdSection(
            paths=(SsdDriveSection(path=tmp_path, capacity_bytes=5),), capacity_bytes=1 << 30
        )
    assert SsdSection(path=tmp_path).drives == ()
    (only,) = SsdSection(path=tmp_path, capacity_bytes=1 << 30).drives
    assert (only.path, only.capacity_bytes) == (tmp_path, 1 << 30)


# -- wear ------------------------------------------------------------------------------------------


def test_the_wear_counter_goes_on_over_restarts_and_never_says_too_little(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        fill(s.tier, range(1, 30))
        crashed = tmp_path / "crashed"
        shutil.copytree(tmp_path, crashed, ignore=shutil.ignore_patterns("crashed"))
        at_kill = s.tier.written_bytes_total
    total = s.tier.written_bytes_total
    assert total == s.tier.bytes_written
    assert read_wear(tmp_path / "ssd") == total
    with store(tmp_path) as s:
        assert s.tier.written_bytes_total == total
        fill(s.tier, range(30, 33))
        assert s.tier.written_bytes_total == total + s.tier.bytes_written
        assert s.tier.drive_states()[0].written_bytes_total == s.tier.written_bytes_total
    with store(crashed) as s:
        assert at_kill <= s.tier.written_bytes_total <= at_kill + SEGMENT_BYTES
    (tmp_path / "ssd" / "written-bytes").write_bytes(b"many")
    with store(tmp_path) as s:
        assert s.tier.written_bytes_total == 0


def test_what_a_kill_left_of_a_probe_is_removed(tmp_path: Path) -> None:
    with store(tmp_path):
        pass
    left = tmp_path / "ssd" / "probe-4711.tmp"
    left.write_bytes(bytes(10_000))
    with store(tmp_path):
        assert not left.exists()


def test_an_empty_drive_in_place_of_a_worn_one_begins_unworn(tmp_path: Path) -> None:
    clock = FakeClock()
    with store(tmp_path, clock=clock, config=drives(tmp_path)) as s:
        fill(s.tier, range(1, 40))
        worn = s.tier.drive_states()[0].written_bytes_total
        assert worn > 0
        take_away(tmp_path / "a")
        s.tier._drives[0].is_doubted = True
        s.tier.upkeep()
        assert s.tier.drive_states()[0].written_bytes_total >= worn, "it may come back"
        (tmp_path / "a" / ADOPT_NAME).touch()
        clock.now += 60
        s.tier.upkeep()
        assert s.tier.state == OK
        assert s.tier.drive_states()[0].written_bytes_total == 0


def test_what_the_index_knows_of_a_drive_survives_and_strange_entries_are_skipped(
    tmp_path: Path,
) -> None:
    index = LocalIndex.open(tmp_path, NODE)
    known = KnownDrive(tmp_path / "a", has_rows=True)
    index.put_drive("1" * 32, known)
    index.put_drive("2" * 32, KnownDrive(tmp_path / "b", has_rows=False))
    index.forget_drive("2" * 32)
    index._database[b"m/drive/" + b"3" * 32] = b"\x80not json"  # type: ignore[index]
    index._database[b"m/drive/" + b"4" * 32] = b'{"path": 1, "has_rows": true}'  # type: ignore[index]
    index.close()
    index = LocalIndex.open(tmp_path, NODE)
    assert index.drives() == {"1" * 32: known}
    index.close()


def test_files_take_what_is_accounted_and_a_leak_is_noticed(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = fill(s.tier, range(1, 30))
        on_disk = sum(
            path.stat().st_blocks * 512 for path in (tmp_path / "ssd").glob("seg-*.ember")
        )
        assert s.tier.used_bytes == on_disk
        stray = tmp_path / "ssd" / segments.segment_name(77)
        stray.write_bytes(bytes(10))
        with pytest.raises(AssertionError, match="not accounted"):
            s.tier.check_integrity()
        stray.unlink()
        path = s.tier.segment_path(rows[0])
        size = path.stat().st_size
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), size, 1 << 20)
        with pytest.raises(AssertionError, match="accounted are"):
            s.tier.check_integrity()
        os.truncate(path, size)


def test_only_the_newest_damaged_file_is_kept(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = fill(s.tier, range(1, 30))
    for number in (1, 2, 3):
        (tmp_path / "ssd" / segments.segment_name(number)).write_bytes(b"\xa5" * 5000)
    with store(tmp_path) as s:
        (aside,) = (tmp_path / "ssd").glob("*.corrupt")
        assert aside.name == segments.segment_name(3) + ".corrupt"
        assert s.tier.corrupt_segments == 3
        kept = [row for row in rows if row.segment > 3]
        assert set(s.tier.recovered_rows()) == set(kept)


def test_only_the_newest_damaged_database_is_kept(tmp_path: Path) -> None:
    for _ in range(3):
        with store(tmp_path) as s:
            rows = fill(s.tier, range(1, 5))
        for path in (tmp_path / "rocksdb").iterdir():
            path.write_bytes(b"\xa5" * 5000)
    with store(tmp_path) as s:
        assert {row.key for row in s.tier.recovered_rows()} == {row.key for row in rows}
    assert [path.name for path in tmp_path.glob("rocksdb.corrupt-*")] == ["rocksdb.corrupt-3"]
