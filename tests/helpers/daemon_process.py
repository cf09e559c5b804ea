"""A real store daemon in a process of its own, to be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from client_sdk import OperatorClient
from client_sdk.faults import VARIABLE
from emberkv_proto.errors import EmberError

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 30.0
STOP_SECONDS = 20.0
MIB = 1 << 20


@dataclass
class DaemonProcess:
    """`with DaemonProcess(tmp_path) as daemon:` serves on `daemon.socket_path` inside the block.

    The pool lies under /dev/shm, named after this process; it is removed at the end, and survives
    `kill` and `start` in between.
    """

    directory: Path
    node_id: str = "node-a"
    capacity_bytes: int = 8 * MIB
    extent_bytes: int = 1 * MIB
    ssd_bytes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """More of `section.key`: value."""
    faults: str = ""
    """EMBERKV_FAULTS of the next start."""

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket_path = self.directory / "d.sock"
        self.pool_path = Path(f"/dev/shm/emberkv-test-{os.getpid()}-{self.node_id}-{id(self):x}")
        self.data_dir = self.directory / "data"
        self._log = self.directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-4000:]

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def endpoints(self) -> dict[str, Any]:
        """What the daemon wrote about its addresses."""
        loaded: dict[str, Any] = json.loads((self.data_dir / "endpoints.json").read_text())
        return loaded

    def start(self) -> None:
        """Start and wait until it serves. Raises AssertionError with its log when it does not."""
        assert self._process is None, "started already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "store_daemon", *self._arguments()],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, VARIABLE: self.faults},
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"daemon ended at start:\n{self.log}"
            with contextlib.suppress(EmberError), self.operator() as operator:
                operator.connect()
                return
            time.sleep(0.02)
        raise AssertionError(f"daemon did not serve within {START_SECONDS} s:\n{self.log}")

    def refusal(self) -> str:
        """Start it where it must not start; return the one line with which it ends."""
        done = subprocess.run(
            [sys.executable, "-m", "store_daemon", *self._arguments()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
            env={**os.environ, VARIABLE: self.faults},
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("store_daemon: ")]
        return line

    def operator(self) -> OperatorClient:
        return OperatorClient(self.socket_path, timeout_seconds=2.0)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; return its exit code."""
        return self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> DaemonProcess:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean()

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None, "not started"
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
            raise AssertionError(f"daemon did not end:\n{self.log}") from None

    def _clean(self) -> None:
        if self._process is not None:
            self.kill()
        self.pool_path.unlink(missing_ok=True)

    def _arguments(self) -> list[str]:
        values = {
            "node.id": self.node_id,
            "daemon.socket_path": self.socket_path,
            "daemon.data_dir": self.data_dir,
            "daemon.grpc_port": 0,
            "daemon.metrics_port": 0,
            "daemon.drain_seconds": 5.0,
            "dram.path": self.pool_path,
            "dram.capacity_bytes": self.capacity_bytes,
            "dram.extent_bytes": self.extent_bytes,
            "ssd.path": self.directory / "ssd",
            "ssd.capacity_bytes": self.ssd_bytes,
            "ssd.segment_bytes": MIB,
            **self.settings,
        }
        return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
