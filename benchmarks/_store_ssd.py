"""Figures of moves between DRAM and SSD, beside raw O_DIRECT of the same bytes on the same drive.

Both are measured through the daemon: a chain is committed until its last block is on SSD, and a
chain that is only there is acquired until its last block can be read.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks._daemon import Serving, running_daemon
from benchmarks._figure import MIB, Figure, Options, median_values
from benchmarks._store_client import fresh_chain, namespace_of
from client_sdk import OperatorClient, SyncClient
from emberkv_proto.hashing import checksum
from emberkv_proto.types import AcquirePolicy, BlockHash, Source, Tier
from store_daemon.config import SsdSection

BLOCK_BYTES = MIB
BLOCKS = 192
DEPTH = SsdSection().io_threads
CHAINS = 3
DRAM_BYTES = (CHAINS - 1) * BLOCKS * BLOCK_BYTES
"""Of chains used in turn the next one is always out: extents' headers take some of the room."""
EXTENT_BYTES = 64 * MIB
SSD_BYTES = 2048 * MIB
AT_LEAST = 0.90
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.004
RAW = f"raw O_DIRECT of the same bytes, 1 MiB at a time, {DEPTH} threads"


class RawFile:
    """What the drive gives without a store: whole blocks by a few threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = memoryview(mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
        np.frombuffer(self._memory, np.uint8)[:] = 7
        self._threads = ThreadPoolExecutor(DEPTH)
        self._descriptor = -1

    def write(self) -> float:
        """GB/s into a new file of reserved room, as a new segment is, until it is durable."""
        self._drop()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._descriptor, 0, BLOCKS * BLOCK_BYTES)
        begun = time.monotonic()
        list(self._threads.map(self._write_one, range(BLOCKS)))
        os.fdatasync(self._descriptor)
        return _rate(begun)

    def read(self) -> float:
        """GB/s of what `write` wrote."""
        begun = time.monotonic()
        list(self._threads.map(self._read_one, range(BLOCKS)))
        return _rate(begun)

    def close(self) -> None:
        self._drop()
        self._threads.shutdown()

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._path.unlink()
            self._descriptor = -1

    def _write_one(self, number: int) -> None:
        _require_all(os.pwritev(self._descriptor, [self._block(number)], number * BLOCK_BYTES))

    def _read_one(self, number: int) -> None:
        _require_all(os.preadv(self._descriptor, [self._block(number)], number * BLOCK_BYTES))

    def _block(self, number: int) -> memoryview:
        return self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


class Mover:
    """Has the daemon move chains, and times it."""

    def __init__(self, client: SyncClient, operator: OperatorClient) -> None:
        self._client = client
        self._operator = operator
        self._source = np.frombuffer(os.urandom(BLOCK_BYTES), np.uint8)
        self._sum = checksum(self._source.data)
        self._saved: list[list[BlockHash]] = []
        """Chains on SSD, the least recently used first."""

    def write_back(self) -> float:
        """GB/s from the commit of a chain until all of it is on SSD."""
        chain = fresh_chain(BLOCKS)
        before = self._counter("writeback_blocks")
        with self._client.stage(chain) as write:
            for number in range(BLOCKS):
                write.view(number)[:] = self._source.data
            begun = time.monotonic()
            write.commit(range(BLOCKS), [self._sum] * BLOCKS)
            while self._counter("writeback_blocks") < before + BLOCKS:
                if time.monotonic() > begun + DEADLINE_SECONDS:
                    raise SystemExit(f"writeback did not end within {DEADLINE_SECONDS} s")
                time.sleep(POLL_SECONDS)
            rate = _rate(begun)
        self._saved.append(chain)
        return rate

    def promote(self) -> float:
        """GB/s of the least recently used of some chains, which is out of DRAM by now."""
        del self._saved[:-CHAINS]
        chain = self._saved.pop(0)
        self._saved.append(chain)
        probed = self._client.probe(chain)
        if probed.hit_blocks < BLOCKS or any(tiers != {Tier.SSD} for tiers in probed.tiers):
            raise SystemExit("the chain to be promoted is not on SSD alone")
        begun = time.monotonic()
        lease = self._client.acquire(
            chain, policy=AcquirePolicy.WAIT_COMPLETE, deadline_seconds=DEADLINE_SECONDS
        )
        with lease:
            if lease.wait(BLOCKS, DEADLINE_SECONDS) < BLOCKS:
                raise SystemExit("the chain was not promoted in time")
            rate = _rate(begun)
            assert set(lease.sources) == {Source.SSD}
            if not all(
                np.array_equal(np.frombuffer(lease.view(n), np.uint8), self._source)
                for n in (0, BLOCKS - 1)
            ):
                raise SystemExit("the drive gave other bytes than it was given")
        return rate

    def _counter(self, name: str) -> float:
        return self._operator.status().counters.get(name, 0.0)


def moves(options: Options) -> Iterator[Figure]:
    repeats = options.repeats(15, 6)
    with running_daemon(DRAM_BYTES, EXTENT_BYTES, ssd_bytes=SSD_BYTES) as serving:
        yield from _moves(serving, repeats)


def _moves(serving: Serving, repeats: int) -> Iterator[Figure]:
    with _mover(serving) as mover, _raw_file(serving.directory / "raw") as raw:
        mover.write_back(), raw.write()
        written, raw_written = median_values([mover.write_back, raw.write], repeats)
        promoted, raw_read = median_values([mover.promote, raw.read], repeats)
    for name, own, bare in (
        ("writeback_1MiB", written, raw_written),
        ("promote_1MiB", promoted, raw_read),
    ):
        yield Figure(name, own, "GB/s", RAW, bare, repeats, at_least=AT_LEAST)


@contextmanager
def _mover(serving: Serving) -> Iterator[Mover]:
    namespace = namespace_of(BLOCK_BYTES, "bench-ssd")
    with (
        SyncClient(serving.socket_path, namespace, timeout_seconds=10.0) as client,
        OperatorClient(serving.socket_path) as operator,
    ):
        client.prefault(10.0)
        yield Mover(client, operator)


@contextmanager
def _raw_file(path: Path) -> Iterator[RawFile]:
    raw = RawFile(path)
    try:
        yield raw
    finally:
        raw.close()


def _rate(begun: float) -> float:
    return BLOCKS * BLOCK_BYTES / (time.monotonic() - begun) / 1e9


def _require_all(count: int) -> None:
    if count != BLOCK_BYTES:
        raise SystemExit(f"the drive moved {count} of {BLOCK_BYTES} bytes")
