"""A real store daemon in a process of its own, to be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from client_sdk import OperatorClient
from emberkv_proto.errors import EmberError
from tests.helpers.server_process import ROOT as ROOT
from tests.helpers.server_process import ServerProcess

MIB = 1 << 20


@dataclass
class DaemonProcess(ServerProcess):
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
    config: Path | None = None
    """A YAML file; what is set here wins over it."""
    faults: str = ""
    """EMBERKV_FAULTS of the next start."""

    module = "store_daemon"

    def __post_init__(self) -> None:
        self._set_up(self.directory, "daemon")
        self.socket_path = self.directory / "d.sock"
        self.pool_path = Path(f"/dev/shm/emberkv-test-{os.getpid()}-{self.node_id}-{id(self):x}")
        self.data_dir = self.directory / "data"

    @property
    def endpoints(self) -> dict[str, Any]:
        """What the daemon wrote about its addresses."""
        loaded: dict[str, Any] = json.loads((self.data_dir / "endpoints.json").read_text())
        return loaded

    def operator(self) -> OperatorClient:
        return OperatorClient(self.socket_path, timeout_seconds=20.0)

    def metrics(self) -> dict[str, float]:
        """Its metrics by name, labels as they are printed: `...blocks{tier="dram"}`."""
        with urlopen(f"http://{self.endpoints['metrics_address']}/metrics", timeout=90) as page:
            lines = page.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def __enter__(self) -> DaemonProcess:
        self._start_or_clean()
        return self

    def _is_serving(self) -> bool:
        with contextlib.suppress(EmberError), self.operator() as operator:
            operator.connect()
            return True
        return False

    def _command(self) -> list[str]:
        config = [] if self.config is None else ["--config", str(self.config)]
        return [*super()._command(), *config]

    def _remove_files(self) -> None:
        self.pool_path.unlink(missing_ok=True)

    def _settings(self) -> Mapping[str, Any]:
        return {
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
