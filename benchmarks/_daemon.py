"""A store daemon of its own for a benchmark, on temporary files."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from client_sdk import OperatorClient
from emberkv_proto.errors import EmberError

START_SECONDS = 30.0
_NUMBERS = itertools.count()
_PROCESS_CPU_CLOCK = 2
"""As clock_getcpuclockid(3) makes a clock's number of a process id."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A daemon that serves."""

    socket_path: Path
    pid: int
    directory: Path
    """Its own, on the drive of temporary files (TMPDIR); gone when it ends."""

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads; nanoseconds, where /proc counts hundredths of a second."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK)


@contextmanager
def running_daemon(
    dram_bytes: int,
    extent_bytes: int,
    *,
    ssd_bytes: int = 0,
    settings: Mapping[str, object] | None = None,
) -> Iterator[Serving]:
    """Give a serving daemon, without SSD unless asked; end it and its files afterwards."""
    pool = Path("/dev/shm") / f"emberkv-bench-{os.getpid()}-{next(_NUMBERS)}"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="emberkv-bench-") as name:
        directory = Path(name)
        socket_path = directory / "d.sock"
        values = {
            "daemon.socket_path": socket_path,
            "daemon.data_dir": directory / "data",
            "daemon.grpc_port": 0,
            "daemon.metrics_port": 0,
            "daemon.log_level": "warning",
            "dram.path": pool,
            "dram.capacity_bytes": dram_bytes,
            "dram.extent_bytes": extent_bytes,
            "ssd.path": directory / "ssd",
            "ssd.capacity_bytes": ssd_bytes,
            **(settings or {}),
        }
        arguments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        process = subprocess.Popen([sys.executable, "-m", "store_daemon", *arguments])
        try:
            _wait_until_serving(process, socket_path)
            yield Serving(socket_path, process.pid, directory)
        finally:
            process.terminate()
            process.wait(START_SECONDS)
            pool.unlink(missing_ok=True)


def _wait_until_serving(process: subprocess.Popen[bytes], socket_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the daemon ended at start with code {process.returncode}")
        with suppress(EmberError), OperatorClient(socket_path) as operator:
            operator.connect()
            return
        time.sleep(0.02)
    raise SystemExit(f"the daemon did not serve within {START_SECONDS} s")
