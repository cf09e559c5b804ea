"""gRPC service Index over a `GlobalIndex`: convert, call, convert back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

import grpc
from google.protobuf.message import Message

from client_sdk import aio
from client_sdk.index_client import CHANNEL_OPTIONS, ERROR_METADATA_KEY
from client_sdk.tls import bind
from emberkv_proto.convert import (
    digest_to_wire,
    engine_to_wire,
    hits_to_wire,
    keys_from_wire,
    page_to_wire,
)
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    InvalidRequestError,
    PreflightError,
)
from emberkv_proto.types import NodeId
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL
from global_index.directory import MAX_NODES
from global_index.embedded import GlobalIndex
from global_index.explaining import explain
from global_index.views import NodeView

log = logging.getLogger(__name__)

TAKE_SECONDS = 30.0
"""A reader of a stream that lets a message wait for as long is cut off: others want its place."""
MAX_COPIES = 4
"""Snapshots sent at the same time; more wait."""

_Context = grpc.aio.ServicerContext[Any, Any]
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class IndexServicer(index_pb2_grpc.IndexServicer):
    """`observe` gets the seconds that each query took."""

    def __init__(self, index: GlobalIndex, observe: Callable[[float], None]) -> None:
        self._index = index
        self._observe = observe
        self._copy_gate = asyncio.Semaphore(MAX_COPIES)

    async def Query(  # noqa: N802
        self, request: index_pb2.QueryRequest, context: _Context
    ) -> index_pb2.QueryResponse:
        async with _errors_answered(context):
            keys = keys_from_wire(request.keys)
            if keys.size > MAX_BLOCKS_PER_CALL:
                raise InvalidRequestError(
                    f"a chain of {keys.size} blocks; at most {MAX_BLOCKS_PER_CALL} can be asked for"
                )
        began = time.perf_counter()
        hits = await self._index.answer(keys)
        self._observe(time.perf_counter() - began)
        return hits_to_wire(hits)

    async def Explain(  # noqa: N802
        self, request: index_pb2.QueryRequest, context: _Context
    ) -> index_pb2.ExplainResponse:
        async with _errors_answered(context):
            traces = await explain(self._index, keys_from_wire(request.keys))
        return index_pb2.ExplainResponse(
            nodes=[
                index_pb2.NodeTrace(
                    node_id=node.node_id,
                    state=node.state,
                    exactness=node.exactness,
                    tiers=node.tiers,
                )
                for node in traces.nodes
            ],
            engines=[
                index_pb2.EngineTrace(
                    engine=engine_to_wire(engine.engine),
                    node_id=engine.node_id,
                    state=engine.state,
                    tiers=engine.tiers,
                )
                for engine in traces.engines
            ],
        )

    async def Watch(  # noqa: N802
        self, request: index_pb2.WatchRequest, context: _Context
    ) -> None:
        async with _errors_answered(context), aclosing(self._index.watch.watch()) as changes:
            async for change in changes:
                views = {view.node_id: view for view in self._index.nodes()}
                nodes = [views[node_id] for node_id in change.changed if node_id in views]
                message = index_pb2.WatchResponse(
                    is_whole=change.is_whole,
                    nodes=[_view_to_wire(view) for view in nodes],
                    removed=change.removed,
                )
                await _write(context, message)

    async def Snapshot(  # noqa: N802
        self, request: index_pb2.CopyRequest, context: _Context
    ) -> None:
        async with _errors_answered(context), self._copy_gate:
            if len(request.node_ids) > MAX_NODES:
                raise InvalidRequestError(f"more than {MAX_NODES} nodes are asked for")
            node_ids = [NodeId(node_id) for node_id in request.node_ids]
            async with aclosing(self._index.copy_nodes(node_ids)) as pages:
                async for page in pages:
                    await _write(context, page_to_wire(page))

    async def Nodes(  # noqa: N802
        self, request: index_pb2.NodesRequest, context: _Context
    ) -> index_pb2.NodesResponse:
        response = index_pb2.NodesResponse(
            nodes=[_view_to_wire(view) for view in self._index.nodes()]
        )
        if self._index.shared is not None:
            state = self._index.shared.state()
            response.redis.CopyFrom(index_pb2.RedisState(**asdict(state)))
        return response


@asynccontextmanager
async def _errors_answered(context: _Context) -> AsyncIterator[None]:
    """End the call with what was raised: its code, its message and, as metadata, its type."""
    try:
        yield
    except EmberError as error:
        await context.abort(
            _STATUS[error.code], str(error), ((ERROR_METADATA_KEY, type(error).__name__),)
        )


async def _write(context: _Context, message: Message) -> None:
    """Send one message of a stream. Raises DeadlineError when its reader does not take it."""
    try:
        async with aio.timeout(TAKE_SECONDS):
            await context.write(message)
    except (asyncio.TimeoutError, TimeoutError):
        raise DeadlineError(f"a message was not taken within {TAKE_SECONDS} s") from None


def _view_to_wire(view: NodeView) -> index_pb2.NodeState:
    return index_pb2.NodeState(
        node_id=view.node_id,
        incarnation=view.incarnation,
        seq=view.seq,
        state=view.liveness.value,
        exactness=view.exactness.value,
        grpc_address=view.grpc_address,
        tiers=[digest_to_wire(digest) for digest in view.tiers],
        engines=[engine_to_wire(engine) for engine in view.engines],
        lag_seconds=view.lag_seconds,
        gaps=view.counts.gaps,
        snapshots=view.counts.snapshots,
    )


async def start_server(
    index: GlobalIndex, host: str, port: int, observe: Callable[[float], None]
) -> tuple[grpc.aio.Server, int]:
    """Serve on host:port (0 picks one); return the server and its port.

    Raises PreflightError when the port is taken. A router that embeds the index serves the same.
    """
    server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
    index_pb2_grpc.add_IndexServicer_to_server(  # type: ignore[no-untyped-call]
        IndexServicer(index, observe), server
    )
    try:
        bound = bind(server, f"{host}:{port}", index.tls)
    except RuntimeError as error:
        raise PreflightError(
            f"cannot listen on {host}:{port}; set index.host or index.port"
        ) from error
    await server.start()
    return server, bound
