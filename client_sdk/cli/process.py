"""One server process of a local cluster: started, waited for, killed, ended, never forgotten.

States: new -> running -> exited, and running again after `spawn`. All methods are called from the
thread that owns the cluster's event loop, and that thread must outlive the processes: the kernel
ties them to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberkv_proto.errors import UnavailableError

POLL_SECONDS = 0.05
LOG_TAIL_LINES = 15
ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How one process is started, and how it is seen that it serves."""

    name: str
    module: str
    arguments: tuple[str, ...]
    endpoint_file: Path
    """Written by it once it serves: JSON with its pid. Not by one that has a `health_url`."""
    log_file: Path
    ready_seconds: float = 120.0
    environment: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable
    """Of the environment that has the module."""
    health_url: str = ""
    """Answers 200 once it serves, of a server that is not ours and writes no file."""


class ServerProcess:
    """A process made from a spec, as often as it is killed and started again."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.starts = 0
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None while there is none."""
        return self._popen.pid if self._popen is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def spawn(self) -> None:
        """Start it. An endpoint file of an earlier life is removed first."""
        if self.is_running:
            raise RuntimeError(f"{self.spec.name} is running already")
        self.spec.endpoint_file.unlink(missing_ok=True)
        command = [self.spec.python, "-m", "client_sdk.cli.child", str(os.getpid())]
        with self.spec.log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                [*command, self.spec.module, *self.spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.spec.log_file.parent,  # so that no folder of the user's shadows a package
                start_new_session=True,  # Ctrl-C reaches the launcher, which ends them in order
                env={**os.environ, **dict(self.spec.environment)},
            )
        self.starts += 1

    async def wait_ready(self) -> dict[str, Any]:
        """Return what the process wrote about its endpoints.

        Raises:
            UnavailableError: it exited, or did not serve in time; shows the end of its log.
        """
        deadline = time.monotonic() + self.spec.ready_seconds
        while True:
            endpoints = (
                await asyncio.to_thread(self._ask_health)
                if self.spec.health_url
                else self._read_endpoints()
            )
            if endpoints is not None:
                return endpoints
            if not self.is_running:
                code = self._popen.returncode if self._popen is not None else "none"
                raise UnavailableError(
                    f"{self.spec.name} exited with status {code} at start\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self.spec.name} did not serve within {self.spec.ready_seconds:.0f} s"
                    f"\n{self.log_tail()}"
                )
            await asyncio.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """kill -9 of it and of its children, and wait until the kernel has taken it away."""
        if self._popen is not None and self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(timeout=10)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); returns at once."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)

    async def ended(self, deadline: float) -> bool:
        """Whether it has exited by `deadline` (monotonic)."""
        while self.is_running:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def log_tail(self) -> str:
        """The last lines of its log, or why there are none."""
        try:
            text = self.spec.log_file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        lines = text.splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- last lines of {self.spec.log_file.name}", *lines])

    def _ask_health(self) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(self.spec.health_url, timeout=ASK_SECONDS):  # noqa: S310
                return {"pid": self.pid, "url": self.spec.health_url.rpartition("/")[0]}
        except OSError:  # refused, too late, or an error status: not yet
            return None

    def _read_endpoints(self) -> dict[str, Any] | None:
        """The endpoint file, once it was written whole by the life that runs now."""
        try:
            loaded = json.loads(self.spec.endpoint_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(loaded, dict) or loaded.get("pid") != self.pid:
            return None
        return loaded
