"""Append, read, forget, reclaim; and what a full, failing or forbidden drive costs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberkv_proto.errors import CorruptionError, IntegrityError, PreflightError
from store_daemon.config import SsdSection
from store_daemon.local_index import LocalIndex
from store_daemon.tiers import open_segment, segment_file, segments
from store_daemon.tiers.open_segment import SsdRecord
from store_daemon.tiers.segment_file import aligned_memory, read_fully, write_fully
from store_daemon.tiers.ssd import OK, SsdFailure, SsdRow, SsdTier
from tests.helpers.ssd import (
    NODE,
    SEGMENT_BYTES,
    assert_reads_back,
    block,
    payload_of,
    read,
    record,
    section,
    store,
    stored,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_records_of_any_length_read_back_byte_for_byte(tmp_path: Path) -> None:
    lengths = [1, 4095, 4096, 4097, 10000, segments.largest_payload(SEGMENT_BYTES)]
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n, length) for n, length in enumerate(lengths, 1)]))
        assert [row.length for row in rows] == lengths
        assert_reads_back(s.tier, rows)
        assert s.tier.appended_records == len(lengths)
        assert s.tier.payload_bytes_written == sum(lengths)
        assert s.tier.bytes_written <= s.tier.used_bytes


def test_batch_larger_than_a_write_and_a_segment_is_stored_whole(tmp_path: Path) -> None:
    with store(tmp_path, segments=200) as s:
        rows = stored(s.tier.append([record(n, 100) for n in range(1, 601)]))
        assert len({row.segment for row in rows}) > 2
        assert_reads_back(s.tier, rows)


def test_run_is_cut_where_one_vectored_write_ends(tmp_path: Path) -> None:
    config = section(tmp_path, segments=2, segment_bytes=4 << 20)
    index = LocalIndex.open(tmp_path, NODE)
    tier = SsdTier.open(config, index)
    rows = stored(tier.append([record(n, 100) for n in range(1, 301)]))
    assert {row.segment for row in rows} == {1}
    assert_reads_back(tier, rows)
    tier.check_integrity()
    tier.close()
    index.close()


def test_rows_and_bytes_survive_closing(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 31)]))
    with store(tmp_path) as s:
        assert sorted(s.tier.recovered_rows(), key=lambda row: row.block_hash) == rows
        assert_reads_back(s.tier, rows)
        assert (s.tier.corrupt_segments, s.tier.torn_records, s.tier.rows_dropped) == (0, 0, 0)


def test_sealed_files_are_cut_to_what_they_hold(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        stored(s.tier.append([record(1, 100)]))
    with store(tmp_path) as s:
        wanted = segments.PAGE_BYTES + segments.record_bytes(100) + segments.footer_bytes(1)
        assert s.tier.used_bytes == wanted


def test_part_written_again_has_one_row_the_newer(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        first = stored(s.tier.append([record(1)]))[0]
        second = stored(s.tier.append([record(1, 7000)]))[0]
        assert s.tier.recovered_rows() == [second]
        s.tier.forget([first])
        assert s.tier.recovered_rows() == [second]
        assert_reads_back(s.tier, [first, second])
    with store(tmp_path) as s:
        assert s.tier.recovered_rows() == [second]


def test_duplicates_in_a_batch_are_one_record_and_the_rest_is_stored(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(1), record(2), record(1), record(3)]))
        assert rows[0] == rows[2]
        assert len(s.tier.recovered_rows()) == 3
        assert s.tier.appended_records == 3


def test_parts_of_one_block_are_different_records(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(1, 100), record(1, 200, part=1)]))
        assert [(row.part, row.length) for row in rows] == [(0, 100), (1, 200)]


def test_forgotten_rows_stay_forgotten_after_a_restart(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 21)]))
        s.tier.forget(rows[::2])
        s.tier.forget(rows[:4])
    with store(tmp_path) as s:
        assert set(s.tier.recovered_rows()) == set(rows[5::2])


def test_rows_forgotten_while_their_segment_gets_its_footer_stay_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of Redis clients are forgotten from another thread than the one that writes."""
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 5)]))
        seal = open_segment.seal_segment

        def seal_and_forget(fd: int, number: int, footer: Sequence[SsdRow], end: int) -> int:
            assert rows[1] in footer
            size = seal(fd, number, footer, end)
            s.tier.forget(rows[1:3])
            return size

        monkeypatch.setattr(open_segment, "seal_segment", seal_and_forget)
        s.tier._writer.seal_open()
        monkeypatch.undo()
        s.tier.check_integrity()
    with store(tmp_path) as s:
        assert s.tier.recovered_rows() == [rows[0], rows[3]]


def unaligned(number: int) -> SsdRecord:
    memory = aligned_memory(8192)[1:4097]
    return dataclasses.replace(record(number, 4096), payload=memory)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record(9, segments.largest_payload(SEGMENT_BYTES) + 1), "does not fit in a segment"),
        (dataclasses.replace(record(9), length=0), "payload of"),
        (dataclasses.replace(record(9), length=-5), "payload of"),
        (dataclasses.replace(record(9), length=9000), "payload of"),
        (dataclasses.replace(record(9), block_hash=b"short"), "not of its size"),
        (dataclasses.replace(record(9), part=-1), "not of its size"),
        (dataclasses.replace(record(9), checksum=1 << 64), "not of its size"),
        (dataclasses.replace(record(9), parent=bytes(32)), "not of its size"),
        (unaligned(9), "boundary"),
    ],
)
def test_record_that_cannot_be_stored_fails_alone(
    tmp_path: Path, bad: SsdRecord, reason: str
) -> None:
    with store(tmp_path) as s:
        first, failed, second = s.tier.append([record(1), bad, record(2)])
        assert isinstance(failed, SsdFailure)
        assert reason in failed.reason
        assert_reads_back(s.tier, stored([first, second]))
        assert s.tier.state == OK


def test_read_of_changed_bytes_is_an_error_wherever_they_changed(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        row = stored(s.tier.append([record(1, 5000)]))[0]
        path = tmp_path / "ssd" / segments.segment_name(row.segment)
        whole = path.read_bytes()
        target = aligned_memory(8192)
        for at in (0, 20, 60, 100, 4096, 4096 + 4999):
            with path.open("r+b") as file:
                file.seek(row.offset + at)
                file.write(bytes([whole[row.offset + at] ^ 1]))
                file.flush()
                with pytest.raises(CorruptionError):
                    s.tier.read_into(row, target)
                file.seek(row.offset + at)
                file.write(whole[row.offset + at : row.offset + at + 1])
        assert_reads_back(s.tier, [row])
        assert s.tier.failed_reads == 6


def test_read_with_another_rows_identity_is_an_error(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        row, other = stored(s.tier.append([record(1), record(2)]))
        lies = [
            row._replace(offset=other.offset),
            row._replace(block_hash=block(2)),
            row._replace(parent=block(5)),
            row._replace(checksum=row.checksum ^ 1),
            row._replace(length=row.length - 1),
        ]
        for lie in lies:
            with pytest.raises(CorruptionError):
                read(s.tier, lie)


def test_read_of_a_missing_or_cut_segment_is_an_os_error(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        row = stored(s.tier.append([record(1)]))[0]
        with pytest.raises(FileNotFoundError):
            read(s.tier, row._replace(segment=77, checksum=row.checksum ^ 1))
        with pytest.raises(OSError, match="file ends"):
            read(s.tier, row._replace(offset=SEGMENT_BYTES))


@pytest.mark.parametrize("target", [aligned_memory(4096), memoryview(bytes(8192))])
def test_read_refuses_a_target_it_would_overrun_or_cannot_write(
    tmp_path: Path, target: memoryview
) -> None:
    with store(tmp_path) as s:
        row = stored(s.tier.append([record(1, 5000)]))[0]
        with pytest.raises(IntegrityError):
            s.tier.read_into(row, target)


def test_bytes_behind_the_record_in_the_target_are_not_touched(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        row = stored(s.tier.append([record(1, 5000)]))[0]
        target = aligned_memory(16384)
        target[:] = b"\xee" * 16384
        s.tier.read_into(row, target)
        assert bytes(target[:5000]) == payload_of(1, 5000)
        assert bytes(target[8192:]) == b"\xee" * 8192


def test_reclaim_removes_the_oldest_segments_and_only_when_room_is_short(tmp_path: Path) -> None:
    with store(tmp_path, segments=4) as s:
        rows = []
        gone = []
        for number in range(1, 101):
            gone += s.tier.reclaim().gone
            assert s.tier.used_bytes <= 3 * SEGMENT_BYTES
            rows += stored(s.tier.append([record(number)]))
            assert s.tier.used_bytes <= 4 * SEGMENT_BYTES
        assert gone == rows[: len(gone)]
        assert set(s.tier.recovered_rows()) == set(rows[len(gone) :])
        assert 10 < len(rows) - len(gone) < 25
        assert_reads_back(s.tier, rows[len(gone) :])
        with pytest.raises(FileNotFoundError):
            read(s.tier, gone[-1])
        assert not s.tier.reclaim()
    with store(tmp_path, segments=4) as s:
        assert set(s.tier.recovered_rows()) == set(rows[len(gone) :])


def test_part_written_again_survives_reclaim_of_its_old_segment(tmp_path: Path) -> None:
    with store(tmp_path, segments=2) as s:
        rows = stored(s.tier.append([record(n, 15000) for n in (1, 2)]))
        again = stored(s.tier.append([record(n, 15000) for n in (3, 1)]))
        assert again[1].segment != rows[0].segment
        assert s.tier.reclaim().gone == [rows[1]]
        assert_reads_back(s.tier, again)
        assert set(s.tier.recovered_rows()) == set(again)


def test_append_without_reclaim_fails_when_the_capacity_is_used(tmp_path: Path) -> None:
    with store(tmp_path, segments=2) as s:
        results = s.tier.append([record(n) for n in range(1, 21)])
        rows = [result for result in results if not isinstance(result, SsdFailure)]
        failure = results[-1]
        assert isinstance(failure, SsdFailure)
        assert "full" in failure.reason
        assert s.tier.state == OK
        assert s.tier.failed_records == 20 - len(rows)
        s.tier.reclaim()
        assert_reads_back(s.tier, stored(s.tier.append([record(20)])))


def test_read_under_way_finishes_though_its_segment_is_reclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with store(tmp_path, segments=2) as s:
        rows = stored(s.tier.append([record(n) for n in range(1, 8)]))

        def reclaim_first(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "preadv", real)
            assert rows[0] in s.tier.reclaim().gone
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", reclaim_first)
        assert read(s.tier, rows[0]) == payload_of(1, 5000)


def test_readers_see_right_bytes_or_a_miss_while_the_tier_turns_over(tmp_path: Path) -> None:
    with store(tmp_path, segments=6) as s:
        live = {row.key: row for row in stored(s.tier.append([record(n) for n in range(1, 5)]))}
        stop = threading.Event()
        counts = {"read": 0, "missed": 0}

        def reads(seed: int) -> None:
            while not stop.is_set():
                for row in list(live.values()):
                    number = int.from_bytes(row.block_hash, "big")
                    try:
                        assert read(s.tier, row) == payload_of(number, row.length)
                        counts["read"] += 1
                    except FileNotFoundError:
                        counts["missed"] += 1

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(reads, seed) for seed in range(3)]
            try:
                for number in range(5, 150):
                    changes = s.tier.reclaim()
                    for row in changes.gone:
                        live.pop(row.key, None)
                    for moved in changes.moved:
                        live[moved.new.key] = moved.new
                    for row in stored(s.tier.append([record(number)])):
                        live[row.key] = row
            finally:
                stop.set()
            for reader in readers:
                reader.result(timeout=90)
        assert counts["read"] > 100


def test_second_writer_at_the_same_time_is_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync
    with store(tmp_path) as s:

        def append_inside(fd: int) -> None:
            with pytest.raises(IntegrityError, match="two writers"):
                s.tier.append([record(2)])
            real(fd)

        monkeypatch.setattr(os, "fdatasync", append_inside)
        assert_reads_back(s.tier, stored(s.tier.append([record(1)])))


def test_row_is_put_only_after_the_payload_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store(tmp_path) as s:
        stored(s.tier.append([record(1)]))
        calls: list[str] = []

        def noted(name: str, real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                result = real(*arguments)
                calls.append(name)
                return result

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", noted("written", os.pwritev))
            patch.setattr(os, "fdatasync", noted("durable", os.fdatasync))
            patch.setattr(s.index, "put_rows", noted("row", s.index.put_rows))
            stored(s.tier.append([record(2)]))
        assert calls == ["written", "durable", "row"]


# -- failing drives --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "posix_fallocate", "ftruncate", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_call_is_a_failure_and_no_half_row_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    clock = Clock()
    with store(tmp_path, clock=clock) as s:
        before = stored(s.tier.append([record(n) for n in range(1, 6)]))

        def fail(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            results = s.tier.append([record(n) for n in range(6, 40)])
            assert isinstance(results[-1], SsdFailure)
            assert os.strerror(code) in results[-1].reason
            assert s.tier.state.startswith("degraded: ")
        early = s.tier.append([record(40)])[0]
        assert isinstance(early, SsdFailure), "the drive is left alone for a while"
        during = [row for row in results if not isinstance(row, SsdFailure)]
        s.tier.check_integrity()

        clock.now += 1.0
        after = stored(s.tier.append([record(n) for n in range(6, 40)]))
        assert s.tier.state == OK
        assert_reads_back(s.tier, before + during + after)
    with store(tmp_path) as s:
        assert set(s.tier.recovered_rows()) == {*before, *after}
        assert_reads_back(s.tier, before + after)


def test_pause_doubles_up_to_half_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with store(tmp_path, clock=clock) as s, monkeypatch.context() as patch:
        tries = []

        def fail(*_: object) -> None:
            tries.append(clock.now)
            raise OSError(errno.EIO, "broken")

        patch.setattr(os, "posix_fallocate", fail)
        for _ in range(1200):
            s.tier.append([record(1)])
            clock.now += 0.125
        pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
        assert s.tier.used_bytes == 0
        assert {p.name for p in (tmp_path / "ssd").iterdir()} == {
            "drive.json",
            "lock",
            "written-bytes",
        }


def test_local_index_that_cannot_write_is_a_failure_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with store(tmp_path, clock=clock) as s:
        before = stored(s.tier.append([record(1), record(2)]))

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "no index")

        with monkeypatch.context() as patch:
            patch.setattr(s.index, "put_rows", fail)
            patch.setattr(s.index, "forget_rows", fail)
            assert isinstance(s.tier.append([record(3)])[0], SsdFailure)
            s.tier.forget(before[:1])
            s.tier.check_integrity()
        clock.now += 1
        after = stored(s.tier.append([record(3)]))
        assert set(s.tier.recovered_rows()) == {before[1], *after}
    with store(tmp_path) as s:
        assert set(s.tier.recovered_rows()) == {before[1], *after}


@contextlib.contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_full_drive_fails_appends_keeps_what_it_has_and_recovers(tmp_path: Path) -> None:
    clock = Clock()
    with small_file_system(tmp_path / "drive", "1m") as drive:
        index = LocalIndex.open(tmp_path / "data", NODE)
        config = SsdSection(
            path=drive / "ssd",
            capacity_bytes=14 * SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            direct_io=False,
        )
        tier = SsdTier.open(config, index, clock)
        rows = stored(tier.append([record(n) for n in range(1, 6)]))
        filler = drive / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        results = tier.append([record(n) for n in range(6, 40)])
        rows += [row for row in results if not isinstance(row, SsdFailure)]
        assert isinstance(results[-1], SsdFailure)
        assert "No space left" in results[-1].reason
        tier.check_integrity()
        assert_reads_back(tier, rows)

        filler.unlink()
        clock.now += 1
        rows += stored(tier.append([record(n) for n in range(40, 45)]))
        assert tier.state == OK
        tier.check_integrity()
        tier.close()
        tier = SsdTier.open(config, index)
        assert set(tier.recovered_rows()) == set(rows)
        assert_reads_back(tier, rows)
        tier.close()
        index.close()


def test_full_drive_under_the_local_index_fails_appends_and_recovers(tmp_path: Path) -> None:
    clock = Clock()
    with small_file_system(tmp_path / "drive", "2m") as drive:
        index = LocalIndex.open(drive / "data", NODE)
        tier = SsdTier.open(section(tmp_path), index, clock)
        rows = stored(tier.append([record(n, 100) for n in range(1, 6)]))
        filler = drive / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        failed = False
        for number in range(6, 60):
            for result in tier.append([record(number, 100)]):
                failed |= isinstance(result, SsdFailure)
                if not isinstance(result, SsdFailure):
                    rows.append(result)
            clock.now += 60
        assert failed
        filler.unlink()
        clock.now += 60
        rows += stored(tier.append([record(60, 100)]))
        tier.check_integrity()
        assert set(tier.recovered_rows()) == set(rows)
        assert_reads_back(tier, rows)
        tier.close()
        index.close()
        index = LocalIndex.open(drive / "data", NODE)
        tier = SsdTier.open(section(tmp_path), index)
        assert set(rows) == set(tier.recovered_rows())
        tier.close()
        index.close()


# -- preflight -------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    index = LocalIndex.open(tmp_path / "data", NODE)
    yield index
    index.close()


def test_capacity_above_the_file_system_is_refused_with_the_numbers(
    tmp_path: Path, index: LocalIndex
) -> None:
    total = shutil.disk_usage(tmp_path).total
    config = SsdSection(path=tmp_path / "ssd", capacity_bytes=2 * total)
    with pytest.raises(PreflightError, match=rf"{2 * total}.*{total} bytes"):
        SsdTier.open(config, index)


def test_file_system_without_direct_io_is_refused_with_the_fix(
    tmp_path: Path, index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PreflightError, match=r"ssd\.direct_io to false"):
        SsdTier.open(section(tmp_path), index)
    buffered = section(tmp_path).model_copy(update={"direct_io": False})
    tier = SsdTier.open(buffered, index)
    assert_reads_back(tier, stored(tier.append([record(1)])))
    tier.close()


def test_directory_in_use_is_refused_whatever_the_data_dir(
    tmp_path: Path, index: LocalIndex
) -> None:
    other = LocalIndex.open(tmp_path / "other", NODE)
    tier = SsdTier.open(section(tmp_path), index)
    with pytest.raises(PreflightError, match=r"in use by the daemon.*ssd\.path"):
        SsdTier.open(section(tmp_path), other)
    tier.close()
    SsdTier.open(section(tmp_path), other).close()
    other.close()


def test_path_that_is_a_file_and_a_tier_turned_off_are_refused(
    tmp_path: Path, index: LocalIndex
) -> None:
    (tmp_path / "ssd").write_bytes(b"")
    with pytest.raises(PreflightError, match=r"ssd\.path"):
        SsdTier.open(section(tmp_path), index)
    with pytest.raises(PreflightError, match="turned off"):
        SsdTier.open(SsdSection(path=tmp_path / "x"), index)


# -- vectored I/O ----------------------------------------------------------------------------------


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = payload_of(1, 3 * 4096)
    real_write, real_read = os.pwritev, os.preadv

    def short(buffers: Sequence[memoryview]) -> list[memoryview]:
        return [buffers[0][:1000]]

    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: real_write(fd, short(b), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: real_read(fd, short(b), at))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    view = memoryview(bytearray(content))
    write_fully(fd, [view[:4096], view[4096:5000], view[5000:]], 0)
    got = memoryview(bytearray(len(content)))
    read_fully(fd, [got[:4096], got[4096:6000], got[6000:]], 0)
    assert got == view
    with pytest.raises(OSError, match="file ends"):
        read_fully(fd, [got], 4096)
    os.close(fd)


def test_segment_that_cannot_be_created_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="full"):
        segment_file.create_segment(tmp_path / "seg", 1, SEGMENT_BYTES, True)
    assert list(tmp_path.iterdir()) == []
