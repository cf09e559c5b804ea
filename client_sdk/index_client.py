"""Async gRPC client of the global index, for daemons, routers and the command line.

Of the SDK's modules only this, the hint client's and those of remote sessions need grpcio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from client_sdk import aio
from client_sdk.tls import Tls, open_channel
from emberkv_proto.convert import (
    digest_from_wire,
    engine_from_wire,
    hits_from_wire,
    page_from_wire,
    u64s_to_wire,
)
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    InvalidRequestError,
    UnavailableError,
    error_from_wire,
)
from emberkv_proto.events import SnapshotPage
from emberkv_proto.types import ChainHits, EngineInfo, Incarnation, NodeHit, NodeId, Seq, TierDigest
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

ERROR_METADATA_KEY = "emberkv-error"
"""Trailing metadata of a failed call: class name in emberkv_proto.errors."""

WATCH_SILENCE_SECONDS = 15.0
"""A watch that brings nothing for as long is broken: the index says something every 5 s."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The library's own bound of two minutes would keep a restarted server away for as long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class IndexedNode:
    """A node as the global index sees it."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    """Last event applied."""
    state: str
    """"ok", "suspect", "gone" or "removed"."""
    exactness: str
    """"exact", "degraded" or "syncing"."""
    grpc_address: str
    tiers: tuple[TierDigest, ...]
    engines: tuple[EngineInfo, ...]
    lag_seconds: float
    gaps: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class RedisState:
    """How an index that is shared through Redis stands to it."""

    is_up: bool
    problem: str
    """Why not; empty while it is up."""
    writer: str
    """The index's name in Redis."""
    writers: int
    """Processes that share the daemons."""
    leases: int
    """Daemons that this one follows for all."""
    exact_nodes: int
    """Of these, how many nodes' rows in Redis are as they should be."""
    queued_rows: int


@dataclass(frozen=True, slots=True)
class TracedNode:
    """Which blocks of a chain a node has: a byte a block, 1 HBM, 2 DRAM, 4 SSD, added."""

    node_id: NodeId
    state: str
    exactness: str
    tiers: bytes


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """Which blocks an engine has in its own HBM, as `TracedNode`; the rest is its node's."""

    engine: EngineInfo
    node_id: NodeId
    state: str
    """Of its event stream: "current" or "away"."""
    tiers: bytes


@dataclass(frozen=True, slots=True)
class TracedChain:
    """All nodes, and all engines whose events are followed."""

    nodes: tuple[TracedNode, ...]
    engines: tuple[TracedEngine, ...]


@dataclass(frozen=True, slots=True)
class WatchedNodes:
    """Nodes that changed and nodes that are known no longer. Whole: `nodes` are all there are."""

    is_whole: bool
    nodes: tuple[IndexedNode, ...]
    removed: tuple[NodeId, ...]


class IndexClient:
    """Asks the index. Connects at the first call, and again whenever the connection broke.

    Every call has a deadline. Raises UnavailableError or DeadlineError when the index is away,
    other EmberErrors as the index sends them. Belongs to one event loop; close it there.
    """

    def __init__(
        self, address: str, *, timeout_seconds: float = 1.0, tls: Tls | None = None
    ) -> None:
        self.address = address
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._channel: grpc.aio.Channel | None = None

    async def query(
        self, keys: npt.NDArray[np.uint64], *, timeout_seconds: float | None = None
    ) -> list[NodeHit]:
        """How much of the chain with these index keys each node holds; nodes without are left out.

        A hint: the node decides when it is asked for the bytes.
        """
        return [*(await self.hits(keys, timeout_seconds=timeout_seconds)).nodes]

    async def hits(
        self, keys: npt.NDArray[np.uint64], *, timeout_seconds: float | None = None
    ) -> ChainHits:
        """The same, and beside it what each engine finds in its own HBM or on its node."""
        if len(keys) > MAX_BLOCKS_PER_CALL:
            raise InvalidRequestError(f"query of {len(keys)} keys; limit is {MAX_BLOCKS_PER_CALL}")
        request = index_pb2.QueryRequest(keys=u64s_to_wire(keys))
        try:
            response = await self._stub().Query(request, timeout=self._timeout(timeout_seconds))
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"index {self.address}") from None
        return hits_from_wire(response)

    async def nodes(self, *, timeout_seconds: float | None = None) -> list[IndexedNode]:
        """All nodes that the index knows, in whatever state."""
        response = await self._ask_nodes(timeout_seconds)
        return [_node_from_wire(node) for node in response.nodes]

    async def redis(self, *, timeout_seconds: float | None = None) -> RedisState | None:
        """How the index stands to Redis; None when it is not shared through one."""
        response = await self._ask_nodes(timeout_seconds)
        if not response.HasField("redis"):
            return None
        state = response.redis
        return RedisState(
            *(state.is_up, state.problem, state.writer, state.writers, state.leases),
            *(state.exact_nodes, state.queued_rows),
        )

    async def _ask_nodes(self, timeout_seconds: float | None) -> index_pb2.NodesResponse:
        request = index_pb2.NodesRequest()
        try:
            response: index_pb2.NodesResponse = await self._stub().Nodes(
                request, timeout=self._timeout(timeout_seconds)
            )
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"index {self.address}") from None
        return response

    async def explain(
        self, keys: npt.NDArray[np.uint64], *, timeout_seconds: float | None = None
    ) -> TracedChain:
        """Who has which blocks of a chain, nodes left out of answers included. For people."""
        request = index_pb2.QueryRequest(keys=u64s_to_wire(keys))
        try:
            response = await self._stub().Explain(request, timeout=self._timeout(timeout_seconds))
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"index {self.address}") from None
        return TracedChain(
            tuple(
                TracedNode(NodeId(node.node_id), node.state, node.exactness, node.tiers)
                for node in response.nodes
            ),
            tuple(
                TracedEngine(
                    engine_from_wire(traced.engine),
                    NodeId(traced.node_id),
                    traced.state,
                    traced.tiers,
                )
                for traced in response.engines
            ),
        )

    async def watch(self) -> AsyncGenerator[WatchedNodes, None]:
        """Yield all nodes, then those that change, until the index goes. Close it (`aclosing`).

        One with nothing in it comes every few seconds. Raises UnavailableError when the index is
        away or has too many watchers, DeadlineError when it falls silent.
        """
        call = self._stub().Watch(index_pb2.WatchRequest())
        async with aclosing(self._messages(call, WATCH_SILENCE_SECONDS)) as messages:
            async for message in messages:
                yield WatchedNodes(
                    message.is_whole,
                    tuple(_node_from_wire(node) for node in message.nodes),
                    tuple(NodeId(node_id) for node_id in message.removed),
                )
        raise UnavailableError(f"index {self.address} ended the watch")

    async def snapshot(
        self, node_ids: Sequence[NodeId] = (), *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows of these nodes, or of all, node by node; `is_last` ends a node.

        A node whose rows are not exact is left out. `timeout_seconds` is for each page: the index
        may have to wait for its turn. Raises as `query` does.
        """
        call = self._stub().Snapshot(index_pb2.CopyRequest(node_ids=node_ids))
        async with aclosing(self._messages(call, self._timeout(timeout_seconds))) as messages:
            async for message in messages:
                yield page_from_wire(message)

    async def _messages(self, call: Any, seconds: float) -> AsyncGenerator[Any, None]:
        """What a stream brings, each message within `seconds` of the one before."""
        try:
            while True:
                async with aio.timeout(seconds):
                    message = await call.read()
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                yield message
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"index {self.address}") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise DeadlineError(f"index {self.address} fell silent") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Drop the connection, letting calls in flight finish. A later call connects anew."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=self._timeout_seconds)

    def _stub(self) -> index_pb2_grpc.IndexStub:
        if self._channel is None:
            self._channel = open_channel(self.address, self._tls, CHANNEL_OPTIONS)
        return index_pb2_grpc.IndexStub(self._channel)  # type: ignore[no-untyped-call]

    def _timeout(self, seconds: float | None) -> float:
        return self._timeout_seconds if seconds is None else seconds


def ember_error(error: grpc.aio.AioRpcError, server: str) -> EmberError:
    """The error a server of ours raised, or what its absence means to the caller."""
    message = error.details() or ""
    metadata: dict[str, str | bytes] = dict(tuple(error.trailing_metadata() or ()))  # type: ignore[arg-type]
    if ERROR_METADATA_KEY in metadata:
        return error_from_wire(str(metadata[ERROR_METADATA_KEY]), message)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{server} did not answer in time")
    return UnavailableError(f"{server}: {error.code().name}: {message}")


def _node_from_wire(message: index_pb2.NodeState) -> IndexedNode:
    return IndexedNode(
        NodeId(message.node_id),
        Incarnation(message.incarnation),
        Seq(message.seq),
        message.state,
        message.exactness,
        message.grpc_address,
        tuple(digest_from_wire(digest) for digest in message.tiers),
        tuple(engine_from_wire(engine) for engine in message.engines),
        message.lag_seconds,
        message.gaps,
        message.snapshots,
    )
