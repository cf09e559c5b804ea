"""Routers' hints: a chain is brought into DRAM for as long as the call lasts."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from emberkv_proto.convert import hashes_from_wire, namespace_id_from_wire
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NodeId
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from store_daemon.grpc_errors import Context, errors_answered
from store_daemon.ports import Followed, Hinted, HintStore

MAX_NODE_ID_BYTES = 253
MAX_HINT_SECONDS = 600.0
PROGRESS_SECONDS = 0.1
"""How often a router hears what has come, while something comes."""


class HintService(store_pb2_grpc.HintsServicer):
    """Serves Hints. `enter` gives the store, or raises UnavailableError."""

    def __init__(self, enter: Callable[[], HintStore]) -> None:
        self._enter = enter

    async def Prefetch(  # noqa: N802
        self, request: store_pb2.HintRequest, context: Context
    ) -> None:
        async with errors_answered(context), aclosing(self._bring(request)) as progress:
            async for said in progress:
                await context.write(said)

    async def _bring(
        self, request: store_pb2.HintRequest
    ) -> AsyncGenerator[store_pb2.HintProgress, None]:
        """However this ends, the prefetch has ended too."""
        hashes = hashes_from_wire(request.hashes)
        if not hashes:
            raise InvalidRequestError("a hint without hashes")
        seconds = _seconds(request.deadline_seconds, "deadline_seconds")
        hinted = self._enter().hint(
            namespace_id_from_wire(request.namespace_id), hashes, seconds, followed_node(request)
        )
        try:
            said = -1
            while True:
                is_done, readable = hinted.is_done, hinted.readable_blocks()
                if is_done or readable != said:
                    yield _progress(hinted, readable)
                if is_done:
                    return
                said = readable
                await hinted.ended(PROGRESS_SECONDS)
        finally:
            hinted.cancel()


def _progress(hinted: Hinted, readable: int) -> store_pb2.HintProgress:
    return store_pb2.HintProgress(
        scheduled_blocks=hinted.scheduled_blocks, readable_blocks=readable, is_done=hinted.is_done
    )


def followed_node(request: store_pb2.HintRequest | store_pb2.PrefetchRequest) -> Followed | None:
    """Raises InvalidRequestError for a node that is none, or seconds out of range."""
    if not request.source_node_id:
        return None
    if len(request.source_node_id) > MAX_NODE_ID_BYTES:
        raise InvalidRequestError("source_node_id must be a node id")
    patience = _seconds(request.patience_seconds, "patience_seconds")
    return Followed(NodeId(request.source_node_id), patience)


def _seconds(value: float, name: str) -> float:
    if not (math.isfinite(value) and 0 < value <= MAX_HINT_SECONDS):
        raise InvalidRequestError(f"{name} {value} is not in 0..{MAX_HINT_SECONDS}")
    return value
