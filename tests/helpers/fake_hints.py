"""A daemon that only takes hints: says what the test wants, notes what was asked and ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from emberkv_proto.convert import hashes_from_wire
from emberkv_proto.types import BlockHash
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from store_daemon.grpc_errors import Context


@dataclass
class TakenHint:
    """One hint as it came."""

    request: store_pb2.HintRequest
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """By whatever door."""

    @property
    def hashes(self) -> list[BlockHash]:
        return list(hashes_from_wire(self.request.hashes))


class FakeHints(store_pb2_grpc.HintsServicer):
    """`readable` blocks are there, and the hint is over, once `go_on` is set."""

    def __init__(self) -> None:
        self.hints: list[TakenHint] = []
        self.came = asyncio.Event()
        self.go_on = asyncio.Event()
        self.readable_at_first = 0
        self.readable = 0
        self.fails = False
        self.is_stopped = False
        """Takes hints and says nothing."""
        self.address = ""

    async def Prefetch(  # noqa: N802
        self, request: store_pb2.HintRequest, context: Context
    ) -> None:
        hint = TakenHint(request)
        self.hints.append(hint)
        self.came.set()
        try:
            if self.fails:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not today")
            if self.is_stopped:
                await self.go_on.wait()
            await context.write(
                store_pb2.HintProgress(
                    scheduled_blocks=len(hint.hashes), readable_blocks=self.readable_at_first
                )
            )
            await self.go_on.wait()
            await context.write(
                store_pb2.HintProgress(
                    scheduled_blocks=len(hint.hashes), readable_blocks=self.readable, is_done=True
                )
            )
        finally:
            hint.ended.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeHints]:
        server = grpc.aio.server()
        store_pb2_grpc.add_HintsServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0.1)
