"""Mapped views of the pool."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from client_sdk import AttachedPool, page_entries
from emberkv_proto.errors import InvalidRequestError, UnavailableError


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def attach(path: Path, pool_bytes: int = 16384, part_bytes: int = 1000) -> AttachedPool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return AttachedPool(descriptor, pool_bytes, part_bytes)
    finally:
        os.close(descriptor)


def test_views_share_the_file_and_outlive_the_pool_object(pool_file: Path) -> None:
    pool = attach(pool_file)
    pool.writable(4096)[:3] = b"abc"
    assert pool_file.read_bytes()[4096:4099] == b"abc"
    view = pool.readable(4096)
    assert view.nbytes == 1000
    assert view.readonly
    del pool
    pool_file.unlink()
    assert bytes(view[:3]) == b"abc"


@pytest.mark.parametrize("offset", [-1, 16384, 16384 - 999, 1 << 63])
def test_view_outside_the_pool_is_refused(pool_file: Path, offset: int) -> None:
    pool = attach(pool_file)
    assert not pool.holds(offset)
    with pytest.raises(InvalidRequestError, match="outside"):
        pool.readable(offset)
    assert pool.holds(16384 - 1000)


def test_pool_file_shorter_than_announced_is_refused(pool_file: Path) -> None:
    with pytest.raises(UnavailableError, match="truncated"):
        attach(pool_file, pool_bytes=16385)
    with pytest.raises(UnavailableError):
        attach(pool_file, part_bytes=0)


def test_prefault_maps_the_whole_pool_and_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_entries, "STEP_BYTES", 1 << 20)
    path = tmp_path / "pool"
    content = os.urandom(5 << 19)
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        pool = AttachedPool(descriptor, len(content), 4096)
    finally:
        os.close(descriptor)
    assert pool.prefault(time.monotonic() - 1.0) == 0
    assert pool.prefault(time.monotonic() + 30.0) == len(content)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert bytes(pool.readable(0)) == content[:4096]
    assert sum(pool.readable(at)[0] for at in range(0, len(content), 4096)) == sum(content[::4096])
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < len(content) // 4096 // 2
