"""Many indexes that want a snapshot of one daemon, some of which never read it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import numpy as np
import pytest

from client_sdk import aio
from client_sdk.index_client import CHANNEL_OPTIONS
from emberkv_proto.types import Tier
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.ingest import Exactness
from store_daemon import grpc_server
from store_daemon.publisher import MAX_SNAPSHOTS
from tests.helpers.peer_doubles import small_namespace
from tests.helpers.peer_node import PeerNode, peer_node

pytestmark = pytest.mark.timeout(300)
ROWS = 200_000
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
"""A reader that sleeps soon stops its writer."""


async def fill(node: PeerNode) -> None:
    keys = np.random.default_rng(4).integers(1, 2**64, ROWS, np.uint64)
    node.residency.store(Tier.DRAM, set(keys.tolist()))


async def stalled_reader(stack: AsyncExitStack, address: str) -> object:
    """Take one page of a snapshot, and no more."""
    channel = grpc.aio.insecure_channel(address, options=(*CHANNEL_OPTIONS, *SMALL_WINDOW))
    await stack.enter_async_context(channel)
    stub = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Snapshot(index_pb2.SnapshotRequest())
    assert len((await call.read()).keys) > 0
    return call


async def test_readers_that_stopped_do_not_keep_the_others_from_their_snapshots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "WRITE_SECONDS", 3.0)
    with peer_node(small_namespace()) as node:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fill(node), node.loop))
        async with AsyncExitStack() as stack, aio.timeout(240):
            for _ in range(MAX_SNAPSHOTS):
                await stalled_reader(stack, node.grpc_address)
            section = IndexSection(
                nodes=(node.grpc_address,), capacity_blocks=2 * ROWS, backend="python"
            )
            indexes = [await stack.enter_async_context(GlobalIndex(section)) for _ in range(3)]
            for index in indexes:
                while not any(  # noqa: ASYNC110
                    view.exactness is Exactness.EXACT and view.tiers[0].blocks == ROWS
                    for view in index.nodes()
                ):
                    await asyncio.sleep(0.05)
