"""A server of ours as a real process: started, killed, stopped, continued and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from client_sdk.faults import VARIABLE

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.02
LOG_CHARS = 4000


class ServerProcess:
    """Base of the helpers for each server. A context manager; ends what it started, by pid only.

    `faults` is EMBERKV_FAULTS of the next start.
    """

    module: str
    faults: str = ""

    def _set_up(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    # ---- what each server says of itself ----

    def _settings(self) -> Mapping[str, Any]:
        """`section.key`: value, for the next start."""
        raise NotImplementedError

    def _is_serving(self) -> bool:
        """Whether the process that runs now answers."""
        raise NotImplementedError

    def _remove_files(self) -> None:
        """What it leaves outside its directory."""

    # ---- life ----

    @property
    def log(self) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-LOG_CHARS:] if self._log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start it without waiting."""
        assert self._process is None, f"{self.name} is started already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, VARIABLE: self.faults},
            )

    def await_serving(self) -> None:
        """Wait until it serves. Raises AssertionError with its log when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_serving():
            assert self.is_running, f"{self.name} ended at start:\n{self.log}"
            assert time.monotonic() < deadline, (
                f"{self.name} did not serve within {START_SECONDS} s:\n{self.log}"
            )
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.spawn()
        self.await_serving()

    def refusal(self) -> str:
        """Start it where it must not start; return the one line with which it ends."""
        done = subprocess.run(
            self._command(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
            env={**os.environ, VARIABLE: self.faults},
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        (line,) = [x for x in done.stderr.splitlines() if x.startswith(f"{self.module}: ")]
        return line

    def kill(self) -> None:
        """kill -9. One that has ended by itself is only taken off the books."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; return its exit code."""
        return self._end(signal.SIGTERM)

    def await_end(self, seconds: float) -> int | None:
        """Wait for it to end by itself; its exit code, or None if it still runs after that."""
        assert self._process is not None, f"{self.name} is not started"
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._process = None
        return code

    def hang_up(self) -> None:
        """SIGHUP: have it read its configuration again."""
        os.kill(self.pid, signal.SIGHUP)

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def clean(self) -> None:
        """Kill it if it runs, and remove what it leaves outside its directory."""
        if self._process is not None:
            self.kill()
        self._remove_files()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clean()

    def _start_or_clean(self) -> None:
        try:
            self.start()
        except BaseException:
            self.clean()
            raise

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None, f"{self.name} is not started"
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
            raise AssertionError(f"{self.name} did not end:\n{self.log}") from None

    def _command(self) -> list[str]:
        sets = [w for k, v in self._settings().items() for w in ("--set", f"{k}={v}")]
        return [sys.executable, "-m", self.module, *sets]
