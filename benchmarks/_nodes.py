"""Several store daemons and an index on this machine, for benchmarks between nodes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._daemon import Serving, running_daemon
from client_sdk.cli.cluster_plan import choose_port
from client_sdk.index_client import IndexClient
from emberkv_proto.errors import EmberError

WAIT_SECONDS = 60.0


@contextmanager
def running_nodes(
    count: int, dram_bytes: int, ssd_bytes: int, extent_bytes: int
) -> Iterator[Sequence[Serving]]:
    """Serving daemons that pull from each other; ended with their files afterwards."""
    ports = [choose_port() for _ in range(count)]
    index_address = f"127.0.0.1:{choose_port()}"
    with ExitStack() as stack:
        stack.enter_context(_running_index(index_address, [f"127.0.0.1:{port}" for port in ports]))
        nodes = []
        for number, port in enumerate(ports):
            pool = Path(f"/dev/shm/emberkv-bench-{os.getpid()}-{number}")  # noqa: S108
            stack.callback(pool.unlink, missing_ok=True)
            settings = {
                "node.id": f"node-{number}",
                "daemon.grpc_port": port,
                "daemon.index_address": index_address,
                "dram.path": pool,
            }
            nodes.append(
                stack.enter_context(
                    running_daemon(dram_bytes, extent_bytes, ssd_bytes=ssd_bytes, settings=settings)
                )
            )
        _wait_until_known(index_address, count)
        yield nodes


@contextmanager
def _running_index(address: str, nodes: Sequence[str]) -> Iterator[None]:
    settings = {
        "index.port": address.rpartition(":")[2],
        "index.metrics_port": 0,
        "index.nodes": json.dumps(list(nodes)),
        "index.backend": "python",
        "index.log_level": "error",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "global_index", *words], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _wait_until_known(index_address: str, count: int) -> None:
    """Raises TimeoutError when the index does not follow all daemons in time."""

    async def known() -> int:
        index = IndexClient(index_address, timeout_seconds=5.0)
        try:
            return sum(node.state == "ok" for node in await index.nodes())
        except EmberError:
            return 0
        finally:
            await index.close()

    deadline = time.monotonic() + WAIT_SECONDS
    while asyncio.run(known()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the index does not know {count} daemons")
        time.sleep(0.05)
