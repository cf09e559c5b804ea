"""The index that several processes share through Redis: leases, mirroring, answers.

Each process follows the daemons whose leases it holds, keeps their rows in its own index and
mirrors them to Redis. What others follow it asks Redis for. While Redis is away each answers from
its own rows, and (`redis_away: follow_all`) follows all daemons until Redis is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from client_sdk import aio
from emberkv_proto.errors import UnavailableError
from emberkv_proto.events import Keys
from emberkv_proto.types import ChainHits, EngineInfo, NodeId
from global_index.index import Holder
from global_index.membership import Liveness
from global_index.redis_index import FencedError, Token
from global_index.redis_link import RedisAwayError, RedisFullError, RedisLink
from global_index.redis_mirror import MirroredIndex
from global_index.redis_reader import RedisReader
from global_index.redis_registry import RedisRegistry
from global_index.redis_schema import RedisSchema
from global_index.redis_settings import RedisKeys
from global_index.redis_writer import OwnNode, RedisWriter
from global_index.views import FollowedNode, NodeView

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.02
REFRESH_SECONDS = 1.0
TIDY_SHARE = 0.25
"""Of `redis_forget_seconds`: how often it is looked for nodes that nobody follows any more."""
CANCEL_SECONDS = 0.5
GIVE_UP_AT_ONCE = 8
"""Leases over one's share that are passed on at one heartbeat."""


Supervise = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]


class Following(Protocol):
    """What this process follows by itself; the `GlobalIndex`."""

    def follow(self, address: str) -> None: ...

    async def unfollow(self, address: str) -> None: ...

    def followed(self) -> Sequence[FollowedNode]: ...

    def followed_at(self, address: str) -> FollowedNode | None: ...

    def view(self, node_id: NodeId) -> NodeView: ...


@dataclass(slots=True)
class ShareCounts:
    """Leases over time; never goes down."""

    won: int = 0
    lost: int = 0
    passed_on: int = 0


@dataclass(slots=True)
class TidyCounts:
    """Never goes down."""

    forgotten: int = 0
    """Nodes taken out of Redis because nobody followed them any more."""


@dataclass(frozen=True, slots=True)
class ShareState:
    """How the process stands to Redis, for people and metrics."""

    writer: str
    is_up: bool
    problem: str
    writers: int
    leases: int
    exact_nodes: int
    """Own nodes whose rows in Redis are as they should be."""
    queued_rows: int


class SharedIndex:
    """Runs between `start` and `stop`. Owned by the index's event loop."""

    def __init__(
        self,
        section: RedisKeys,
        index: MirroredIndex,
        following: Following,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._section = section
        self._index = index
        self._following = following
        self._clock = clock
        self._wall = wall
        schema = RedisSchema(section.redis_prefix)
        self.link = RedisLink(section)
        writer = f"{name}-{secrets.token_hex(4)}"
        self._registry = RedisRegistry(self.link, schema, writer, section.redis_lease_seconds)
        self.reader = RedisReader(self.link, schema, self._registry, section.redis_query_seconds)
        self.writer = RedisWriter(
            self.link, schema, self._registry, index, self._find, section.redis_audit_seconds
        )
        self._wanted: dict[str, None] = {}
        self._leases: dict[str, Token] = {}
        self._renewed_at = clock()
        self._writers = 0
        self._own: dict[NodeId, FollowedNode] = {}
        self._vouched: list[Holder] = []
        self._passed_on: dict[Holder, float] = {}
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Future[None]] = []
        self._connecting: asyncio.Future[None] | None = None
        self.counts = ShareCounts()
        self.tidied = TidyCounts()

    def start(self, supervise: Supervise) -> None:
        """Begin; `supervise` runs what must go on for ever and starts it again after a fault."""
        self._renewed_at = self._clock()  # following all at once would be too soon
        self._connecting = asyncio.ensure_future(supervise("redis link", self.link.run))
        self._tasks = [
            asyncio.ensure_future(supervise("redis leases", self._beat_for_ever)),
            asyncio.ensure_future(supervise("redis writer", self._write_for_ever)),
            asyncio.ensure_future(supervise("redis reader", self._refresh_for_ever)),
            asyncio.ensure_future(supervise("redis tidying", self._tidy_for_ever)),
        ]

    async def stop(self) -> None:
        """Give the leases to others at once, and hang up."""
        await _end(self._tasks)
        await self.writer.close()
        try:
            await self._registry.leave(self._leases)
        except UnavailableError as error:
            log.info("leases stay until they expire: %s", error)
        self._leases.clear()
        if self._connecting is not None:
            await _end([self._connecting])

    def want(self, address: str) -> None:
        """A daemon that somebody must follow."""
        self._wanted[address] = None
        if address in self._leases:
            self._following.follow(address)

    async def unwant(self, address: str) -> None:
        self._wanted.pop(address, None)
        token = self._leases.pop(address, None)
        if token is not None and self.link.is_up:
            try:
                await self._registry.give_up({address: token})
            except UnavailableError as error:
                log.info("lease of %s stays until it expires: %s", address, error)
        await self._following.unfollow(address)

    async def forget(self, node_id: NodeId) -> None:
        """Take a node that was removed by order out of Redis too.

        Raises:
            UnavailableError: Redis is away or another process has its lease: order it there.
        """
        node = self._find(node_id)
        if node is None:
            raise UnavailableError(f"node {node_id} is not followed by this process")
        async with self._turn:
            await self.writer.forget(node)

    async def answer(self, keys: Keys, own: ChainHits) -> ChainHits:
        """`own` hits of the nodes followed here, those of Redis for the others, longest first.

        Every process hears the events of all engines; what the node of one has is not in its own
        hit where another process follows that node.
        """
        theirs = await self.reader.query(keys)
        if theirs is None:
            return own
        hits = [hit for hit in theirs if hit.node_id not in self._own]
        if not hits:
            return own
        others = {hit.node_id for hit in hits}
        hits += [hit for hit in own.nodes if hit.node_id not in others]
        hits.sort(key=lambda hit: -hit.hit_blocks)
        return replace(own, nodes=tuple(hits))

    async def trace(self, keys: Keys) -> dict[NodeId, bytes]:
        """As `RedisReader.trace`, for the nodes that other processes follow."""
        traces = await self.reader.trace(keys)
        return {node_id: tiers for node_id, tiers in traces.items() if node_id not in self._own}

    def others(self, wall: float) -> list[NodeView]:
        """Nodes that other processes follow, as their writers describe them."""
        views = []
        for record in self.reader.records():
            if record.view.node_id in self._own:
                continue
            liveness = record.view.liveness
            if not self.reader.is_alive(record.view.node_id) and liveness is Liveness.OK:
                liveness = Liveness.SUSPECT  # its writer is silent
            lag = max(0.0, wall - record.written_unix_seconds)
            views.append(replace(record.view, liveness=liveness, lag_seconds=lag))
        return views

    def engines(self) -> list[tuple[NodeId, EngineInfo]]:
        """Engines on the nodes that other processes follow; their own events go to all."""
        return [
            (record.view.node_id, engine)
            for record in self.reader.records()
            if record.view.node_id not in self._own
            for engine in record.view.engines
        ]

    def state(self) -> ShareState:
        return ShareState(
            self._registry.writer,
            self.link.is_up,
            self.link.problem,
            self._writers,
            len(self._leases),
            self.writer.exact_nodes(),
            self._index.queued_rows,
        )

    def check_integrity(self) -> None:
        self.writer.check_integrity()
        assert self._leases.keys() <= self._wanted.keys(), "a lease of nobody's daemon is held"

    # Inside

    def _find(self, node_id: NodeId) -> OwnNode | None:
        known = self._own.get(node_id)
        token = self._leases.get(known.address) if known else None
        node = self._following.followed_at(known.address) if known else None
        if token is None or node is None or node.node_id != node_id:
            return None
        view = partial(self._following.view, node_id)
        return OwnNode(node.address, token, node_id, node.holder, node.liveness, view)

    async def _beat_for_ever(self) -> None:
        while True:
            try:
                await self._beat()
            except RedisAwayError:
                await self._be_alone()
            await asyncio.sleep(self._section.redis_lease_seconds / 3)

    async def _beat(self) -> None:
        held = dict(self._leases)
        free = [address for address in self._wanted if address not in held]
        beat = await self._registry.beat(held, free)
        self._renewed_at, self._writers = self._clock(), beat.writers
        for address in held.keys() - beat.kept:
            self._leases.pop(address, None)
            self.counts.lost += 1
            log.warning("the lease of %s was lost", address)
        for address, token in beat.won.items():
            if address in self._wanted:
                self._leases[address] = token
                self.counts.won += 1
                self._following.follow(address)
        await self._pass_on(beat.writers)
        await self._vouch(self.writer.alive_numbers())
        await self._leave_to_others()

    async def _pass_on(self, writers: int) -> None:
        """Let newcomers have what is above one's share of the daemons."""
        share = -(-len(self._wanted) // max(1, writers))
        surplus = [*self._leases][share : share + GIVE_UP_AT_ONCE]
        if not surplus:
            return
        until = self._clock() + 2 * self._section.redis_lease_seconds
        for number in self.writer.numbers_at(surplus):
            self._passed_on[number] = until  # still in answers until the next writer is there
        leases = {address: self._leases.pop(address) for address in surplus}
        self.counts.passed_on += len(leases)
        await self._registry.give_up(leases)

    async def _leave_to_others(self) -> None:
        """Follow no longer what another process follows, once it answers for it."""
        served = {
            record.address
            for record in self.reader.records()
            if self.reader.is_alive(record.view.node_id) and record.writer != self._registry.writer
        }
        for node in self._following.followed():
            if node.address not in self._leases and node.address in served:
                await self._following.unfollow(node.address)

    async def _be_alone(self) -> None:
        """Redis is away: leases run out by our own clock, and nobody else says who lives."""
        if self._clock() - self._renewed_at < self._section.redis_lease_seconds:
            return
        self._leases.clear()
        self._writers = 0
        self.reader.forget()
        if self._section.redis_away == "follow_all":
            for address in self._wanted:
                self._following.follow(address)

    async def _write_for_ever(self) -> None:
        while True:
            followed = self._following.followed()
            self._own = {node.node_id: node for node in followed}
            if self.link.is_up:
                async with self._turn:
                    await self.writer.turn(
                        [node.node_id for node in followed if node.address in self._leases]
                    )
                await self._vouch_news()
            await asyncio.sleep(FLUSH_SECONDS)

    async def _vouch_news(self) -> None:
        numbers = self.writer.alive_numbers()
        if [*numbers] != self._vouched and self._leases:
            try:
                await self._vouch(numbers)
            except RedisAwayError:
                self._vouched = []

    async def _vouch(self, numbers: Sequence[Holder]) -> None:
        now = self._clock()
        self._passed_on = {n: until for n, until in self._passed_on.items() if until > now}
        await self._registry.vouch(sorted({*numbers, *self._passed_on}))
        self._vouched = [*numbers]

    async def _refresh_for_ever(self) -> None:
        while True:
            with suppress(RedisAwayError):
                await self.reader.refresh()
            seconds = max(REFRESH_SECONDS, len(self.reader.records()) / 256)
            with suppress(asyncio.TimeoutError, TimeoutError):
                async with aio.timeout(seconds):  # wait_for may swallow a cancellation
                    await self.reader.has_news.wait()

    async def _tidy_for_ever(self) -> None:
        while True:
            share = TIDY_SHARE * random.uniform(0.5, 1.5)  # noqa: S311
            await asyncio.sleep(self._section.redis_forget_seconds * share)
            with suppress(RedisAwayError, RedisFullError):  # the link counts both
                await self._tidy()

    async def _tidy(self) -> None:
        """Take out nodes that no process has followed for long, or their numbers would run out."""
        allowed = self._section.redis_forget_seconds
        for left in await self._registry.left(self._wall() - allowed):
            # A clock that is wrong by hours must not take out what is followed.
            if left.node_id in self._own or self.reader.is_alive(left.node_id):
                continue
            try:
                await self.writer.forget_left(left)
            except FencedError as error:
                log.info("%s: it is not forgotten", error)
            else:
                self.tidied.forgotten += 1
                log.info("node %s is forgotten: nobody followed it for %s s", left.node_id, allowed)


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel until it works: redis-py swallows a cancellation that meets a connection's set-up."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
