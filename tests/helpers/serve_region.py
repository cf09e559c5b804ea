"""Runs as a process of its own: serves a region of seeded bytes over one transport.

Prints "address incarnation", then serves until it is killed. `--delay` sleeps before each segment
goes out, so that a test can stop the process in the middle of a transfer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emberkv_proto.types import Incarnation
from store_daemon.transport.base import Transport, TransportAddress
from store_daemon.transport.tcp import ReadLimits, TcpTransport
from tests.helpers.anonymous_pool import AnonymousPool

LEASE = 7
ROOT = Path(__file__).resolve().parents[2]


def make_transport(kind: str, incarnation: Incarnation, progress_seconds: float = 2.0) -> Transport:
    """The transports that the contract tests run against, by name."""
    assert kind == "tcp"
    return TcpTransport(incarnation, read_limits=ReadLimits(progress_seconds=progress_seconds))


def seeded_bytes(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@dataclass(frozen=True)
class ServingProcess:
    process: subprocess.Popen[str]
    address: TransportAddress


@contextmanager
def serving_process(kind: str, seed: int, size: int, delay: float) -> Iterator[ServingProcess]:
    """A peer in another process; killed at the end, if it still runs."""
    command = [sys.executable, "-m", "tests.helpers.serve_region", kind]
    command += [str(seed), str(size), str(delay)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, incarnation = process.stdout.readline().split()
            yield ServingProcess(
                process, TransportAddress(kind, address, Incarnation(int(incarnation)))
            )
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("seed", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("delay", type=float)
    args = parser.parse_args()

    def may_read(lease_id: int, offset: int, length: int) -> bool:
        if args.delay:
            time.sleep(args.delay)
        return lease_id == LEASE

    pool = AnonymousPool(args.size)
    pool.view[:] = seeded_bytes(args.seed, args.size)
    transport = make_transport(args.kind, Incarnation(3))
    transport.register(pool.view)
    address = transport.serve(may_read)
    print(address.address, address.incarnation, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
