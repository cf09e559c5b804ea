"""`python -m store_daemon` as its users start and end it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from client_sdk.sync_client import SyncClient
from emberkv_proto import __version__
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import AcquirePolicy
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.store import chain, payload, small_namespace

pytestmark = pytest.mark.process
NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 40)


def command(directory: Path, *more: str) -> list[str]:
    values = {
        "node.id": "node-1",
        "daemon.socket_path": directory / "s",
        "daemon.data_dir": directory / "data",
        "daemon.grpc_port": 0,
        "daemon.metrics_port": 0,
        "dram.path": directory / "pool",
        "dram.capacity_bytes": 1 << 20,
        "dram.extent_bytes": 1 << 16,
        "ssd.path": directory / "ssd",
        "ssd.capacity_bytes": 1 << 20,
        "ssd.segment_bytes": 1 << 16,
        "ssd.direct_io": False,
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "store_daemon", *sets, *more]


@contextmanager
def daemon(directory: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(directory), stderr=subprocess.PIPE, text=True)
    try:
        endpoints = directory / "data" / "endpoints.json"
        deadline = time.monotonic() + 120
        while not (endpoints.exists() and f'"pid": {process.pid}' in endpoints.read_text()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=90)


def test_sigterm_ends_it_cleanly_and_kill_9_loses_nothing_committed(tmp_path: Path) -> None:
    with daemon(tmp_path) as process:
        client = SyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        with client.stage(HASHES) as staged:
            for number in staged.granted:
                staged.view(number)[:] = payload(HASHES[number], 0, 5000)
            assert staged.commit() == 40
        unfinished = client.stage(chain(NAMESPACE, 5, seed=1))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        unfinished.abort()
        client.close()
    with daemon(tmp_path) as process:
        client = SyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
        assert client.probe(chain(NAMESPACE, 5, seed=1)).hit_blocks == 0
        with client.acquire(
            HASHES, policy=AcquirePolicy.WAIT_COMPLETE, deadline_seconds=10
        ) as lease:
            assert lease.wait(40, 10) == 40
            for number in range(40):
                assert bytes(lease.view(number)) == payload(HASHES[number], 0, 5000)
        client.close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=90)
        assert process.returncode == 0, log
        assert "serving node=node-1" in log
        assert "blocks dram=40" in log
        assert "Traceback" not in log
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--set", "dram.capasity_bytes=1"), "did you mean 'capacity_bytes'"),
        (("--set", "nonsense"), "wanted section.key=value"),
        (("--config", "/no/such/file"), "cannot be read"),
        (
            ("--set", "dram.capacity_bytes=900000000000000"),
            "lower dram.capacity_bytes or add memory",
        ),
        (("--set", f"daemon.socket_path=/tmp/{'x' * 120}"), "choose a shorter path"),
        (("--set", "daemon.socket_path=/no/such/dir/s"), "create it or set another path"),
    ],
    ids=["unknown key", "no value", "no file", "pool too large", "long path", "no directory"],
)
def test_a_user_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], wanted: str
) -> None:
    done = subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 2
    assert wanted in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_tells_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "store_daemon", "--version"],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert done.stdout.strip() == f"emberkv {__version__}"


def test_faults_that_are_written_wrong_keep_it_from_starting(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, faults="segment_write=fail:ENOSPC@3,nowhere=exit")
    line = daemon.refusal()
    assert "unknown point 'nowhere'; known: before_ack, before_commit, " in line


def test_faults_that_are_made_are_announced_and_counted(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, faults="before_commit=fail@2") as daemon:
        assert "FAULTS ARE MADE ON PURPOSE" in daemon.log
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            for number, block_hash in enumerate(HASHES[:3]):
                with client.stage([block_hash]) as write:
                    write.view(0)[:] = payload(block_hash, 0, NAMESPACE.part_bytes(0))
                    if number == 1:
                        with pytest.raises(UnavailableError, match="fault before_commit"):
                            write.commit()
                    else:
                        write.commit()
            assert [client.probe([h]).hit_blocks for h in HASHES[:3]] == [1, 0, 1]
        with daemon.operator() as operator:
            assert operator.status().counters["fault_before_commit"] == 1
        with urlopen(f"http://{daemon.endpoints['metrics_address']}/metrics", timeout=90) as page:
            assert b'emberkv_store_faults_made_total{point="before_commit"} 1.0' in page.read()
