"""A daemon whose SSD is slow: an engine that says what computing costs is not held up by it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, Tier
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = pytest.mark.process

NAMESPACE = Namespace("m", "w", "float32", "f", 16, (Group(GroupKind.FULL, 1, 65536),))
HASHES = block_hashes(NAMESPACE.id, list(range(16 * 48)), 16)
OTHERS = [
    block_hashes(NAMESPACE.id, list(range(first, first + 16 * 8)), 16)
    for first in range(50_000, 60_000, 1000)
]
READ_SECONDS = 0.3
STATES = ("stock", "free_slots", "evictable", "held", "filling", "resting", "doomed", "overhead")
FREE = ("stock", "free_slots")
ROOM = {f"dram_{state}_bytes" for state in STATES}
PATIENCE_SECONDS = 60.0


def put(client: SyncClient, hashes: list[BlockHash]) -> None:
    for first in range(0, len(hashes), 8):
        run = hashes[first : first + 8]
        parent = hashes[first - 1] if first else None
        with client.stage(run, parent=parent) as staged:
            for number in staged.granted:
                staged.view(number)[:] = run[number] * (65536 // 32)
            staged.commit()
        wait_until_saved(client, run)


def wait_until_saved(client: SyncClient, hashes: list[BlockHash]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(Tier.SSD in tiers for tiers in client.probe(hashes).tiers):
        assert time.monotonic() < deadline, "writeback takes too long"
        time.sleep(0.01)


def test_a_drive_slower_than_computing_is_not_waited_for(tmp_path: Path) -> None:
    daemon = DaemonProcess(
        tmp_path,
        capacity_bytes=4 * MIB,
        ssd_bytes=64 * MIB,
        settings={"ssd.segment_bytes": 4 * MIB, "ssd.direct_io": False, "ssd.io_threads": 2},
        faults=f"segment_read=delay:{READ_SECONDS}",
    )
    with daemon, SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        put(client, HASHES)
        for chain in OTHERS:
            put(client, chain)  # pushes them out of DRAM
        probe = client.probe(HASHES)
        assert probe.hit_blocks == len(HASHES)
        on_ssd = sum(Tier.DRAM not in tiers for tiers in probe.tiers)
        assert on_ssd >= 40

        began = time.monotonic()
        with client.acquire(HASHES[:4], policy=AcquirePolicy.WAIT_COMPLETE) as lease:
            assert lease.wait(4, PATIENCE_SECONDS) == 4
        assert time.monotonic() - began >= 2 * READ_SECONDS, "the fault works"

        with client.acquire(HASHES, recompute_seconds_per_block=0.01) as lease:
            assert 4 <= lease.usable_blocks < len(HASHES), "the rest is cheaper to compute"
            assert lease.is_complete
            for number in range(lease.usable_blocks):
                lease.verify(number)
            assert bytes(lease.view(3)[:32]) == HASHES[3]
        with client.acquire(
            HASHES[:12], recompute_seconds_per_block=60.0, deadline_seconds=PATIENCE_SECONDS
        ) as lease:
            assert lease.usable_blocks == 12
            assert lease.seconds_to_complete > READ_SECONDS
            assert lease.wait(12, PATIENCE_SECONDS) == 12, "this is dearer to compute"
            for number in range(12):
                lease.verify(number)
        counters = client.status().counters
        assert counters["not_worth_blocks"] > 0
        assert counters["ssd_read_seconds"] >= READ_SECONDS
        room = {n: v for n, v in counters.items() if n in ROOM}
        assert sum(room.values()) == 4 * MIB, "every byte is free, evictable, or says why not"
        assert 0 < counters["ssd_read_bytes_per_second"] <= 65536 / READ_SECONDS
        metrics = daemon.metrics()
        assert metrics['emberkv_store_read_seconds{source="ssd"}'] >= READ_SECONDS
        free = [metrics[f'emberkv_store_dram_free_bytes{{where="{w}"}}'] for w in FREE]
        assert free == [counters[f"dram_{where}_bytes"] for where in FREE]
        assert metrics["emberkv_store_dram_largest_free_bytes"] >= 65536 * any(free)
