"""A chain's end is evicted in one pass, and the same blocks go in the same order as one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from emberkv_proto.events import BlocksRemoved
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import AcquirePolicy, SaltId, Tier
from store_daemon.block import Block
from store_daemon.holdings import Holdings
from store_daemon.run_catalog import RunCatalog
from tests.helpers.store import (
    BLOCK_TOKENS,
    SmallStore,
    chain,
    hybrid_namespace,
    small_namespace,
)

NAMESPACES = (small_namespace(), small_namespace(3000, model="other"))
CHAIN_BLOCKS = 12

Step = tuple[int, int, int, int, int]
"""Namespace, seed, shared blocks, blocks, and what is done."""


def _steps(seed: int) -> list[Step]:
    choose = random.Random(seed).randint
    return [
        (choose(0, 1), choose(0, 5), choose(0, 4), choose(1, CHAIN_BLOCKS), choose(0, 5))
        for _ in range(80)
    ]


def _watermark(small: SmallStore, low: float) -> None:
    dram = small.settings.dram.model_copy(update={"low_watermark": low})
    small.store.holdings.reconfigure(dram)


async def _play(directory: Path, steps: list[Step]) -> tuple[list[int], dict[Tier, set[int]]]:
    """What left DRAM, in order, and what is resident in the end."""
    small = SmallStore(directory, extents=40, ssd_segments=0)  # never full: only trims evict
    sessions = [small.open(namespace) for namespace in NAMESPACES]
    leases = []
    try:
        for which, seed, shared, blocks, action in steps:
            session, small.clock.now = sessions[which], small.clock.now + 2.0
            hashes = chain(NAMESPACES[which], blocks, seed, min(shared, blocks))
            if action < 3:
                salt = SaltId(bytes([seed]) * 16) if action == 2 else None
                staged = small.store.stage(session, hashes, None, salt)
                granted = [h for h, state in zip(hashes, staged.states, strict=True) if not state]
                if granted:
                    sums = [9] * len(granted)
                    small.store.commit(session, staged.stage_id, granted, sums)
            elif action == 3:
                lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 0.0)
                if lease is not None:
                    leases.append((session, lease.id))
            elif action == 4 and leases:
                holder, lease_id = leases.pop(0)
                small.store.release(holder, [lease_id])
            else:
                _watermark(small, (1 + seed) / 40)
                small.store.holdings.trim()
                small.store.holdings.publish()
            small.store.check_integrity()
        gone = [
            int(key)
            for event in small.book.events
            if isinstance(event, BlocksRemoved)
            for key in event.keys
        ]
        return gone, small.book.resident
    finally:
        await small.close()


@pytest.mark.parametrize("seed", range(6))
async def test_runs_leave_as_their_blocks_would_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    steps = _steps(seed)
    by_runs = await _play(tmp_path_factory.mktemp("runs"), steps)
    monkeypatch.setattr(Holdings, "_run_to_trim", lambda self, victim, part, most: [])
    assert by_runs == await _play(tmp_path_factory.mktemp("single"), steps)


async def test_a_chain_is_trimmed_in_one_pass_down_to_the_watermark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    drop_run = RunCatalog.drop_run

    def count(self: RunCatalog, run: list[Block]) -> object:
        runs.append(len(run))
        return drop_run(self, run)

    monkeypatch.setattr(RunCatalog, "drop_run", count)
    small = SmallStore(tmp_path, ssd_segments=0)
    hashes = chain(NAMESPACES[0], 40)
    small.put(small.open(NAMESPACES[0]), hashes)
    _watermark(small, 0.5)
    assert small.store.holdings.trim() is False
    assert len(runs) <= 6, "block by block"
    kept = small.store.probe(small.open(NAMESPACES[0]), hashes).hit_blocks
    assert small.pool.slots.usage <= 0.5
    assert kept == 40 - sum(runs), "the chain's end goes, its begin stays"
    assert small.store.holdings.counters["evicted_blocks"] == sum(runs)
    small.store.holdings.publish()
    small.store.check_integrity()
    await small.close()


@pytest.mark.parametrize("by_runs", [False, True])
async def test_old_windows_go_before_what_is_younger_of_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_runs: bool
) -> None:
    if not by_runs:
        monkeypatch.setattr(Holdings, "_run_to_trim", lambda self, victim, part, most: [])
    plain = NAMESPACES[0]
    windowed = hybrid_namespace(
        Group(GroupKind.FULL, 1, 5000),
        Group(GroupKind.SLIDING_WINDOW, 1, 30000, window_tokens=BLOCK_TOKENS),
    )
    small = SmallStore(tmp_path, extents=40, ssd_segments=0)
    ours, theirs = chain(plain, 4), chain(windowed, 6)
    session, parts = small.open(plain), [small.open(windowed, part) for part in range(2)]
    small.put(session, ours)
    for one in parts:
        small.put(one, theirs)
    # The chain's end is the oldest, then the windows that the hit below does not reach.
    for holder, asked in ((session, ours[:3]), (parts[0], theirs)):
        lease = small.store.acquire(holder, asked, AcquirePolicy.BEST_EFFORT, 0.0)
        assert lease is not None
        assert lease.usable == len(asked)
        small.store.release(holder, [lease.id])
    slots = small.pool.slots
    end_bytes = small.store.holdings.catalog.blocks[ours[-1]].dram_bytes
    _watermark(small, (slots.used_bytes - end_bytes - 1) / slots.capacity_bytes)
    small.store.holdings.trim()
    assert small.store.probe(session, ours).hit_blocks == 3
    assert small.store.holdings.counters["evicted_parts"] == 1
    small.store.holdings.publish()
    small.store.check_integrity()
    await small.close()


async def test_a_chain_forged_across_namespaces_leaves_namespace_by_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[int] = []
    drop_run = RunCatalog.drop_run

    def look(self: RunCatalog, run: list[Block]) -> object:
        mixed.append(len({block.namespace.id for block in run}))
        return drop_run(self, run)

    monkeypatch.setattr(RunCatalog, "drop_run", look)
    small = SmallStore(tmp_path, ssd_segments=0)
    first, second = (chain(namespace, 3) for namespace in NAMESPACES)
    small.put(small.open(NAMESPACES[0]), first)
    forger = small.open(NAMESPACES[1])
    staged = small.store.stage(forger, second, first[-1])
    small.store.commit(forger, staged.stage_id, second, [9] * 3)
    _watermark(small, 0.01)
    small.store.holdings.trim()
    small.store.holdings.publish()
    assert not small.book.resident[Tier.DRAM]
    assert mixed == [1, 1]
    small.store.check_integrity()
    await small.close()
