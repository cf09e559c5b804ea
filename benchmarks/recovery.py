"""From kill -9 to serving, with a million rows on SSD and 100,000 slots in DRAM.

The files are made by the product's own code: segments with record headers, footers and the marks
of the local index; a pool with slot headers. Payloads are holes, which read as zeros, and so have
the checksum of zeros. Blocks are as small as the formats allow, so that a million fit on any
machine; every block in DRAM has its copy on SSD, as `writeback: on_commit` leaves it. In sealed
segments one record in HEADER_EVERY has its header, and those are read back.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks._figure import Figure, Options, main
from client_sdk import OperatorClient, SyncClient
from emberkv_proto.convert import page_from_wire
from emberkv_proto.errors import EmberError
from emberkv_proto.hashing import block_hashes, checksum, index_keys
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import BlockHash, Incarnation, Tier
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from store_daemon.block import StoredNamespace
from store_daemon.config import DramSection
from store_daemon.local_index import LocalIndex
from store_daemon.tiers import segments
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.segment_file import create_segment, seal_segment
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow

MIB = 1 << 20
NODE = "bench-node"
PART_BYTES = 4096
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 1000
SEGMENT_BYTES = 256 * MIB
EXTENT_BYTES = 64 * MIB
HEADER_EVERY = 64
TAIL_BLOCKS = 256
"""Blocks that each life stores before it is killed, in a segment that is open then."""
TARGET_SECONDS = 2.0
START_SECONDS = 120.0
ZEROS_SUM = checksum(bytes(PART_BYTES))


@dataclass(frozen=True, slots=True)
class Node:
    """A node's files, and what must be found in them."""

    directory: Path
    pool: Path
    namespace: Namespace
    on_ssd: list[BlockHash]
    in_dram: list[BlockHash]

    @property
    def socket_path(self) -> Path:
        return self.directory / "d.sock"

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"


@dataclass(frozen=True, slots=True)
class Life:
    """How one start of the daemon went."""

    seconds: float
    cpu_seconds: float
    """Of the daemon until then: what a busy machine changes less."""
    announced: float
    """Of the blocks that must be there, the part that a snapshot shows."""


def bench_namespace() -> Namespace:
    layout = KvLayout("float32", 1, 1, 1).fingerprint
    group = Group(GroupKind.FULL, 1, PART_BYTES)
    return Namespace("bench-recovery", "w", "float32", layout, BLOCK_TOKENS, (group,))


@contextmanager
def node_with(ssd_rows: int, dram_slots: int) -> Iterator[Node]:
    pool = Path("/dev/shm") / f"emberkv-bench-{os.getpid()}"  # noqa: S108
    namespace = bench_namespace()
    with tempfile.TemporaryDirectory(prefix="emberkv-bench-") as name:
        hashes = chains(namespace, ssd_rows)
        node = Node(Path(name), pool, namespace, hashes, hashes[-dram_slots:])
        try:
            make_segments(node)
            make_pool(node)
            yield node
        finally:
            pool.unlink(missing_ok=True)


def chains(namespace: Namespace, blocks: int) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    for first in range(0, blocks, CHAIN_BLOCKS):
        count = min(CHAIN_BLOCKS, blocks - first)
        tokens = np.frombuffer(os.urandom(4 * BLOCK_TOKENS * count), dtype=np.uint32)
        hashes += block_hashes(namespace.id, tokens, BLOCK_TOKENS)
    return hashes


def parent_of(hashes: Sequence[BlockHash], number: int) -> BlockHash | None:
    return hashes[number - 1] if number % CHAIN_BLOCKS else None


def make_segments(node: Node) -> None:
    """Sealed segments full of records, as a daemon that ran for long leaves them."""
    index = LocalIndex.open(node.data_dir, NODE)
    index.put_namespace(node.namespace)
    directory = node.directory / "ssd"
    directory.mkdir()
    size = segments.record_bytes(PART_BYTES)
    room = SEGMENT_BYTES - 2 * PAGE_BYTES
    per_segment = room // (size + segments.ROW_BYTES) - 1
    for number, first in enumerate(range(0, len(node.on_ssd), per_segment), start=1):
        rows = [
            SsdRow(
                node.namespace.id,
                node.on_ssd[n],
                0,
                parent_of(node.on_ssd, n),
                number,
                PAGE_BYTES + (n - first) * size,
                PART_BYTES,
                ZEROS_SUM,
            )
            for n in range(first, min(first + per_segment, len(node.on_ssd)))
        ]
        path = directory / segments.segment_name(number)
        fd = create_segment(path, number, SEGMENT_BYTES, direct_io=True)
        try:
            plain = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            for row in rows[::HEADER_EVERY]:
                os.pwrite(plain, segments.pack_record_header(row), row.offset)
            os.close(plain)
            seal_segment(fd, number, rows, rows[-1].end)
        finally:
            os.close(fd)
        index.mark_sealed(number, len(rows))
    index.close()


def make_pool(node: Node) -> None:
    """Committed slots of zeros, the newest blocks, as a daemon that was killed leaves them."""
    pool = Pool.open(dram_section(node), NODE, Incarnation(1), lambda size: True)
    size = StoredNamespace.of(node.namespace).size_classes[0]
    first = len(node.on_ssd) - len(node.in_dram)
    for number, block_hash in enumerate(node.in_dram, start=first):
        slot = pool.take(size)
        assert slot is not None, "the pool is too small"
        pool.commit(slot, block_hash, parent_of(node.on_ssd, number), ZEROS_SUM)
    pool.close()


def dram_section(node: Node) -> DramSection:
    per_extent = EXTENT_BYTES // (PART_BYTES + 128) - 64
    extents = len(node.in_dram) // per_extent + 4
    return DramSection(
        path=node.pool, capacity_bytes=extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES
    )


def begin(node: Node) -> subprocess.Popen[bytes]:
    dram = dram_section(node)
    values = {
        "node.id": NODE,
        "daemon.socket_path": node.socket_path,
        "daemon.data_dir": node.data_dir,
        "daemon.grpc_port": 0,
        "daemon.metrics_port": 0,
        "daemon.log_level": "warning",
        "dram.path": dram.path,
        "dram.capacity_bytes": dram.capacity_bytes,
        "dram.extent_bytes": dram.extent_bytes,
        "ssd.path": node.directory / "ssd",
        "ssd.capacity_bytes": 64 * SEGMENT_BYTES,
        "ssd.segment_bytes": SEGMENT_BYTES,
    }
    arguments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    # Any daemon but the first has its byte code cached.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen([sys.executable, "-m", "store_daemon", *arguments], env=env)


def wait_until_serving(node: Node, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the daemon ended at start with code {process.returncode}")
        with suppress(EmberError), OperatorClient(node.socket_path) as operator:
            if operator.status().state == "serving":
                return
        time.sleep(0.01)
    raise SystemExit(f"the daemon did not serve within {START_SECONDS} s")


def live(node: Node, stored: list[BlockHash]) -> Life:
    """Start a daemon, ask what it announces, read and write a little, and kill it.

    What it is known to have stored before it is killed is added to `stored`.
    """
    began = time.monotonic()
    process = begin(node)
    try:
        wait_until_serving(node, process)
        seconds = time.monotonic() - began
        cpu = cpu_seconds(process.pid)
        announced = share_announced(node, stored)
        with SyncClient(node.socket_path, node.namespace, timeout_seconds=30.0) as client:
            read_back(node, client)
            stored += store_more(node, client)
        return Life(seconds, cpu, announced)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_announced(node: Node, stored: Sequence[BlockHash]) -> float:
    """Of all that must be there, what a subscriber's snapshot shows."""
    found = asyncio.run(snapshot(node))
    wanted = {Tier.SSD: [*node.on_ssd, *stored], Tier.DRAM: node.in_dram}
    here = total = 0
    for tier, hashes in wanted.items():
        here += int(np.isin(index_keys(hashes), found[tier]).sum())
        total += len(hashes)
    return here / total


async def snapshot(node: Node) -> dict[Tier, np.ndarray]:
    address = json.loads((node.data_dir / "endpoints.json").read_text())["grpc_address"]
    keys: dict[Tier, list[np.ndarray]] = {Tier.DRAM: [], Tier.SSD: []}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
        async for message in stub.Snapshot(index_pb2.SnapshotRequest(), timeout=60):
            page = page_from_wire(message)
            keys[page.tier].append(page.keys)
    return {tier: np.concatenate([np.empty(0, np.uint64), *pages]) for tier, pages in keys.items()}


def read_back(node: Node, client: SyncClient) -> None:
    """Blocks from DRAM and from SSD, their checksums computed by the daemon and again here."""
    for first in (0, len(node.on_ssd) - CHAIN_BLOCKS):
        asked = node.on_ssd[first : first + 1]
        with client.acquire(asked, deadline_seconds=20.0) as lease:
            if lease.wait(1, 20.0) != 1 or checksum(lease.view(0)) != ZEROS_SUM:
                raise SystemExit(f"block {first} does not read back")


def store_more(node: Node, client: SyncClient) -> list[BlockHash]:
    """Store a chain and wait until it is on SSD, in a segment that stays open."""
    hashes = chains(node.namespace, TAIL_BLOCKS)
    with client.stage(hashes) as write:
        for number in range(len(hashes)):
            write.view(number)[:] = bytes(PART_BYTES)
        write.commit(range(len(hashes)), [ZEROS_SUM] * len(hashes))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        tiers = client.probe(hashes).tiers
        if all(Tier.SSD in tier for tier in tiers):
            return hashes
        time.sleep(0.05)
    raise SystemExit("what was stored did not reach the SSD in time")


def measure(options: Options) -> Iterator[Figure]:
    rows, slots = (100_000, 10_000) if options.quick else (1_000_000, 100_000)
    repeats = options.repeats(5, 3)
    stored: list[BlockHash] = []
    with node_with(rows, slots) as node:
        live(node, stored)  # the first start after another program made the files
        kept = [live(node, stored) for _ in range(repeats)]
        lost = []
        for _ in range(repeats):
            shutil.rmtree(node.data_dir / "rocksdb")
            lost.append(live(node, stored))
    load = f"{rows} SSD rows and {slots} DRAM headers, kill -9"
    for name, lives in (("killed", kept), ("killed_and_index_lost", lost)):
        yield Figure(
            f"recovery_{name}",
            statistics.median(life.seconds for life in lives),
            f"s from start of the process to serving; {load}",
            "the target",
            TARGET_SECONDS,
            repeats,
            at_most=1.0,
        )
        yield Figure(
            f"recovery_{name}_cpu",
            statistics.median(life.cpu_seconds for life in lives),
            "s of CPU until serving",
            "the time from start to serving",
            statistics.median(life.seconds for life in lives),
            repeats,
        )
        yield Figure(
            f"recovery_{name}_announced",
            min(life.announced for life in lives),
            "of all blocks, in the snapshot that an index takes",
            "all",
            1.0,
            repeats,
            at_least=1.0,
        )


if __name__ == "__main__":
    main("recovery", lambda options: list(measure(options)))
