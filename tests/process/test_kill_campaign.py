"""Fifty kill -9 of a daemon under load, and what must hold after each.

Acknowledged blocks read back byte-identical (all of them, where the store had room for all),
nothing appears that was never committed, and the index that followed it all equals the catalog.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import grpc
import numpy as np
import pytest

from client_sdk import SyncClient
from emberkv_proto import convert
from emberkv_proto.errors import EmberError
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, StageState, Tier
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from tests.helpers.daemon_process import MIB, DaemonProcess

PART_BYTES = 4000
CHAIN_BLOCKS = 6
CHAINS_A_ROUND = 40
SETTLE_SECONDS = 20.0
NAMESPACE = Namespace(
    "campaign",
    "w1",
    "float32",
    KvLayout("float32", 1, 1, 8).fingerprint,
    4,
    (Group(GroupKind.FULL, 1, PART_BYTES),),
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Journal:
    """What the clients know. A commit whose answer was lost may or may not have happened."""

    acknowledged: list[list[BlockHash]] = field(default_factory=list)
    never_committed: list[BlockHash] = field(default_factory=list)
    wrong_bytes: list[str] = field(default_factory=list)
    reads: int = 0


def payload_of(block_hash: BlockHash) -> bytes:
    return blake3.blake3(block_hash).digest(length=PART_BYTES)


def write_until_killed(path: Path, seed: int, journal: Journal) -> None:
    """Write chains; commit two of three and leave the third staged."""
    rng = random.Random(seed)
    left_staged = []
    with SyncClient(path, NAMESPACE) as client, contextlib.suppress(EmberError):
        for number in range(CHAINS_A_ROUND):
            tokens = [rng.randrange(1 << 32) for _ in range(NAMESPACE.block_tokens * CHAIN_BLOCKS)]
            chain = block_hashes(NAMESPACE.id, tokens, NAMESPACE.block_tokens)
            write = client.stage(chain)
            granted = [i for i, state in enumerate(write.states) if state is StageState.GRANTED]
            for i in granted:
                write.view(i)[:] = payload_of(chain[i])
            if number % 3 == 2:
                journal.never_committed += chain
                left_staged.append(write)
                continue
            with write:
                write.commit(granted)
            journal.acknowledged.append([chain[i] for i in granted])
        while True:
            client.heartbeat()
            time.sleep(0.01)


def read_until_killed(path: Path, seed: int, journal: Journal) -> None:
    rng = random.Random(seed)
    with SyncClient(path, NAMESPACE) as client, contextlib.suppress(EmberError):
        while True:
            client.heartbeat()
            if journal.acknowledged:
                read_chain(client, rng.choice(journal.acknowledged[-200:]), journal)


def read_chain(client: SyncClient, chain: list[BlockHash], journal: Journal) -> int:
    """Read what is there of a chain and compare; return how many blocks that was."""
    policy = AcquirePolicy.WAIT_COMPLETE
    with client.acquire(chain, policy=policy, deadline_seconds=5.0) as lease:
        ready = lease.wait(lease.usable_blocks, 5.0)
        for i in range(ready):
            lease.verify(i)
            if bytes(lease.view(i)) != payload_of(chain[i]):
                journal.wrong_bytes.append(chain[i].hex())
            journal.reads += 1
        return ready


def load_and_kill(daemon: DaemonProcess, seed: int, journal: Journal) -> None:
    """Two writers and a reader until the daemon is killed at a random moment."""
    path = daemon.socket_path
    killer = random.Random(seed)
    with ThreadPoolExecutor(3) as pool:
        work = [
            pool.submit(write_until_killed, path, 2 * seed, journal),
            pool.submit(write_until_killed, path, 2 * seed + 1, journal),
            pool.submit(read_until_killed, path, seed, journal),
        ]
        time.sleep(killer.uniform(0.0, 0.5))
        daemon.kill()
        for done in work:
            done.result(30.0)


def check_after_restart(daemon: DaemonProcess, journal: Journal, keeps_all: bool) -> None:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=5.0) as client:
        for block_hash in journal.never_committed:
            assert client.probe([block_hash]).hit_blocks == 0, "an uncommitted block appeared"
        for chain in journal.acknowledged if keeps_all else journal.acknowledged[-150:]:
            found = read_chain(client, chain, journal)
            assert not keeps_all or found == len(chain), f"{len(chain) - found} blocks lost"
    assert not journal.wrong_bytes, f"wrong bytes in {journal.wrong_bytes[:3]}"
    with daemon.operator() as operator:
        assert operator.check() == []


async def catalog_of(address: str) -> tuple[int, dict[Tier, set[int]]]:
    """The daemon's own inventory: event number and index keys by tier."""
    rows: dict[Tier, set[int]] = {Tier.DRAM: set(), Tier.SSD: set()}
    async with grpc.aio.insecure_channel(address) as channel:
        stream = index_pb2_grpc.EventsStub(channel).Snapshot(index_pb2.SnapshotRequest())
        seq = 0
        async for message in stream:
            page = convert.page_from_wire(message)
            seq = page.seq
            rows[page.tier] |= set(page.keys.tolist())
    return seq, rows


class IndexThread:
    """A global index that follows the daemon through all its lives, in a thread of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="index")

    def __enter__(self) -> IndexThread:
        self._thread.start()
        assert self._ready.wait(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20.0)
        self._loop.close()

    def assert_equals_catalog(self) -> None:
        """Wait until the index is exact at the catalog's event number, then compare the rows."""
        future = asyncio.run_coroutine_threadsafe(self._compare(), self._loop)
        future.result(2 * SETTLE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        section = IndexSection(nodes=(self._address,), backend="python", capacity_blocks=100_000)
        async with GlobalIndex(section) as self._index:
            self._ready.set()
            await self._stop.wait()

    async def _compare(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            seq, rows = await catalog_of(self._address)
            keys = np.array(sorted(rows[Tier.DRAM] | rows[Tier.SSD]), dtype=np.uint64)
            views = self._index.nodes()
            if len(views) == 1 and views[0].seq == seq and str(views[0].exactness.value) == "exact":
                (trace,) = self._index.explain(keys) if keys.size else (None,)
                held = trace.tiers if trace else ()
                expected = tuple(
                    tuple(t for t in (Tier.DRAM, Tier.SSD) if int(key) in rows[t]) for key in keys
                )
                assert held == expected, "the index differs from the catalog"
                for digest in views[0].tiers:
                    assert digest.blocks == len(rows[digest.tier])
                self._index.check_integrity()
                return
            assert time.monotonic() < deadline, f"no agreement: catalog at {seq}, index {views}"
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("keeps_all", "capacity_bytes", "ssd_bytes", "first_seed"),
    [
        pytest.param(True, 64 * MIB, 128 * MIB, 0, id="room-for-all"),
        pytest.param(False, 2 * MIB, 6 * MIB, 1000, id="always-evicting"),
    ],
)
def test_acknowledged_blocks_survive_25_kills_and_the_index_agrees(
    tmp_path: Path, keeps_all: bool, capacity_bytes: int, ssd_bytes: int, first_seed: int
) -> None:
    journal = Journal()
    port = free_port()
    daemon = DaemonProcess(
        tmp_path,
        capacity_bytes=capacity_bytes,
        extent_bytes=MIB // 2,
        ssd_bytes=ssd_bytes,
        settings={"daemon.grpc_port": port},
    )
    with daemon, IndexThread(f"127.0.0.1:{port}") as index:
        for seed in range(first_seed, first_seed + 25):
            load_and_kill(daemon, seed, journal)
            daemon.start()
            check_after_restart(daemon, journal, keeps_all)
            index.assert_equals_catalog()
    assert sum(map(len, journal.acknowledged)) > 500
    assert journal.reads > 1000
