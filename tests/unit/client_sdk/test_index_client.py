"""The index client against a real gRPC server that answers, lags, refuses, dies and returns."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from client_sdk.aio import timeout
from client_sdk.index_client import ERROR_METADATA_KEY, IndexClient, IndexedNode
from emberkv_proto.convert import keys_from_wire
from emberkv_proto.errors import (
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
)
from emberkv_proto.types import Incarnation, NodeHit, NodeId, Seq, Tier, TierDigest
from emberkv_proto.v1 import index_pb2, index_pb2_grpc

KEYS = np.array([7, 8, 9], dtype=np.uint64)


class Servicer(index_pb2_grpc.IndexServicer):
    """Says that node n holds as many blocks as were asked."""

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self.error_name = ""

    async def Query(  # noqa: N802
        self, request: index_pb2.QueryRequest, context: Any
    ) -> index_pb2.QueryResponse:
        await asyncio.sleep(self.delay_seconds)
        if self.error_name:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "so it is",
                trailing_metadata=((ERROR_METADATA_KEY, self.error_name),),
            )
        count = len(keys_from_wire(request.keys))
        hit = index_pb2.NodeHit(node_id="n", hit_blocks=count, dram_blocks=1, ssd_blocks=count - 1)
        return index_pb2.QueryResponse(hits=[hit])

    async def Nodes(  # noqa: N802
        self, request: index_pb2.NodesRequest, context: Any
    ) -> index_pb2.NodesResponse:
        digest = index_pb2.TierDigest(tier=2, blocks=4, xor=1 << 63)  # type: ignore[arg-type]
        node = index_pb2.NodeState(
            node_id="n",
            incarnation=3,
            seq=9,
            state="ok",
            exactness="exact",
            grpc_address="h:1",
            tiers=[digest],
            lag_seconds=0.5,
            gaps=1,
            snapshots=2,
        )
        return index_pb2.NodesResponse(nodes=[node])


@asynccontextmanager
async def served(servicer: Servicer, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    index_pb2_grpc.add_IndexServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(port: int, seconds: float = 30.0) -> AsyncIterator[IndexClient]:
    client = IndexClient(f"127.0.0.1:{port}", timeout_seconds=seconds)
    try:
        yield client
    finally:
        await client.close()


async def test_query_and_nodes_come_back_as_value_types() -> None:
    async with served(Servicer()) as port, connected(port) as client:
        assert await client.query(KEYS) == [NodeHit(NodeId("n"), 3, 1, 2)]
        assert await client.nodes() == [
            IndexedNode(
                NodeId("n"),
                Incarnation(3),
                Seq(9),
                "ok",
                "exact",
                "h:1",
                (TierDigest(Tier.DRAM, 4, 1 << 63),),
                (),
                0.5,
                1,
                2,
            )
        ]


async def test_slow_index_is_a_deadline_error_in_time() -> None:
    servicer = Servicer()
    servicer.delay_seconds = 3.0
    async with timeout(30), served(servicer) as port, connected(port) as client:
        with pytest.raises(DeadlineError):
            await client.query(KEYS, timeout_seconds=0.2)


async def test_index_away_is_unavailable_and_back_again_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with connected(port) as client:
        async with timeout(30):
            with pytest.raises(UnavailableError):
                await client.query(KEYS)
        async with served(Servicer(), port), timeout(30):
            while True:
                try:
                    assert (await client.query(KEYS))[0].hit_blocks == 3
                    break
                except UnavailableError:
                    await asyncio.sleep(0.05)


async def test_error_of_the_index_keeps_its_type() -> None:
    servicer = Servicer()
    servicer.error_name = "InvalidRequestError"
    async with served(servicer) as port, connected(port) as client:
        with pytest.raises(InvalidRequestError, match="so it is"):
            await client.query(KEYS)


async def test_overlong_chain_is_refused_here() -> None:
    async with connected(1) as client:
        with pytest.raises(InvalidRequestError):
            await client.query(np.ones(65537, dtype=np.uint64))


async def test_close_lets_a_call_in_flight_finish_and_a_later_call_connects_anew() -> None:
    servicer = Servicer()
    servicer.delay_seconds = 0.3
    async with served(servicer) as port, connected(port) as client:
        query = asyncio.create_task(client.query(KEYS))
        await asyncio.sleep(0.1)
        await client.close()
        assert len(await query) == 1
        assert len(await client.query(KEYS)) == 1


def test_sdk_base_needs_no_grpcio() -> None:
    code = "import sys, client_sdk, client_sdk.settings; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
