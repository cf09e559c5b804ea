"""Pools on real file systems: hugetlbfs, tmpfs with huge pages, one that is full, a slow start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_sdk import SyncClient
from client_sdk.faults import VARIABLE
from emberkv_proto.errors import PreflightError
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import Incarnation
from store_daemon.config import DramSection
from store_daemon.preflight import check_pool_room
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.pool_pages import huge_page_stock
from store_daemon.tiers.populate import Watch
from tests.helpers.daemon_process import MIB, ROOT, DaemonProcess
from tests.helpers.mounts import huge_pages, mounted
from tests.helpers.ports import free_port

pytestmark = pytest.mark.process

NAMESPACE = Namespace("m", "w", "float32", "f", 16, (Group(GroupKind.FULL, 1, 65536),))
HASHES = block_hashes(NAMESPACE.id, list(range(16 * 8)), 16)
PATIENCE_SECONDS = 60.0


def dram(path: Path, **more: object) -> DramSection:
    return DramSection(
        path=path,
        capacity_bytes=8 * MIB,
        extent_bytes=MIB,
        **more,  # type: ignore[arg-type]
    )


def open_pool(config: DramSection, watch: Watch | None = None) -> Pool:
    return Pool.open(config, "node", Incarnation(1), lambda size: True, bytes(16), watch or Watch())


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    with mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge") as directory:
        yield directory


def test_a_daemon_serves_from_hugetlbfs_and_recovers_there(hugetlbfs: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "daemon")
    daemon.pool_path = hugetlbfs / "pool"
    with huge_pages(6), daemon:
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            with client.stage(HASHES) as staged:
                for number in staged.granted:
                    staged.view(number)[:] = HASHES[number] * 2048
                assert staged.commit() == len(HASHES)
            assert client.status().counters["dram_huge_bytes"] == 10 * MIB
        daemon.kill()
        daemon.start()
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            with client.acquire(HASHES) as lease:
                assert lease.wait(len(HASHES), PATIENCE_SECONDS) == len(HASHES)
                for number, block_hash in enumerate(HASHES):
                    lease.verify(number)
                    assert bytes(lease.view(number)) == block_hash * 2048
            assert client.status().counters["dram_huge_bytes"] == 10 * MIB


def larger_than_the_stock(path: Path) -> DramSection:
    """A pool for which three huge pages are lacking."""
    available = huge_page_stock(2 * MIB).available
    return DramSection(
        path=path, capacity_bytes=(available + 2) * 2 * MIB, extent_bytes=MIB, populate=False
    )


def test_too_few_huge_pages_are_found_before_anything_is_touched(hugetlbfs: Path) -> None:
    with huge_pages(2):
        config = larger_than_the_stock(hugetlbfs / "pool")
        with pytest.raises(PreflightError, match=r"the pool needs \d+; set vm.nr_hugepages to"):
            check_pool_room(config)
        with pytest.raises(PreflightError, match=r"cannot be mapped.*raise vm.nr_hugepages"):
            open_pool(config)
        assert (hugetlbfs / "pool").stat().st_size == 0


def test_what_the_error_asks_for_is_enough(hugetlbfs: Path) -> None:
    config = larger_than_the_stock(hugetlbfs / "pool")
    with pytest.raises(PreflightError) as refusal:
        check_pool_room(config)
    wanted = re.search(r"nr_hugepages to (\d+)", str(refusal.value))
    assert wanted is not None
    with huge_pages(int(wanted[1]) - huge_page_stock(2 * MIB).total):
        check_pool_room(config)
        pool = open_pool(config)
        assert pool.size_bytes == pool.huge_bytes == config.capacity_bytes + 2 * MIB
        pool.close()
        check_pool_room(config)  # what it holds is not asked for again
        (hugetlbfs / "pool").unlink()


def test_tmpfs_with_huge_pages_gives_them(tmp_path: Path) -> None:
    with mounted("tmpfs", "huge=always,size=64m", tmp_path / "shm") as directory:
        config = dram(directory / "pool", huge_pages="required")
        check_pool_room(config)
        pool = open_pool(config)
        assert pool.huge_bytes is not None
        assert pool.huge_bytes >= 0.9 * 8 * MIB
        pool.close()


def test_tmpfs_that_gives_huge_pages_on_advice_is_advised(tmp_path: Path) -> None:
    with mounted("tmpfs", "huge=advise,size=64m", tmp_path / "shm") as directory:
        found = {}
        for setting in ("auto", "advise", "off"):
            pool = open_pool(dram(directory / setting, huge_pages=setting))
            found[setting] = pool.huge_bytes or 0
            pool.close()
    assert found["off"] == 0
    assert min(found["auto"], found["advise"]) >= 0.9 * 8 * MIB


def test_required_huge_pages_that_cannot_be_had_are_an_error(tmp_path: Path) -> None:
    with mounted("tmpfs", "huge=never,size=64m", tmp_path / "shm") as directory:
        config = dram(directory / "pool", huge_pages="required")
        with pytest.raises(PreflightError, match=r"remount,huge=within_size"):
            check_pool_room(config)
        with pytest.raises(PreflightError, match=r"only 0 of 8 MiB of the pool"):
            open_pool(config)
        assert (directory / "pool").stat().st_size == 0
        pool = open_pool(dram(directory / "pool"))
        assert pool.huge_bytes == 0
        pool.close()


def test_a_full_tmpfs_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=5m", tmp_path / "shm") as directory:
        with pytest.raises(PreflightError, match=r"5 MiB free"):
            check_pool_room(dram(directory / "pool"))
        with pytest.raises(PreflightError, match=r"memory ran out after 4 MiB of the 8 MiB pool"):
            open_pool(dram(directory / "pool"))
        assert (directory / "pool").stat().st_blocks == 0


def start_slowly(daemon: DaemonProcess, port: int) -> subprocess.Popen[bytes]:
    """A daemon that needs a second for each step of its pool."""
    daemon.settings["daemon.metrics_port"] = port
    return subprocess.Popen(
        daemon._command(),
        cwd=ROOT,
        env={**os.environ, VARIABLE: "populate=delay:1.0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_until_populating(port: int) -> str:
    """What /ready says while the pool is being populated."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=90).close()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode()
            if "populating" in said:
                return said
        except OSError:
            pass  # not listening yet
        time.sleep(0.05)
    raise AssertionError("it never said that it populates")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_long_start_says_how_far_it_is_and_can_be_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    daemon = DaemonProcess(tmp_path, capacity_bytes=64 * MIB)
    port = free_port()
    process = start_slowly(daemon, port)
    try:
        said = wait_until_populating(port)
        assert re.search(r"populating the pool: \d+ % \(\d+ of 64 MiB, \d+\.\d GB/s\)", said)
        began = time.monotonic()
        process.send_signal(number)
        _, log = process.communicate(timeout=PATIENCE_SECONDS)
        assert time.monotonic() - began < PATIENCE_SECONDS
        if number is signal.SIGTERM:
            assert process.returncode == 0, log.decode()
            assert daemon.pool_path.stat().st_blocks == 0
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
        if process.stderr is not None:
            process.stderr.close()
    with (  # what the ended one left is replaced
        daemon,
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
        client.stage(HASHES) as staged,
    ):
        assert staged.commit() == len(HASHES)
