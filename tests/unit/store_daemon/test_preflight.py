from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from emberkv_proto.errors import PreflightError
from store_daemon.config import DramSection
from store_daemon.preflight import (
    check_pool_room,
    check_socket_path,
    check_ssd_room,
    raise_file_limit,
)

MIB = 1 << 20


def free(count: int) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=count // 4096, f_frsize=4096)


def test_a_pool_larger_than_its_file_system_is_refused_with_both_numbers(tmp_path: Path) -> None:
    dram = DramSection(path=tmp_path / "pool", capacity_bytes=8192 * MIB)
    with (
        mock.patch("os.statvfs", return_value=free(64 * MIB)),
        pytest.raises(PreflightError, match=r"has 64 MiB free, dram.capacity_bytes asks 8 GiB"),
    ):
        check_pool_room(dram)


def test_what_the_old_pool_file_holds_counts_as_free(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 5 * MIB)
    dram = DramSection(path=path, capacity_bytes=4 * MIB, extent_bytes=MIB)
    with mock.patch("os.statvfs", return_value=free(0)):
        check_pool_room(dram)


def test_a_missing_pool_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"dram.path.*No such file"):
        check_pool_room(DramSection(path=tmp_path / "no" / "pool"))


def test_an_ssd_capacity_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with (
        mock.patch("os.statvfs", return_value=free(10 * MIB)),
        pytest.raises(PreflightError, match=r"10 MiB free, ssd.capacity_bytes asks 20 MiB"),
    ):
        check_ssd_room(tmp_path / "new" / "ssd", 20 * MIB)


def test_socket_paths_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="the limit is 107"):
        check_socket_path(tmp_path / ("x" * 110))
    with pytest.raises(PreflightError, match="No such file"):
        check_socket_path(tmp_path / "no" / "s")
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r"cannot be used|not writable"):
        check_socket_path(tmp_path / "file" / "s")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PreflightError, match="every user"):
        check_socket_path(shared / "s")
    check_socket_path(tmp_path / "s")


def test_the_soft_file_limit_is_raised_and_a_hopeless_one_refused() -> None:
    with (
        mock.patch("resource.getrlimit", return_value=(1024, 100_000)),
        mock.patch("resource.setrlimit") as raised,
    ):
        raise_file_limit()
    raised.assert_called_once_with(resource.RLIMIT_NOFILE, (4096, 100_000))
    with (
        mock.patch("resource.getrlimit", return_value=(64, 64)),
        pytest.raises(PreflightError, match="may open 64 files"),
    ):
        raise_file_limit()
