"""The unreliable channel with a real Redis behind the index: its rows follow the visible ones.

Beside what happens to the stream, Redis is emptied, loses a row, and gets another writer. Whenever
the writer says that a node's rows in Redis are those of the index, they are; a writer that was
replaced changes nothing any more; and in the end they are the daemon's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from emberkv_proto.types import NodeId, Tier
from global_index import redis_index, redis_schema, redis_writer
from global_index.dict_index import DictIndex
from global_index.index import Holder
from global_index.redis_index import FencedError, RedisIndex, RowsLostError, Token
from global_index.redis_link import RedisLink
from global_index.redis_mirror import MirroredIndex
from global_index.redis_registry import RedisRegistry
from global_index.redis_schema import RedisSchema
from global_index.redis_settings import RedisKeys
from global_index.redis_walk import decode
from global_index.redis_writer import OwnNode, RedisWriter
from tests.helpers.model_daemon import TIERS, as_keys
from tests.helpers.redis_server import RedisServer
from tests.model.unreliable_channel import ADDRESS, STEPS, UNIVERSE, Rows, UnreliableChannel

CAPACITY_BLOCKS = 1024
QUEUE_ROWS = 60
"""So few that queues overflow, and nodes are compared."""
AUDIT_SECONDS = 2.0
LEASE_SECONDS = 3600.0
FEW_TAGS = 2
SETTLE_TURNS = 30
WEIGHTED_WITH_REDIS = [
    step
    for step, weight in {
        **STEPS,
        "mirror": 12,
        "redis_is_emptied": 1,
        "redis_loses_rows": 1,
        "writer_is_replaced": 1,
    }.items()
    for _ in range(weight)
]
T = TypeVar("T")


class RedisRuns:
    """One connection and one loop for many runs. `close` it."""

    def __init__(self, server: RedisServer) -> None:
        self._loop = asyncio.new_event_loop()
        self.link = RedisLink(RedisKeys(redis_url=server.url))
        self._linking = self._loop.create_task(self.link.run())
        self.do(self._connected())
        self.tokens = 0

    async def _connected(self) -> None:
        for _ in range(1000):
            if self.link.is_up:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"Redis does not answer: {self.link.problem}")

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._linking.cancel()
        self.do(self._ended())
        self._loop.close()

    async def _ended(self) -> None:
        await asyncio.gather(self._linking, return_exceptions=True)


@contextmanager
def redis_runs(server: RedisServer) -> Iterator[RedisRuns]:
    """With few tags: reading all rows of a node, which runs do often, is quicker."""
    with (
        patch.object(redis_schema, "TAGS", redis_schema.TAGS[:FEW_TAGS]),
        patch.object(redis_index, "TAGS", redis_schema.TAGS[:FEW_TAGS]),
        patch.object(redis_writer, "TAGS", redis_schema.TAGS[:FEW_TAGS]),
    ):
        runs = RedisRuns(server)
        try:
            yield runs
        finally:
            runs.close()


class RedisChannel(UnreliableChannel):
    """As its base; each further step is a method as well."""

    def __init__(self, runs: RedisRuns, seed: int) -> None:
        self.runs = runs
        self.schema = RedisSchema()
        self.mirrored = MirroredIndex(DictIndex(CAPACITY_BLOCKS), QUEUE_ROWS)
        self.writers = 0
        self.redis_has_drifted = False
        self.compared = 0
        self.replaced: tuple[RedisIndex, Holder] | None = None
        super().__init__(self.mirrored, seed)
        runs.do(runs.link.client.flushall())
        self.new_writer()

    def new_writer(self) -> None:
        self.writers += 1
        self.token: Token | None = None
        self.registry = RedisRegistry(
            self.runs.link, self.schema, f"writer-{self.writers}", LEASE_SECONDS
        )
        self.writer = RedisWriter(
            self.runs.link,
            self.schema,
            self.registry,
            self.mirrored,
            self.find,
            AUDIT_SECONDS,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )

    def find(self, node_id: NodeId) -> OwnNode | None:
        node = self.directory.followed_at(ADDRESS)
        if self.token is None or node is None or node.node_id != node_id:
            return None
        return OwnNode(
            ADDRESS,
            self.token,
            node_id,
            node.holder,
            node.liveness,
            lambda: self.directory.node(node_id, self.now),
        )

    # Steps

    def mirror(self) -> None:
        """What the index's tasks do in turn: keep the lease, then write."""
        waits = self.is_calm or self.random.random() < 0.6
        self.runs.do(self._turn(waits))
        self.writer.check_integrity()
        self.redis_is_what_the_writer_claims()

    async def _turn(self, waits: bool) -> None:
        held = {ADDRESS: self.token} if self.token is not None else {}
        beat = await self.registry.beat(held, [] if held else [ADDRESS])
        self.token = self.token if ADDRESS in beat.kept else beat.won.get(ADDRESS)
        node = self.directory.followed_at(ADDRESS)
        own = [node.node_id] if node is not None and self.token is not None else []
        before = self.writer.counts.compared
        await self.writer.turn(own)
        if waits and self.writer._comparing is not None:
            await asyncio.wait({self.writer._comparing}, timeout=20)
            await self.writer.turn(own)
        self.compared += self.writer.counts.compared - before

    def redis_is_emptied(self) -> None:
        self.runs.do(self.runs.link.client.flushall())
        self.redis_has_drifted = True

    def redis_loses_rows(self) -> None:
        found = self.writer._nodes.get(self.daemon.node_id)
        rows = self.writer._rows
        if found is None or rows is None:
            return
        try:
            self.runs.do(rows.apply_removed(found.number, self.tier(), as_keys(self.blocks())))
        except (FencedError, RowsLostError):
            return
        self.redis_has_drifted = True

    def writer_is_replaced(self) -> None:
        """It dies; another process gets the lease. What it still writes afterwards is refused."""
        found, rows = self.writer._nodes.get(self.daemon.node_id), self.writer._rows
        self.replaced = (rows, found.number) if found is not None and rows is not None else None
        self.runs.do(self.writer.close())
        lease = self.schema.registry(f"lease:{ADDRESS}")
        self.runs.do(self.runs.link.client.delete(lease))
        self.new_writer()

    def operator_removes_node(self) -> None:
        found = self.writer._nodes.get(self.daemon.node_id)
        own = self.find(self.daemon.node_id)
        if found is not None and own is not None:
            try:
                self.runs.do(self.writer.forget(own))
                assert not any(self.redis_rows(found.number).values())
            except (FencedError, RowsLostError):
                pass  # Redis was emptied, or has another writer: the order fails and is repeated
        super().operator_removes_node()

    # What must hold

    def redis_rows(self, number: Holder) -> Rows:
        values = self.runs.do(
            RedisIndex(self.runs.link.client, self.schema).values(as_keys(UNIVERSE))
        )
        window = decode(values)
        assert window.malformed == 0
        found: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        for place, holder, tiers in zip(
            window.places.tolist(), window.numbers.tolist(), window.tiers.tolist(), strict=True
        ):
            if holder == number:
                for tier in TIERS:
                    if tiers >> (tier - 1) & 1:
                        found[tier].add(UNIVERSE[place])
        return {tier: frozenset(keys) for tier, keys in found.items()}

    def redis_is_what_the_writer_claims(self) -> None:
        found = self.writer._nodes.get(self.daemon.node_id)
        if found is None or not found.is_equal or found.holder is None:
            return
        node = self.directory.followed_at(ADDRESS)
        if node is None or node.holder != found.holder:
            return
        if not self.mirrored.is_complete(found.holder) or self.mirrored.has_changes(found.holder):
            return
        rows, visible = self.redis_rows(found.number), self.visible_rows()
        if self.redis_has_drifted:
            self.redis_has_drifted = rows != visible
            return
        assert rows == visible, "Redis has other rows than the index"
        if self.replaced is not None:
            late, number = self.replaced
            self.replaced = None
            try:
                self.runs.do(late.apply_stored(number, Tier.DRAM, as_keys(UNIVERSE[:3])))
            except (FencedError, RowsLostError):
                return
            raise AssertionError("a writer that was replaced still wrote")

    def settle(self) -> None:
        super().settle()
        self.redis_settles()

    def mend(self) -> None:
        super().mend()
        self.redis_settles()
        self.redis_loses_rows()  # the audit by count must find it
        self.redis_settles()

    def redis_settles(self) -> None:
        for turn in range(SETTLE_TURNS):
            self.now += 1.0
            self.mirror()
            found = self.writer._nodes.get(self.daemon.node_id)
            is_quiet = found is not None and found.is_equal and not self.redis_has_drifted
            if is_quiet and turn > AUDIT_SECONDS:
                break
        assert not self.redis_has_drifted, "rows that Redis lost were not written again"
        found = self.writer._nodes[self.daemon.node_id]
        assert found.is_equal
        assert self.redis_rows(found.number) == {t: frozenset(self.daemon.rows[t]) for t in TIERS}
        rows = self.writer._rows
        assert rows is not None
        self.runs.do(rows.check_integrity())
