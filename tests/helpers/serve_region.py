"""Runs as a process of its own: serves a region of seeded bytes over one transport.

Prints "transport address incarnation", then serves until it is killed. A delay is slept before each
segment goes out, so that a test can stop the process in the middle of a transfer.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_sdk.transport.base import Segment, TransportAddress
from client_sdk.transport.connections import ReadLimits
from client_sdk.transport.ucx_settings import Rdma, UcxSettings
from emberkv_proto.types import Incarnation
from store_daemon.ports import PoolRange
from store_daemon.transport.base import Lent, Transport
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.ucp import UcpTransport
from store_daemon.transport.ucx import UcxTransport
from tests.helpers.anonymous_pool import AnonymousPool

LEASE = 7
_RANGE = struct.Struct("<QQ")
ROOT = Path(__file__).resolve().parents[2]


KINDS = ("tcp", "ucx", "ucx-read", "ucp")
"""ucx-read: the reader reads by itself, over CMA as on RDMA; ucx, ucp: owners send over TCP."""


def needed_module(kind: str) -> str | None:
    """What has to be installed for it."""
    return {"tcp": None, "ucp": "ucxx"}.get(kind, "nixl_cu12")


def make_transport(
    kind: str, incarnation: Incarnation, pool: AnonymousPool, progress_seconds: float = 10.0
) -> Transport:
    """The transports that the contract tests run against, by name; the pool is registered."""
    limits = ReadLimits(progress_seconds=progress_seconds)
    transport: Transport
    if kind == "tcp":
        transport = TcpTransport(incarnation, read_limits=limits)
    else:
        made = UcpTransport if kind == "ucp" else UcxTransport
        transport = made(
            incarnation, pool.descriptor, settings=ucx_settings(kind), read_limits=limits
        )
    transport.register(pool.view)
    return transport


def ucx_settings(kind: str) -> UcxSettings:
    if kind in ("ucx", "ucp"):
        return UcxSettings(rdma=Rdma.OFF, reading_agents=1)
    assert kind == "ucx-read"
    # Without plain TCP to fall back on, so that what is tested is what is meant.
    return UcxSettings(Rdma.REQUIRED, reading_agents=1, one_sided=("cma",), tls="tcp,self,cma")


def lend(request: bytes, first_blocks: int) -> Lent:
    """A lease over the ranges that the request names, as `pack_ranges` did; all are sent."""
    ranges = [PoolRange(*numbers) for numbers in _RANGE.iter_unpack(request)]
    return Lent(request, LEASE, ranges[:first_blocks], lambda: None)


def pack_ranges(segments: Sequence[Segment]) -> bytes:
    return b"".join(_RANGE.pack(one.remote_offset, one.length) for one in segments)


def seeded_bytes(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@dataclass(frozen=True)
class ServingProcess:
    process: subprocess.Popen[str]
    address: TransportAddress

    def kill(self) -> None:
        """kill -9 of the process alone; what it started must follow by itself."""
        self.process.kill()

    def stop(self) -> None:
        """With all that it started."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


@contextmanager
def serving_process(kind: str, seed: int, size: int, delay: float) -> Iterator[ServingProcess]:
    """A peer in another process; killed at the end, if it still runs."""
    command = [sys.executable, "-m", "tests.helpers.serve_region", kind]
    command += [str(seed), str(size), str(delay)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            name, address, incarnation = process.stdout.readline().split()
            yield ServingProcess(
                process, TransportAddress(name, address, Incarnation(int(incarnation)))
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)


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
    transport = make_transport(args.kind, Incarnation(3), pool)
    address = transport.serve(may_read, lend)
    print(address.transport, address.address, address.incarnation, flush=True)
    sys.stdin.read()  # ends with whoever started it, however that ends
    os._exit(0)


if __name__ == "__main__":
    main()
