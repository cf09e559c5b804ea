"""The peers' server processes: started on loopback, waited for, ended by their ids."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks._peers import PeerUnavailableError
from benchmarks._workers import end_process
from client_sdk.cli.cluster_plan import choose_port

START_SECONDS = 120.0
HOST = "127.0.0.1"
SEGMENT = "1536MB"
QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error", "LMCACHE_LOG_LEVEL": "ERROR"}
"""For servers and clients alike."""
LEASE_MS = "5000"
LMCACHE_GB = "2"


@contextmanager
def mooncake_master(programs: Path) -> Iterator[str]:
    """Give the address of a master without high availability, SSD or snapshots."""
    port, metrics, metadata = (choose_port() for _ in range(3))
    command = [
        str(programs / "mooncake_master"),
        *("--rpc_address", HOST, "--rpc_port", str(port)),
        *("--metrics_host", HOST, "--metrics_port", str(metrics)),
        *("--http_metadata_server_host", HOST, "--http_metadata_server_port", str(metadata)),
        *("--default_kv_lease_ttl", LEASE_MS),
    ]
    with _running("mooncake_master", command, port):
        yield f"{HOST}:{port}"


@contextmanager
def mooncake_daemon(programs: Path, master: str) -> Iterator[str]:
    """Give the address of a node's `mooncake_client`, which shares memory with its clients."""
    port = choose_port()
    command = [
        str(programs / "mooncake_client"),
        *("--host", HOST, "--port", str(port), "--master_server_address", master),
        *("--metadata_server", "P2PHANDSHAKE", "--protocol", "tcp"),
        *("--global_segment_size", SEGMENT),
    ]
    with _running("mooncake_client", command, port):
        yield f"{HOST}:{port}"


@contextmanager
def lmcache_server(programs: Path) -> Iterator[str]:
    """Give the port of a server that keeps everything in memory, a chunk a page of 16 tokens."""
    port, http, prometheus = (choose_port() for _ in range(3))
    command = [
        str(programs / "lmcache"),
        *("server", "--host", HOST, "--port", str(port), "--chunk-size", "16"),
        *("--supported-transfer-mode", "lmcache_driven", "--l1-size-gb", LMCACHE_GB),
        *("--eviction-policy", "LRU", "--null-block-id", "-1"),
        *("--http-host", HOST, "--http-port", str(http), "--prometheus-port", str(prometheus)),
        "--disable-observability",
    ]
    with _running("lmcache server", command, port):
        yield str(port)


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Give the unix socket of a server that persists nothing."""
    program = shutil.which("redis-server")
    if program is None:
        raise PeerUnavailableError("redis-server is not on the PATH")
    path = directory / "redis.sock"
    command = [
        program,
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    with _running("redis-server", [*command, "--dir", str(directory)], path):
        yield str(path)


@contextmanager
def _running(name: str, command: Sequence[str], place: int | Path) -> Iterator[None]:
    """Run a server; its place is a port of loopback or the path of a socket."""
    environment = {**os.environ, **QUIET}
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(place):
            if process.poll() is not None:
                raise PeerUnavailableError(f"{name} ended at start, code {process.returncode}")
            if time.monotonic() > deadline:
                raise PeerUnavailableError(f"{name} did not listen within {START_SECONDS} s")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        end_process(process)


def _listens(place: int | Path) -> bool:
    family = socket.AF_INET if isinstance(place, int) else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((HOST, place) if isinstance(place, int) else str(place)) == 0
