"""Ten thousand times: lease a chain, fill the store until it must evict, read the chain."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest

from emberkv_proto.types import AcquirePolicy
from tests.helpers.store import FakeClock, SmallStore, chain, small_namespace

ROUNDS = 10_000
NAMESPACE = small_namespace(part_bytes=4000)
CHAIN_BLOCKS = 5


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_leased_chain_is_never_evicted_nor_overwritten(tmp_path: Path) -> None:
    rng = random.Random(11)
    clock = FakeClock()
    small = SmallStore(tmp_path, extents=6, ssd_segments=0, clock=clock)
    session = small.open(NAMESPACE)
    recent: deque[int] = deque(maxlen=12)
    hits = misses = 0
    for number in range(ROUNDS):
        clock.now += 0.001
        small.put(session, chain(NAMESPACE, CHAIN_BLOCKS, seed=number, shared=1))
        recent.append(number)
        wanted = chain(NAMESPACE, CHAIN_BLOCKS, seed=rng.choice(recent), shared=1)
        found = small.store.probe(session, wanted).hit_blocks
        lease = small.store.acquire(session, wanted, AcquirePolicy.BEST_EFFORT, 0.0)
        if lease is None:
            misses += 1
            assert found == 0
            continue
        assert lease.ready == found, "what a lookup promised is not leased"
        # Between lookup and read, others want more than the whole pool.
        for pressure in range(2):
            small.put(session, chain(NAMESPACE, 2, seed=ROUNDS + 2 * number + pressure))
        small.assert_readable(lease)
        hits += 1
        small.store.release(session, [lease.id])
        if number % 500 == 0:
            small.check_integrity()
    assert hits > ROUNDS // 2
    evicted = small.store.holdings.counters["evicted_blocks"]
    assert evicted > ROUNDS, f"only {evicted} evictions: the store was never under pressure"
    assert len(small.store.lender.leases) == 0
    small.check_integrity()
    await small.close()
