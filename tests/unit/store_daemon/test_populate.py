from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from emberkv_proto.errors import PreflightError
from emberkv_proto.types import Incarnation
from store_daemon.config import DramSection
from store_daemon.tiers import populate as populating
from store_daemon.tiers.memory_calls import address_of
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.populate import (
    PopulateStoppedError,
    Progress,
    Watch,
    populate,
    step_bytes,
)

MIB = 1 << 20
GIB = 1 << 30
SIZE = 9 * MIB


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "pool", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def run(fd: int, watch: Watch) -> None:
    with mmap.mmap(fd, SIZE) as mapping, address_of(mapping) as address:
        populate(fd, address, SIZE, 4096, watch)


def held_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_every_page_is_there_afterwards(
    file: int, is_old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old_kernel:
        monkeypatch.setattr(populating, "MADV_POPULATE_WRITE", 9999)  # EINVAL, as before 5.14
    reports: list[Progress] = []
    run(file, Watch(report=reports.append))
    assert held_bytes(file) >= SIZE
    assert [report.done_bytes for report in reports] == [SIZE], "one at the end, none in between"


def test_progress_is_told_now_and_then(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "REPORT_SECONDS", 0.0)
    reports: list[Progress] = []
    run(file, Watch(report=reports.append))
    assert [report.done_bytes // MIB for report in reports] == [2, 4, 6, 8, 9]
    assert str(Progress(3 * GIB, 12 * GIB, 2.0)) == (
        "populating the pool: 25 % (3072 of 12288 MiB, 1.6 GB/s)"
    )


def test_it_stops_between_two_steps(file: int) -> None:
    asked = iter([False, False, True])
    with pytest.raises(PopulateStoppedError):
        run(file, Watch(should_stop=lambda: next(asked)))
    assert held_bytes(file) < SIZE


@pytest.mark.parametrize(
    ("total", "page", "step"),
    [
        (MIB, 4096, 2 * MIB),
        (GIB, 4096, 16 * MIB),
        (1024 * GIB, 4096, 256 * MIB),
        (1024 * GIB, GIB, GIB),
        (10 * MIB, 2 * MIB, 2 * MIB),
    ],
)
def test_steps_are_whole_pages_and_bounded(total: int, page: int, step: int) -> None:
    assert step_bytes(total, page) == step


def open_pool(path: Path, watch: Watch) -> Pool:
    config = DramSection(path=path, capacity_bytes=8 * MIB, extent_bytes=MIB)
    return Pool.open(config, "n", Incarnation(1), lambda size: True, bytes(16), watch)


def test_a_pool_whose_start_was_stopped_is_begun_anew(tmp_path: Path) -> None:
    asked = iter([False, True])
    with pytest.raises(PopulateStoppedError):
        open_pool(tmp_path / "pool", Watch(should_stop=lambda: next(asked)))
    assert (tmp_path / "pool").stat().st_blocks == 0, "its pages are given back"
    pool = open_pool(tmp_path / "pool", Watch())
    assert not pool.is_recovered
    pool.close()


def test_memory_that_runs_out_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    with (
        mock.patch.object(populating, "advise", side_effect=OSError(14, "Bad address")),
        pytest.raises(PreflightError, match=r"after 0 MiB of the 8 MiB.*lower dram.capacity"),
    ):
        open_pool(tmp_path / "pool", Watch())
    assert (tmp_path / "pool").stat().st_size == 0
    open_pool(tmp_path / "pool", Watch()).close()
