"""A cluster that `emberkv up` runs in another process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EMBERKV = (sys.executable, "-m", "client_sdk.cli.main")
STOP_SECONDS = 60


@dataclass(frozen=True)
class UpProcess:
    process: subprocess.Popen[str]
    base_dir: Path
    router_url: str
    index_address: str


@contextmanager
def running_up(base_dir: Path, config: str) -> Iterator[UpProcess]:
    """Start it with this config on free ports, wait until it serves, and end it."""
    process = subprocess.Popen(
        [
            *(*EMBERKV, "up", "--config", config),
            *("--set", "cluster.router_port=0"),
            *("--set", "cluster.index_port=0"),
            *("--set", f"cluster.base_dir={base_dir}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        seen = ""
        for line in process.stdout:
            seen += line
            if line.startswith("Ctrl-C"):
                break
        router = re.search(r"router +(http://[0-9.:]+)/", seen)
        index = re.search(r"index +([0-9.:]+)", seen)
        assert router is not None, seen
        assert index is not None, seen
        yield UpProcess(process, base_dir, router[1], index[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=STOP_SECONDS)
        process.stdout.close()
