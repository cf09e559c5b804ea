"""A store daemon as the global index sees it: rows, numbered events, a ring, incarnations.

`ModelDaemon` is pure; `ModelServer` serves it by gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import reduce
from operator import xor
from typing import Any

import grpc
import numpy as np

from emberkv_proto.buckets import BUCKETS, bucket_numbers
from emberkv_proto.convert import (
    batch_to_wire,
    bucket_choices_from_wire,
    bucket_rows_to_wire,
    page_to_wire,
    report_to_wire,
)
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    Event,
    EventBatch,
    Keys,
    SnapshotNeeded,
    SnapshotPage,
    TierCleared,
)
from emberkv_proto.types import (
    BucketChoice,
    BucketXors,
    EngineInfo,
    Incarnation,
    NodeId,
    NodeReport,
    Seq,
    Tier,
    TierDigest,
)
from emberkv_proto.v1 import index_pb2, index_pb2_grpc

TIERS = (Tier.DRAM, Tier.SSD)


def as_keys(numbers: Iterable[int]) -> Keys:
    return np.array(sorted(numbers), dtype=np.uint64)


def bucket_of(number: int) -> int:
    return int(bucket_numbers(as_keys([number]))[0])


class ModelDaemon:
    """The truth that an index must arrive at."""

    def __init__(self, node_id: str, ring_events: int = 1000) -> None:
        self.node_id = NodeId(node_id)
        self.ring_events = ring_events
        self.incarnation = Incarnation(1)
        self.rows: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        self.log: list[Event] = []
        self.engines: tuple[EngineInfo, ...] = ()
        self.grpc_address = ""

    @property
    def seq(self) -> Seq:
        return Seq(len(self.log))

    def store(self, tier: Tier, numbers: Iterable[int]) -> None:
        new = set(numbers) - self.rows[tier]
        if new:
            self.rows[tier] |= new
            self.log.append(BlocksStored(tier, as_keys(new)))

    def remove(self, tier: Tier, numbers: Iterable[int]) -> None:
        old = set(numbers) & self.rows[tier]
        if old:
            self.rows[tier] -= old
            self.log.append(BlocksRemoved(tier, as_keys(old)))

    def clear(self, tier: Tier) -> None:
        self.rows[tier].clear()
        self.log.append(TierCleared(tier))

    def restart(self, *, loses: tuple[Tier, ...] = ()) -> None:
        """A new life: what survived is announced again, from event 1."""
        self.incarnation = Incarnation(self.incarnation + 1)
        self.log = []
        survived, self.rows = self.rows, {tier: set() for tier in TIERS}
        for tier in TIERS:
            if tier not in loses:
                self.store(tier, survived[tier])

    def batch(self, first: int, last: int) -> EventBatch:
        return EventBatch(
            self.node_id,
            self.incarnation,
            Seq(first),
            tuple(self.log[first - 1 : last]),
            time.time(),
        )

    def can_replay(self, incarnation: int, from_seq: int) -> bool:
        oldest = max(1, self.seq - self.ring_events + 1)
        return incarnation == self.incarnation and oldest <= from_seq <= self.seq + 1

    def snapshot_needed(self) -> SnapshotNeeded:
        return SnapshotNeeded(self.incarnation, self.seq, self.node_id)

    def report(self, *, with_xors: bool = False) -> NodeReport:
        digests = tuple(
            TierDigest(
                tier, len(self.rows[tier]), reduce(xor, self.rows[tier], 0), 1 << 30, 1 << 20
            )
            for tier in TIERS
        )
        return NodeReport(
            self.node_id,
            self.incarnation,
            self.seq,
            "serving",
            digests,
            self.engines,
            self.grpc_address,
            time.time(),
            tuple(self.bucket_xors(tier) for tier in TIERS) if with_xors else (),
        )

    def bucket_xors(self, tier: Tier) -> BucketXors:
        xors = [0] * BUCKETS
        for number in self.rows[tier]:
            xors[bucket_of(number)] ^= number
        return BucketXors(tier, tuple(xors))

    def bucket_rows(self, choices: Iterable[BucketChoice]) -> list[BucketRows]:
        return [
            BucketRows(
                self.node_id,
                self.incarnation,
                self.seq,
                choice.tier,
                bucket,
                as_keys(n for n in self.rows[choice.tier] if bucket_of(n) == bucket),
            )
            for choice in choices
            for bucket in choice.buckets
        ]

    def pages(self, page_keys: int = 50) -> list[SnapshotPage]:
        cut: list[tuple[Tier, Keys]] = []
        for tier in TIERS:
            keys = as_keys(self.rows[tier])
            cut += [
                (tier, keys[start : start + page_keys]) for start in range(0, keys.size, page_keys)
            ]
        if not cut:
            cut = [(Tier.DRAM, as_keys(()))]
        return [
            SnapshotPage(
                self.node_id, self.incarnation, self.seq, tier, keys, number == len(cut) - 1
            )
            for number, (tier, keys) in enumerate(cut)
        ]


class ModelServer(index_pb2_grpc.EventsServicer):
    """Serves one model on 127.0.0.1. `port` stays over `stop` and `start`."""

    def __init__(self, daemon: ModelDaemon, heartbeat_seconds: float = 0.05) -> None:
        self.daemon = daemon
        self.heartbeat_seconds = heartbeat_seconds
        self.port = 0
        self.subscriptions: list[tuple[int, int]] = []
        self.snapshots = 0
        self.is_mute = False
        self.named = str(daemon.node_id)
        """Who it says it is in SnapshotNeeded; empty for a daemon of an older version."""
        self.knows_buckets = True
        """An older daemon does not: it ignores the fields."""
        self.sent_events = 0
        self.sent_buckets = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        index_pb2_grpc.add_EventsServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.daemon.grpc_address = self.address
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(None)
            self._server = None

    async def Subscribe(  # noqa: N802
        self, request: index_pb2.SubscribeRequest, context: Any
    ) -> None:
        daemon, life = self.daemon, self.daemon.incarnation
        self.subscriptions.append((request.incarnation, request.from_seq))
        cursor = max(1, request.from_seq)
        if not daemon.can_replay(request.incarnation, cursor):
            needed = index_pb2.SnapshotNeeded(
                incarnation=daemon.incarnation, seq=daemon.seq, node_id=self.named
            )
            await context.write(index_pb2.EventMessage(snapshot_needed=needed))
            return
        with_xors = self.knows_buckets and request.wants_bucket_xors
        choices = bucket_choices_from_wire(request.buckets) if self.knows_buckets else ()
        while daemon.incarnation == life:
            if not self.is_mute:
                if cursor <= daemon.seq:
                    last = min(daemon.seq, cursor + 9)
                    batch = batch_to_wire(daemon.batch(cursor, last))
                    self.sent_events += last + 1 - cursor
                    cursor = last + 1
                    await context.write(index_pb2.EventMessage(batch=batch))
                    continue
                for rows in daemon.bucket_rows(choices):
                    message = index_pb2.EventMessage(bucket_rows=bucket_rows_to_wire(rows))
                    await context.write(message)
                    self.sent_buckets += 1
                choices = ()
                report = report_to_wire(daemon.report(with_xors=with_xors))
                with_xors = False
                await context.write(index_pb2.EventMessage(report=report))
            await asyncio.sleep(self.heartbeat_seconds)

    async def Snapshot(  # noqa: N802
        self, request: index_pb2.SnapshotRequest, context: Any
    ) -> None:
        self.snapshots += 1
        for page in self.daemon.pages():
            await context.write(page_to_wire(page))
