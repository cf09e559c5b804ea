"""A node that pulls from a `peer_node`, over a clock that tests move on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from client_sdk.transport.connections import ReadLimits
from emberkv_proto.types import BlockHash, Incarnation, NodeId
from store_daemon.peer_health import HealthLimits
from store_daemon.peer_transfer import TransferLimits
from store_daemon.peers import PeerPuller
from store_daemon.pull_limits import PullLimits
from store_daemon.transport.tcp import TcpTransport
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.peer_doubles import MemoryIndex, MemoryTarget, chain, small_namespace
from tests.helpers.peer_node import PeerNode
from tests.helpers.waiting import until

NAMESPACE = small_namespace()
BLOCKS = 40
OPEN_SECONDS = 60.0
"""Of breakers, and of what is remembered of failures; tests skip it."""
MIB = 1 << 20


class SkippingClock:
    """The time, of which a test may skip some."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped

    def skip(self, seconds: float) -> None:
        self._skipped += seconds


@dataclass
class Here:
    puller: PeerPuller
    index: MemoryIndex
    target: MemoryTarget
    owner: PeerNode
    hashes: list[BlockHash]
    transport: TcpTransport
    clock: SkippingClock

    async def pull(self, blocks: int = BLOCKS, deadline: float = 30.0) -> int:
        return await self.puller.pull(NAMESPACE, None, self.hashes[:blocks], self.target, deadline)

    @property
    def failures(self) -> dict[str, int]:
        return dict(self.puller.counters.failures)

    async def has_landed_some(self) -> None:
        await until(lambda: bool(self.target.landed))


@asynccontextmanager
async def pulling_node(owner: PeerNode) -> AsyncIterator[Here]:
    """A node that pulls BLOCKS blocks from `owner`; nothing may be left of it at either side."""
    hashes = chain(NAMESPACE, BLOCKS)
    owner.store.put(hashes)
    index = MemoryIndex()
    index.holds("peer", owner.grpc_address, hashes)
    with AnonymousPool(8 * MIB) as pool:
        target = MemoryTarget(pool.view, NAMESPACE)
        transport = TcpTransport(Incarnation(8), read_limits=ReadLimits(progress_seconds=20.0))
        transport.register(pool.view)
        clock = SkippingClock()
        puller = PeerPuller(
            NodeId("here"),
            pool.view,
            index,
            transport,
            limits=PullLimits(
                nodes_seconds=0.01, failed_block_seconds=0.0, failed_peer_seconds=0.0
            ),
            transfer_limits=TransferLimits(most_blocks_per_read=4),
            health_limits=HealthLimits(open_seconds=OPEN_SECONDS, memory_seconds=0.0),
            clock=clock,
        )
        yield Here(puller, index, target, owner, hashes, transport, clock)
        puller.check_integrity()
        await puller.close()
        puller.check_integrity()
        transport.shutdown()
        target.check()
        await assert_no_lease_is_left(owner)


async def assert_no_lease_is_left(owner: PeerNode) -> None:
    """Releases follow a pull in the background."""
    deadline = time.monotonic() + 30
    while owner.store.leases and time.monotonic() < deadline:  # noqa: ASYNC110 - another loop
        await asyncio.sleep(0.01)
    assert not owner.store.leases
