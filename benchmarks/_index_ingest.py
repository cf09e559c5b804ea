"""Questions while 64 nodes tell their events: both on one event loop, as in a router.

Batches come as their bytes on the wire and go through `NodeDirectory`, like those of a daemon's
stream but for the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np

from benchmarks._figure import Figure, Options
from benchmarks._index_load import EVENT_BLOCKS, NODES, Keys
from emberkv_proto import convert
from emberkv_proto.events import BlocksRemoved, BlocksStored, EventBatch
from emberkv_proto.types import Incarnation, NodeId, Seq, Tier
from emberkv_proto.v1 import index_pb2
from global_index.directory import NodeDirectory
from global_index.membership import Membership
from global_index.memory_index import MemoryIndex, warm_kernels

CHAIN_BLOCKS = 1024
EVENTS_PER_BATCH = 8
ASK_EVERY_SECONDS = 0.002
TOLD_PER_SECOND = 200_000
"""Blocks, over all nodes: some 130 M tokens a second at 64 tokens a block, stored and removed."""


def ingest_figures(options: Options) -> Iterator[Figure]:
    warm_kernels()
    chains = 1000 if options.quick else 5000
    directory = NodeDirectory(MemoryIndex(1 << 24), Membership(60.0, 600.0))
    rng = np.random.default_rng(5)
    nodes = [_Node(number, directory) for number in range(NODES)]
    asked = [rng.integers(1, 1 << 63, CHAIN_BLOCKS, dtype=np.uint64) for _ in range(chains)]
    for number, chain in enumerate(asked):
        nodes[number % NODES].keep(chain)
    seconds = 4.0 if options.quick else 15.0
    quiet = asyncio.run(_ask(directory, asked, [], seconds))
    busy = asyncio.run(_ask(directory, asked, nodes, seconds))
    told = sum(node.told for node in nodes) / seconds / 1e3
    directory.check_integrity()
    for part in (50, 99):
        yield Figure(
            f"query_{CHAIN_BLOCKS}_blocks_p{part}_while_{NODES}_nodes_tell_{told:.0f}k_blocks_a_s",
            float(np.percentile(busy, part)) * 1e6,
            "us",
            "the same loop without events",
            float(np.percentile(quiet, part)) * 1e6,
            len(busy),
        )


class _Node:
    """One daemon's events: chains are stored, and removed a while later."""

    def __init__(self, number: int, directory: NodeDirectory) -> None:
        self._address = f"node-{number}:1"
        self._id = NodeId(f"node-{number}")
        self._directory = directory
        self._rng = np.random.default_rng(1000 + number)
        self._seq = 1
        self.told = 0
        directory.add_source(self._address)
        directory.on_stream_started(self._address)

    def keep(self, chain: Keys) -> None:
        self._tell([BlocksStored(Tier.DRAM, chain)])

    async def tell_for_ever(self) -> None:
        """Half of the events store a new chain, half remove an older one, leaves first."""
        pause = NODES * EVENTS_PER_BATCH * EVENT_BLOCKS / TOLD_PER_SECOND
        kept: list[Keys] = []
        await asyncio.sleep(pause * self._rng.random())
        due = time.monotonic()
        while True:
            chain = self._rng.integers(1, 1 << 63, EVENTS_PER_BATCH * EVENT_BLOCKS, dtype=np.uint64)
            kept.append(chain)
            await self._tell_parts(BlocksStored, np.split(chain, EVENTS_PER_BATCH))
            if len(kept) > 20:
                old = np.split(kept.pop(0), EVENTS_PER_BATCH)
                await self._tell_parts(BlocksRemoved, old[::-1])
                due += pause
            due += pause
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _tell_parts(
        self, kind: type[BlocksStored] | type[BlocksRemoved], parts: list[Keys]
    ) -> None:
        self._tell([kind(Tier.DRAM, part) for part in parts])
        self.told += sum(part.size for part in parts)
        await asyncio.sleep(0)

    def _tell(self, events: list[BlocksStored | BlocksRemoved]) -> None:
        batch = EventBatch(self._id, Incarnation(1), Seq(self._seq), tuple(events), time.time())
        self._seq += len(events)
        data = convert.batch_to_wire(batch).SerializeToString()
        back = convert.batch_from_wire(index_pb2.EventBatch.FromString(data))
        self._directory.on_batch(self._address, back, time.monotonic(), time.time())


async def _ask(
    directory: NodeDirectory, chains: list[Keys], nodes: list[_Node], seconds: float
) -> list[float]:
    """Seconds from the moments when questions were due to their answers."""
    tasks = [asyncio.create_task(node.tell_for_ever()) for node in nodes]
    taken = []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        due = time.monotonic() + ASK_EVERY_SECONDS
        await asyncio.sleep(ASK_EVERY_SECONDS)
        hits = directory.query(chains[number % len(chains)])
        taken.append(time.monotonic() - due)
        assert hits[0].hit_blocks == CHAIN_BLOCKS
        number += 1
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
    return taken
