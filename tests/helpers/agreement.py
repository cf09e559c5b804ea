"""Whether the global index says of a node what the node's own catalog says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

import grpc
import numpy as np

from client_sdk.index_client import IndexClient, IndexedNode
from emberkv_proto import convert
from emberkv_proto.errors import DeadlineError, UnavailableError
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import BlockHash, NodeHit, Tier, TierDigest
from emberkv_proto.v1 import index_pb2, index_pb2_grpc

CALL_SECONDS = 20.0
POLL_SECONDS = 0.05
TIERS = (Tier.DRAM, Tier.SSD)


@dataclass(frozen=True)
class Catalog:
    """A daemon's own inventory, right after event `seq`: index keys by tier."""

    node_id: str
    incarnation: int
    seq: int
    rows: dict[Tier, frozenset[int]]

    @property
    def digests(self) -> dict[Tier, tuple[int, int]]:
        """Count and XOR of the keys, by tier."""
        return {tier: (len(keys), reduce(xor, keys, 0)) for tier, keys in self.rows.items()}

    def hit_of(self, hashes: Sequence[BlockHash]) -> NodeHit:
        """What the index should answer for a chain: its leading run, by fastest tier."""
        dram = ssd = 0
        for key in index_keys(hashes).tolist():
            if key in self.rows[Tier.DRAM]:
                dram += 1
            elif key in self.rows[Tier.SSD]:
                ssd += 1
            else:
                break
        return NodeHit(self.node_id, dram + ssd, dram, ssd)  # type: ignore[arg-type]


async def catalog_of(address: str) -> Catalog:
    """Ask the daemon at this gRPC address for a snapshot."""
    rows: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
    page = None
    async with grpc.aio.insecure_channel(address) as channel:
        stub = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
        async for message in stub.Snapshot(index_pb2.SnapshotRequest(), timeout=CALL_SECONDS):
            page = convert.page_from_wire(message)
            rows[page.tier] |= set(page.keys.tolist())
    assert page is not None, "a snapshot without a page"
    frozen = {tier: frozenset(keys) for tier, keys in rows.items()}
    return Catalog(page.node_id, page.incarnation, page.seq, frozen)


def differences(node: IndexedNode, catalog: Catalog) -> list[str]:
    """In which way the index's view of a node is not its catalog's."""
    found = []
    if node.exactness != "exact" or node.state != "ok":
        found.append(f"index is {node.exactness} about a node that is {node.state}")
    if (node.incarnation, node.seq) != (catalog.incarnation, catalog.seq):
        found.append(
            f"index is at {node.incarnation}/{node.seq},"
            f" catalog at {catalog.incarnation}/{catalog.seq}"
        )
    seen = _by_tier(node.tiers)
    for tier, digest in catalog.digests.items():
        if seen.get(tier, (0, 0)) != digest:
            found.append(f"{tier.name}: index counts {seen.get(tier)}, catalog {digest}")
    return found


def await_agreement(index_address: str, daemon_address: str, seconds: float) -> Catalog:
    """Wait until the index is exact and equal to the daemon's catalog; return that.

    Raises AssertionError with the last differences. Not from inside an event loop.
    """
    return asyncio.run(_await_agreement(index_address, daemon_address, seconds))


def wrong_hits(
    index_address: str, catalog: Catalog, chains: Sequence[Sequence[BlockHash]]
) -> list[str]:
    """Ask the index for each chain; say where its answer for the node is not the catalog's."""
    return asyncio.run(_wrong_hits(index_address, catalog, chains))


async def _await_agreement(index_address: str, daemon_address: str, seconds: float) -> Catalog:
    deadline = time.monotonic() + seconds
    index = IndexClient(index_address, timeout_seconds=CALL_SECONDS)
    found = ["the index does not know the node"]
    try:
        while True:
            catalog = await catalog_of(daemon_address)
            with contextlib.suppress(UnavailableError, DeadlineError):
                for node in await index.nodes():
                    if node.node_id == catalog.node_id:
                        found = differences(node, catalog)
            if not found:
                return catalog
            assert time.monotonic() < deadline, f"no agreement in {seconds} s: {'; '.join(found)}"
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await index.close()


async def _wrong_hits(
    index_address: str, catalog: Catalog, chains: Sequence[Sequence[BlockHash]]
) -> list[str]:
    wrong = []
    index = IndexClient(index_address, timeout_seconds=CALL_SECONDS)
    try:
        for chain in chains:
            hits = await index.query(np.asarray(index_keys(chain)))
            seen = [hit for hit in hits if hit.node_id == catalog.node_id]
            wanted = catalog.hit_of(chain)
            if seen != ([wanted] if wanted.hit_blocks else []):
                wrong.append(f"chain {chain[0].hex()[:16]}: index says {seen}, catalog {wanted}")
    finally:
        await index.close()
    return wrong


def _by_tier(digests: Sequence[TierDigest]) -> dict[Tier, tuple[int, int]]:
    return {digest.tier: (digest.blocks, digest.xor) for digest in digests}
