"""Steps that tests of the store have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash
from store_daemon.leases import Lease
from store_daemon.sessions import Session
from tests.helpers.store import SmallStore

PATIENCE_SECONDS = 60.0


def evict_all(small: SmallStore) -> None:
    """Everything that may leave DRAM does."""
    holdings = small.store.holdings
    while (victim := holdings.queue.oldest_of_all(holdings.catalog.is_evictable)) is not None:
        holdings.evict(victim)
    holdings.publish()


async def on_ssd_only(
    small: SmallStore, namespace: Namespace, hashes: Sequence[BlockHash]
) -> Session:
    """Store blocks, write them back, and evict all of DRAM."""
    session = small.open(namespace)
    for first in range(0, len(hashes), 4):
        run = hashes[first : first + 4]
        parent = hashes[first - 1] if first else None
        assert small.put(session, run, parent) == len(run)
        await small.flush()
        evict_all(small)
    return session


def acquire(
    small: SmallStore,
    session: Session,
    hashes: Sequence[BlockHash],
    policy: AcquirePolicy = AcquirePolicy.WAIT_COMPLETE,
    seconds: float = 30.0,
) -> Lease:
    lease = small.store.acquire(session, hashes, policy, seconds)
    assert lease is not None
    return lease


async def wait_all(small: SmallStore, session: Session, lease: Lease) -> Lease:
    while not lease.is_complete:
        lease = await small.store.wait(session, lease.id, lease.ready, 10.0)
    return lease


async def until(fact: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fact():
        assert time.monotonic() < deadline, f"in vain: {what}"
        await asyncio.sleep(0.002)


def pins(small: SmallStore) -> int:
    """Of all linked blocks."""
    return sum(block.pins for block in small.store.holdings.catalog.blocks.values())
