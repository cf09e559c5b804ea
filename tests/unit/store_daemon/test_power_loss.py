"""No row points to bytes that a power cut would take: what was not synced is dropped, and read."""

from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.errors import CorruptionError
from store_daemon.local_index import LocalIndex
from store_daemon.tiers.segments import SsdRow
from tests.helpers.faults import making
from tests.helpers.ssd import assert_reads_back, block, crash_copy, read, record, store, stored


class VolatileDisk:
    """What of this process's writes below a directory is not durable yet.

    Bytes become durable with a sync of their file, names of new files with one of their directory.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._bytes: defaultdict[Path, list[range]] = defaultdict(list)
        self._names: set[Path] = set()
        real_open, real_pwritev = os.open, os.pwritev
        syncs = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

        def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
            is_new = bool(flags & os.O_CREAT) and not os.path.exists(path)
            fd = real_open(path, flags, *more, **named)
            if is_new and self._is_ours(Path(path)):
                self._names.add(Path(path))
            return fd

        def pwritev(fd: int, buffers: Sequence[Any], offset: int, *more: Any) -> int:
            count = real_pwritev(fd, buffers, offset, *more)
            if self._is_ours(path := _path_of(fd)):
                self._bytes[path].append(range(offset, offset + count))
            return count

        def sync(name: str, fd: int) -> None:
            syncs[name](fd)
            path = _path_of(fd)
            self._bytes.pop(path, None)
            self._names = {new for new in self._names if new.parent != path}

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "pwritev", pwritev)
        for name in syncs:
            monkeypatch.setattr(os, name, lambda fd, name=name: sync(name, fd))

    def after_power_cut(self, target: Path) -> None:
        """Copy the directory as the drive would have it if the power went now."""
        crash_copy(self._directory, target)
        for path in self._names:
            (target / path.relative_to(self._directory)).unlink(missing_ok=True)
        for path, ranges in self._bytes.items():
            copy = target / path.relative_to(self._directory)
            if copy.exists():
                with copy.open("r+b") as file:
                    for lost in ranges:
                        file.seek(lost.start)
                        file.write(bytes(len(lost)))

    def _is_ours(self, path: Path) -> bool:
        return self._directory / "ssd" in path.parents


def _path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VolatileDisk:
    (tmp_path / "node").mkdir()
    return VolatileDisk(tmp_path / "node", monkeypatch)


def test_power_cuts_right_after_rows_were_put_lose_none_of_what_they_point_to(
    tmp_path: Path, disk: VolatileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_rows, rng, cuts, found = LocalIndex.put_rows, random.Random(3), 0, 0

    def put_and_cut(index: LocalIndex, rows: Sequence[SsdRow]) -> None:
        nonlocal cuts
        put_rows(index, rows)
        if rows:
            cuts += 1
            disk.after_power_cut(tmp_path / f"cut-{cuts}")

    with monkeypatch.context() as patched, store(tmp_path / "node", segments=4) as s:
        patched.setattr(LocalIndex, "put_rows", put_and_cut)
        number = 1
        for _ in range(12):
            batch = [record(number + i, rng.randrange(1, 12_000)) for i in range(rng.randint(1, 3))]
            number += len(batch)
            s.tier.reclaim()
            stored(s.tier.append(batch))
    assert cuts >= 12
    for cut in range(1, cuts + 1):
        with store(tmp_path / f"cut-{cut}", segments=4) as s:
            rows = s.tier.recovered_rows()
            assert_reads_back(s.tier, rows)
            assert (s.tier.rows_dropped, s.tier.corrupt_segments, s.tier.torn_records) == (0, 0, 0)
            found += len(rows)
        shutil.rmtree(tmp_path / f"cut-{cut}")
    assert found > 2 * cuts


def test_a_sync_that_is_left_out_would_be_found(tmp_path: Path, disk: VolatileDisk) -> None:
    with store(tmp_path / "node") as s:
        stored(s.tier.append([record(1)]))
        with making("segment_sync=drop"):
            stored(s.tier.append([record(2)]))
            disk.after_power_cut(tmp_path / "cut")
    with store(tmp_path / "cut") as s:
        rows = {row.block_hash: row for row in s.tier.recovered_rows()}
        assert_reads_back(s.tier, [rows[block(1)]])
        with pytest.raises(CorruptionError):
            read(s.tier, rows[block(2)])
