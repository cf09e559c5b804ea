"""Keeps the rows of this process's nodes in Redis equal to its own index.

Each node goes through: registered (it has a number), claimed (its fence is ours), compared (what
Redis has is made equal, and only what differs is written), then followed by its queue of changes.
Whatever goes wrong leads back to comparing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from emberkv_proto.events import Keys
from emberkv_proto.types import NodeId, Tier
from global_index.index import Holder
from global_index.ingest import Exactness
from global_index.membership import Liveness
from global_index.redis_index import Change, FencedError, RedisIndex, RowsLostError, Token
from global_index.redis_link import CALL_SECONDS, RedisAwayError, RedisFullError, RedisLink
from global_index.redis_mirror import MirroredIndex
from global_index.redis_record import NodeRecord, fixed_part
from global_index.redis_registry import LeftNode, RedisRegistry
from global_index.redis_schema import TAGS, RedisSchema, tags_of
from global_index.views import NodeView

log = logging.getLogger(__name__)

RECORD_SECONDS = 1.0
"""How often a record's moving parts (seq, digests) are written."""
T = TypeVar("T")
FORGET_SECONDS = 600.0
FULL_SECONDS = 5.0
"""A full Redis is tried again after that."""


@dataclass(frozen=True, slots=True)
class OwnNode:
    """A node whose daemon's lease this process holds, as of now."""

    address: str
    token: Token
    node_id: NodeId
    holder: Holder
    liveness: Liveness
    view: Callable[[], NodeView]
    """The rest of what is known; costs more, and is that of the moment it is called."""


@dataclass(slots=True)
class WriterCounts:
    """What writing went through; never goes down."""

    rows: int = 0
    """Changes that came through the queues."""
    compared: int = 0
    """Times that a node was compared as a whole."""
    repaired: int = 0
    """Rows that differed when compared."""
    fenced: int = 0
    lost: int = 0
    """Times that Redis did not know our fence: it was emptied."""
    audits: int = 0
    drifted: int = 0
    """Audits that found another number of rows in Redis."""


@dataclass(slots=True)
class _Mirrored:
    address: str
    token: Token
    number: Holder
    holder: Holder | None = None
    """Whose changes are queued for this number; None: it must be compared."""
    is_equal: bool = False
    is_comparing: bool = False
    audited_at: float = 0.0
    published: NodeRecord | None = None
    published_at: float = 0.0


class RedisWriter:
    """Writes for the nodes that it is given at each turn. One turn at a time.

    `find` gives a node as it is at that moment; None when it is not ours any more.
    """

    def __init__(
        self,
        link: RedisLink,
        schema: RedisSchema,
        registry: RedisRegistry,
        index: MirroredIndex,
        find: Callable[[NodeId], OwnNode | None],
        audit_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._schema = schema
        self._registry = registry
        self._index = index
        self._find = find
        self._audit_seconds = audit_seconds
        self._clock = clock
        self._wall = wall
        self._nodes: dict[NodeId, _Mirrored] = {}
        self._comparing: asyncio.Task[None] | None = None
        self._compared: NodeId | None = None
        """Whose rows `_comparing` compares, or compared last."""
        self._not_before = 0.0
        self._rows: RedisIndex | None = None
        self.counts = WriterCounts()

    async def turn(self, node_ids: Sequence[NodeId]) -> None:
        """Write what is new of each node; begin to compare one that must be.

        What goes wrong with a node costs that node a comparison, later.
        """
        if self._clock() < self._not_before or not self._link.is_up:
            return
        for gone in self._nodes.keys() - set(node_ids):
            self._drop(gone)
        if self._comparing is not None and self._comparing.done():
            ended, self._comparing = self._comparing, None
            ended.result()
        for node_id in node_ids:
            await self._guarded(node_id, partial(self._advance, node_id))

    async def close(self) -> None:
        """End a comparison that is under way."""
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.gather(self._comparing, return_exceptions=True)
            self._comparing = None
        self.drop_all()

    def alive_numbers(self) -> list[Holder]:
        """Numbers of those nodes that are alive, to vouch for."""
        return sorted(
            mirrored.number
            for node_id, mirrored in self._nodes.items()
            if (node := self._find(node_id)) and node.liveness is Liveness.OK
        )

    def numbers_at(self, addresses: Collection[str]) -> list[Holder]:
        """Numbers of the nodes behind these addresses."""
        return [m.number for m in self._nodes.values() if m.address in addresses]

    def exact_nodes(self) -> int:
        """Nodes whose rows in Redis are those of this process, but for what is queued."""
        return sum(mirrored.is_equal for mirrored in self._nodes.values())

    def drop_all(self) -> None:
        """Redis is away: what is queued is lost, and everything is compared when it is back."""
        for node_id in [*self._nodes]:
            self._drop(node_id)

    async def forget(self, node: OwnNode) -> None:
        """Take a node's rows and record out of Redis: it was removed by order.

        Raises:
            UnavailableError: Redis is away, or another writer has the node.
        """
        rows = self._rows_of_link()
        number = await self._registry.register(node.address, node.token, node.node_id)
        self._drop(node.node_id)
        if self._comparing is not None and self._compared == node.node_id:
            await asyncio.wait([self._comparing])  # what it is about to write would stay
        await self._take_out(rows, LeftNode(node.node_id, number, node.token))

    async def forget_left(self, left: LeftNode) -> None:
        """Take out a node that nobody follows any more, under the token of its last writer.

        Whoever follows it again meanwhile has a newer token, and this ends.

        Raises:
            FencedError: a newer writer has the node, or another process was faster.
            UnavailableError: Redis is away.
        """
        await self._take_out(RedisIndex(self._link.client, self._schema), left)

    async def _take_out(self, rows: RedisIndex, left: LeftNode) -> None:
        await self._call(rows.claim, left.number, left.token)
        await self._call(rows.remove_holder, left.number, seconds=FORGET_SECONDS)
        await self._registry.forget(left.node_id, left.token)
        await self._call(rows.release, left.number)

    def check_integrity(self) -> None:
        self._index.check_integrity()
        holders = [m.holder for m in self._nodes.values() if m.holder is not None]
        assert len(set(holders)) == len(holders), "two nodes share a holder"
        numbers = [m.number for m in self._nodes.values()]
        assert len(set(numbers)) == len(numbers), "two nodes share a number"

    async def _guarded(self, node_id: NodeId, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except RedisAwayError:
            self._drop(node_id)
        except FencedError as error:
            self.counts.fenced += 1
            self._drop(node_id)
            log.warning("%s", error)
        except RowsLostError as error:
            self.counts.lost += 1
            self._drop(node_id)
            log.warning("%s; its rows are written anew", error)
        except RedisFullError as error:
            self._not_before = self._clock() + FULL_SECONDS
            self._drop(node_id)
            log.warning("%s", error)
        except Exception:
            self._drop(node_id)  # what was taken from its queue may not be written
            raise

    async def _advance(self, node_id: NodeId) -> None:
        rows = self._rows_of_link()
        mirrored = await self._admitted(rows, node_id)
        node = self._find(node_id)  # as of now: nothing waits between this and taking its rows
        if mirrored is None or mirrored.is_comparing or node is None:
            return
        if mirrored.holder == node.holder and self._index.is_complete(node.holder):
            if self._is_quiet(mirrored, node):
                return
            await self._write(rows, mirrored, node)
        elif self._comparing is None:
            mirrored.is_comparing, self._compared = True, node_id
            self._comparing = asyncio.create_task(
                self._guarded(node_id, partial(self._compare, rows, mirrored, node_id))
            )

    async def _admitted(self, rows: RedisIndex, node_id: NodeId) -> _Mirrored | None:
        node = self._find(node_id)
        mirrored = self._nodes.get(node_id)
        if node is None or (mirrored is not None and mirrored.token == node.token):
            return mirrored
        self._drop(node_id)
        number = await self._registry.register(node.address, node.token, node_id)
        await self._call(rows.claim, number, node.token, self._rows_in_a_tier(node.holder))
        mirrored = self._nodes[node_id] = _Mirrored(node.address, node.token, number)
        await self._publish(mirrored, node, self._record(mirrored, node))
        return mirrored

    def _is_quiet(self, mirrored: _Mirrored, node: OwnNode) -> bool:
        """Nothing to write, and nothing due."""
        known = mirrored.published
        return (
            known is not None
            and known.view.liveness is node.liveness
            and not self._index.has_changes(node.holder)
            and self._clock() - mirrored.published_at < RECORD_SECONDS
        )

    async def _write(self, rows: RedisIndex, mirrored: _Mirrored, node: OwnNode) -> None:
        # All of this is of one moment, so the record never says more than what is written.
        record = self._record(mirrored, node)
        is_due = self._clock() - mirrored.audited_at >= self._audit_seconds
        expected = {tier: self._index.digest(node.holder, tier).blocks for tier in Tier}
        changes = self._index.take(node.holder)
        if changes:
            self.counts.rows += await self._apply(rows, mirrored.number, changes)
        if is_due:
            mirrored.audited_at = self._clock()
            if not await self._counts_match(rows, mirrored, expected):
                self._index.unwatch(node.holder)
                mirrored.holder, mirrored.is_equal = None, False
                return
        if rows.is_cut_too_coarsely(mirrored.number, self._rows_in_a_tier(node.holder)):
            self._index.unwatch(node.holder)
            mirrored.holder, mirrored.is_equal = None, False  # comparing cuts it anew
            return
        known = mirrored.published
        if (
            known is None
            or fixed_part(record) != fixed_part(known)
            or self._clock() - mirrored.published_at >= RECORD_SECONDS
        ):
            await self._publish(mirrored, node, record)

    async def _compare(self, rows: RedisIndex, mirrored: _Mirrored, node_id: NodeId) -> None:
        """Make Redis equal to the index as of now; what changes meanwhile waits in the queue."""
        node = self._find(node_id)
        if node is None or self._nodes.get(node_id) is not mirrored:
            return
        if mirrored.holder is not None:
            self._index.unwatch(mirrored.holder)
        mirrored.holder, mirrored.is_equal = node.holder, False
        self._index.watch(node.holder)
        view = node.view()
        record = self._record(mirrored, node)
        grows = rows.is_cut_too_coarsely(mirrored.number, self._rows_in_a_tier(node.holder))
        own = {tier: _by_tag(self._index.rows(node.holder, tier)) for tier in Tier}
        for tag in range(len(TAGS)):
            theirs = await self._call(rows.rows_of_tag, mirrored.number, tag)
            changes = []
            for tier in Tier:
                ours = own[tier][tag]
                gone = np.setdiff1d(theirs[tier], ours, assume_unique=True)
                new = np.setdiff1d(ours, theirs[tier], assume_unique=True)
                changes += [Change(tier, gone, stores=False), Change(tier, new, stores=True)]
            self.counts.repaired += await self._apply(rows, mirrored.number, changes)
            if grows:
                ours_of_tag = {tier: own[tier][tag] for tier in Tier}
                await self._call(rows.reslice, mirrored.number, tag, ours_of_tag)
            if self._nodes.get(node_id) is not mirrored:
                return
        self.counts.compared += 1
        mirrored.is_equal, mirrored.is_comparing = True, False
        mirrored.audited_at = self._clock()
        await self._publish(mirrored, node, replace(record, view=view))

    def _rows_in_a_tier(self, holder: Holder) -> int:
        return max(self._index.digest(holder, tier).blocks for tier in Tier)

    async def _counts_match(
        self, rows: RedisIndex, mirrored: _Mirrored, expected: dict[Tier, int]
    ) -> bool:
        """Count the node's rows in Redis, which has all that was taken from the queue."""
        self.counts.audits += 1
        for tier in Tier:
            found = await self._call(rows.count, mirrored.number, tier)
            if found != expected[tier]:
                self.counts.drifted += 1
                log.warning(
                    "Redis has %d rows of %s in %s, wanted %d: they are compared",
                    *(found, mirrored.address, tier.name, expected[tier]),
                )
                return False
        return True

    async def _apply(self, rows: RedisIndex, number: Holder, changes: Sequence[Change]) -> int:
        """A trip at a time, so that each has the deadline of any call."""
        changed = 0
        for some in rows.trips(number, changes):
            changed += await self._call(rows.send, number, some)
        return changed

    async def _call(
        self, ask: Callable[..., Awaitable[T]], *arguments: object, seconds: float = CALL_SECONDS
    ) -> T:
        return await self._link.call(lambda _: ask(*arguments), seconds)

    async def _publish(self, mirrored: _Mirrored, node: OwnNode, record: NodeRecord) -> None:
        known = mirrored.published
        has_news = known is None or fixed_part(record) != fixed_part(known)
        await self._registry.publish(record, node.token, has_news=has_news)
        mirrored.published, mirrored.published_at = record, self._clock()

    def _record(self, mirrored: _Mirrored, node: OwnNode) -> NodeRecord:
        view = node.view()
        if not mirrored.is_equal and view.exactness is Exactness.EXACT:
            view = replace(view, exactness=Exactness.DEGRADED)
        return NodeRecord(
            mirrored.number, self._registry.writer, node.address, view, round(self._wall(), 3)
        )

    def _rows_of_link(self) -> RedisIndex:
        client = self._link.client
        if self._rows is None or self._rows.client is not client:
            self.drop_all()
            self._rows = RedisIndex(client, self._schema)
        return self._rows

    def _drop(self, node_id: NodeId) -> None:
        mirrored = self._nodes.pop(node_id, None)
        if mirrored is not None and mirrored.holder is not None:
            self._index.unwatch(mirrored.holder)


def _by_tag(keys: Keys) -> list[Keys]:
    tags = tags_of(keys).astype(np.uint8)
    cuts = np.cumsum(np.bincount(tags, minlength=len(TAGS)))[:-1]
    return np.split(keys[np.argsort(tags, kind="stable")], cuts)
