"""Follows one store daemon: its event stream, and snapshots when `ingest` wants one.

One task per address and one thing at a time: either it reads the stream or it fetches a snapshot.
Every wait has a deadline; a daemon that is away costs a retry with back-off, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from client_sdk import aio, faults
from client_sdk.index_client import CHANNEL_OPTIONS
from client_sdk.tls import Tls, open_channel
from emberkv_proto.convert import (
    batch_from_wire,
    bucket_choice_to_wire,
    bucket_rows_from_wire,
    page_from_wire,
    report_from_wire,
)
from emberkv_proto.errors import EmberError, InvalidRequestError, UnavailableError
from emberkv_proto.events import SnapshotNeeded
from emberkv_proto.types import Incarnation, NodeId, Seq
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from global_index.directory import NodeDirectory, StreamStep

log = logging.getLogger(__name__)

RETRY_FIRST_SECONDS = 0.1
RETRY_MAX_SECONDS = 2.0
SNAPSHOT_SECONDS = 300.0
"""A whole snapshot; each of its pages has the shorter deadline of any message."""


@dataclass(slots=True)
class StreamCounts:
    """What one connection went through; never goes down."""

    connects: int = 0
    losses: int = 0
    malformed: int = 0
    received_bytes: int = 0
    """Of messages, as protobuf."""
    repair_bytes: int = 0
    """Of those, what carried buckets."""


class Subscriber:
    """Keeps `directory` fed from one address until it is cancelled."""

    def __init__(
        self,
        address: str,
        directory: NodeDirectory,
        snapshot_gate: asyncio.Semaphore,
        *,
        name: str,
        message_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self._tls = tls
        self.counts = StreamCounts()
        self._directory = directory
        self._gate = snapshot_gate
        self._name = name
        self._message_seconds = message_seconds
        self._clock = clock
        self._wall = wall
        self._got_message = False

    async def run(self) -> None:
        """Follow for ever. Only cancellation and faults of our own get out."""
        delay = RETRY_FIRST_SECONDS
        was_lost = False
        while True:
            self._got_message = False
            try:
                async with open_channel(self.address, self._tls, CHANNEL_OPTIONS) as channel:
                    stub = index_pb2_grpc.EventsStub(channel)  # type: ignore[no-untyped-call]
                    await self._follow(stub)
            except (grpc.aio.AioRpcError, asyncio.TimeoutError, TimeoutError, EmberError) as error:
                self.counts.losses += 1
                self.counts.malformed += isinstance(error, InvalidRequestError)
                if self._got_message or not was_lost:
                    log.warning("stream of %s is lost: %s", self.address, _reason(error))
                was_lost = True
            delay = RETRY_FIRST_SECONDS if self._got_message else min(2 * delay, RETRY_MAX_SECONDS)
            # Jitter keeps an index's many subscribers from knocking in step.
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311

    async def _follow(self, stub: Any) -> None:
        """Alternate between stream and snapshot; raise when the connection fails."""
        while True:
            if self._directory.wants_snapshot(self.address, self._clock()):
                async with self._gate:
                    await self._fetch_snapshot(stub)
            await self._read_stream(stub)

    async def _read_stream(self, stub: Any) -> None:
        """Read until a replay or a snapshot is wanted.

        Raises UnavailableError when the daemon ends the stream and nothing is left to ask.
        """
        position = self._directory.position(self.address)
        call = stub.Subscribe(
            index_pb2.SubscribeRequest(
                incarnation=position.incarnation,
                from_seq=position.from_seq,
                subscriber=self._name,
                wants_bucket_xors=position.wants_bucket_xors,
                buckets=[bucket_choice_to_wire(choice) for choice in position.buckets],
            )
        )
        try:
            self._directory.on_stream_started(self.address)
            while True:
                message = await self._within(call.read)
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    raise UnavailableError("the daemon ended the stream")
                if not self._got_message:
                    self.counts.connects += 1
                    self._got_message = True
                size = message.ByteSize()
                self.counts.received_bytes += size
                if message.HasField("bucket_rows") or message.report.bucket_xors:
                    self.counts.repair_bytes += size
                step = self._take(message)
                while step is StreamStep.COMPARE:
                    await asyncio.sleep(0)  # queries come between two steps
                    step = self._directory.compare(self.address, self._clock())
                if step is not StreamStep.CONTINUE:
                    return
        finally:
            call.cancel()

    def _take(self, message: index_pb2.EventMessage) -> StreamStep:
        now = self._clock()
        match message.WhichOneof("kind"):
            case "batch":
                if not faults.hit(faults.INDEX_BATCH):
                    return StreamStep.CONTINUE
                batch = batch_from_wire(message.batch)
                return self._directory.on_batch(self.address, batch, now, self._wall())
            case "report":
                report = report_from_wire(message.report)
                return self._directory.on_report(self.address, report, now, self._wall())
            case "bucket_rows":
                rows = bucket_rows_from_wire(message.bucket_rows)
                return self._directory.on_bucket_rows(self.address, rows, now)
            case "snapshot_needed":
                needed = SnapshotNeeded(
                    Incarnation(message.snapshot_needed.incarnation),
                    Seq(message.snapshot_needed.seq),
                    NodeId(message.snapshot_needed.node_id) or None,
                )
                return self._directory.on_snapshot_needed(self.address, needed, now)
            case kind:
                raise InvalidRequestError(f"event message of kind {kind} is unknown")

    async def _fetch_snapshot(self, stub: Any) -> None:
        self._directory.on_snapshot_started(self.address)
        was_answered = False
        call = stub.Snapshot(index_pb2.SnapshotRequest(), timeout=SNAPSHOT_SECONDS)
        try:
            while True:
                message = await self._within(call.read)
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                self._got_message = was_answered = True
                self.counts.received_bytes += message.ByteSize()
                faults.hit(faults.INDEX_PAGE)
                page = page_from_wire(message)
                self._directory.on_page(self.address, page, self._clock())
                await asyncio.sleep(0)  # queries come between two pages
        finally:
            call.cancel()
            if was_answered:
                self._directory.on_snapshot_ended(self.address, self._clock())
            else:
                self._directory.on_snapshot_unanswered(self.address, self._clock())

    async def _within(self, read: Callable[[], Awaitable[Any]]) -> Any:
        async with aio.timeout(self._message_seconds):
            return await read()


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no message in time"
