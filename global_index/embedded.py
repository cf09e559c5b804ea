"""`GlobalIndex`: what a router embeds and what the service serves.

Threading: one event loop owns everything. Kernels are short (a query: tens of microseconds, a
batch of 65,536 events' keys: some milliseconds), so none is sent to a thread and none is locked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from client_sdk.tls import Tls
from emberkv_proto.errors import ConfigError
from emberkv_proto.events import Keys, SnapshotPage
from emberkv_proto.types import ChainHits, EngineInfo, NodeHit, NodeId
from global_index.config import IndexSection
from global_index.copying import copied_pages
from global_index.dict_index import DictIndex
from global_index.directory import NodeDirectory
from global_index.dns_nodes import Changes, HostPort, NameCounts, NodeNames, follow
from global_index.hbm.engines import EngineDirectory, EngineKey, EngineTrace, EngineView
from global_index.hbm.followers import EngineFollowers
from global_index.holders import HolderPool
from global_index.index import BlockIndex, TableSize
from global_index.kube.pods import Discovered, EnginePod
from global_index.kube.settings import KubernetesSection
from global_index.membership import Membership
from global_index.registry import Registry
from global_index.seeding import SeedCounts, load_seed
from global_index.subscriber import StreamCounts, Subscriber
from global_index.views import ChainTrace, FollowedNode, NodeView
from global_index.watch import NodeWatch, Standing

if TYPE_CHECKING:
    from global_index.kube.discovery import KubernetesDiscovery
    from global_index.redis_mirror import MirroredIndex
    from global_index.redis_shared import SharedIndex

log = logging.getLogger(__name__)

MAX_SNAPSHOTS = 4
"""Fetched at the same time; more would only starve the queries."""

RESTART_SECONDS = 1.0


def open_index(section: IndexSection) -> BlockIndex:
    """The index that `index.backend` names, compiled and warm. Takes seconds on a cold cache.

    Raises:
        ConfigError: backend is "numba" and Numba cannot be used.
    """
    if section.backend == "python":
        return DictIndex(section.capacity_blocks)
    try:
        from global_index.memory_index import MemoryIndex, warm_kernels

        warm_kernels()
    except (ImportError, OSError, RuntimeError) as error:
        if section.backend == "numba":
            raise ConfigError(
                f"index.backend is numba, but it cannot be used: {error}; set it to python"
            ) from error
        log.warning("numba cannot be used (%s): the slower python index serves", error)
        return DictIndex(section.capacity_blocks)
    return MemoryIndex(section.capacity_blocks)


def _share(
    section: IndexSection, index: BlockIndex, following: GlobalIndex, name: str
) -> tuple[MirroredIndex, SharedIndex]:
    """Raises ConfigError where redis-py is not installed."""
    try:
        from global_index.redis_mirror import MirroredIndex
        from global_index.redis_shared import SharedIndex
    except ImportError as error:
        raise ConfigError(f"index.redis_url needs `pip install emberkv[redis]`: {error}") from error
    mirrored = MirroredIndex(index, section.redis_queue_rows)
    return mirrored, SharedIndex(section, mirrored, following, name=name)


def _discovery(
    section: KubernetesSection | None, clock: Callable[[], float]
) -> KubernetesDiscovery | None:
    """Raises ConfigError outside of a pod, or where aiohttp is not installed."""
    if section is None:
        return None
    try:
        from global_index.kube.discovery import KubernetesDiscovery
    except ImportError as error:
        raise ConfigError(f"index.kubernetes needs `pip install emberkv[k8s]`: {error}") from error
    return KubernetesDiscovery(section, clock)


class GlobalIndex:
    """Index, ingest, membership and one subscriber per daemon, behind one object.

    Use as `async with GlobalIndex(section) as index:`. Queries answer at any time; with no node
    known, or all away, they answer nothing. Raises ConfigError when the TLS files do not fit.
    """

    def __init__(
        self,
        section: IndexSection,
        *,
        name: str = "index",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._section = section
        files = section.tls_files()
        self.tls = Tls.read(files) if files is not None else None
        """Towards the daemons, and for whoever serves this index."""
        self._name = name
        self._clock = clock
        self._wall = wall
        self._index = open_index(section)
        self.shared: SharedIndex | None = None
        """With `index.redis_url`: what this process shares with others through Redis."""
        if section.redis_url:
            self._index, self.shared = _share(section, self._index, self, name)
        membership = Membership(section.suspect_seconds, section.gone_seconds)
        holders = HolderPool(self._index)
        self._directory = NodeDirectory(self._index, membership, holders)
        self._engines = EngineDirectory(
            self._index, holders, self._directory.base_of, section.gone_seconds
        )
        self._directory.on_rebased = self._engines.rebase
        self._followers = EngineFollowers(self._engines, self._supervise, clock)
        self._snapshot_gate = asyncio.Semaphore(MAX_SNAPSHOTS)
        self._subscribers: dict[str, Subscriber] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._names = NodeNames(section.names)
        self._lookups: asyncio.Task[None] | None = None
        self.discovery = _discovery(section.kubernetes, clock)
        """With `index.kubernetes`: the pods that are followed."""
        self._discovering: asyncio.Task[None] | None = None
        self._seeding: asyncio.Task[None] | None = None
        self._is_seeded = asyncio.Event()
        self.seed_counts = SeedCounts()
        self.watch = NodeWatch(self._standings)
        """Tells who asks how nodes stand, whenever that changes."""
        self.registry = Registry()
        """Sources that are followed because a caller registered them."""
        self.faults = 0
        """Restarts of a task after an error that nobody foresaw."""

    async def start(self) -> None:
        """Begin to follow `index.nodes`. Returns at once; rows arrive as daemons answer.

        With `index.seed_from` the daemons are followed once that index has given its rows.
        """
        self._ticker = asyncio.create_task(self._supervise("ticker", self._tick_for_ever))
        if self.shared is not None:
            self.shared.start(self._supervise)
        self._seeding = asyncio.create_task(self._supervise("seeding", self._seed))
        for address in self._section.addresses:
            self.subscribe(address)
        if self._names.counts:
            self._lookups = asyncio.create_task(self._supervise("lookups", self._follow_names))
        if self.discovery is not None:
            follow_pods = self.discovery.run
            self._discovering = asyncio.create_task(
                self._supervise("discovery", lambda: follow_pods(self._renew_pods))
            )

    async def stop(self) -> None:
        """End all tasks; rows stay and can still be asked for."""
        if self.shared is not None:
            await self.shared.stop()
        parts = (self._ticker, self._lookups, self._discovering, self._seeding)
        own = [task for task in parts if task]
        tasks = [*self._tasks.values(), *own]
        self._tasks.clear()
        self._subscribers.clear()
        self._ticker = self._lookups = self._discovering = self._seeding = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._followers.stop()

    async def __aenter__(self) -> GlobalIndex:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def subscribe(self, address: str) -> None:
        """Follow a daemon, or in Redis mode see to it that somebody does."""
        if self.shared is not None:
            self.shared.want(address)
        else:
            self.follow(address)

    def follow(self, address: str) -> None:
        """Follow a daemon in this process; one that is followed already goes on as it is."""
        if address in self._tasks:
            return
        self._directory.add_source(address)
        subscriber = Subscriber(
            address,
            self._directory,
            self._snapshot_gate,
            name=self._name,
            message_seconds=max(1.0, 2 * self._section.suspect_seconds),
            clock=self._clock,
            wall=self._wall,
            tls=self.tls,
        )
        self._subscribers[address] = subscriber

        async def follow() -> None:
            await self._is_seeded.wait()
            await subscriber.run()

        self._tasks[address] = asyncio.create_task(self._supervise(address, follow))

    async def unsubscribe(self, address: str) -> None:
        """Follow a daemon no longer. Its node fades as if silent, unless another address has it."""
        if self.shared is not None:
            await self.shared.unwant(address)
        else:
            await self.unfollow(address)

    async def unfollow(self, address: str) -> None:
        """As `unsubscribe`, in this process alone."""
        self._directory.remove_source(address, self._clock())
        await self._end_streams((address,))

    async def remove_node(self, node_id: NodeId) -> None:
        """Take a node out, by order: no answer names it from now on, not even if it calls again.

        A newer incarnation brings it back if its address is subscribed to again, `readmit` the
        same one too.
        """
        if self.shared is not None:
            await self.shared.forget(node_id)
        await self._end_streams(self._directory.remove_node(node_id))

    def readmit(self, node_id: NodeId) -> None:
        self._directory.readmit(node_id)

    def register_engine(self, node_id: NodeId, info: EngineInfo) -> None:
        """Follow an engine's events as if `index.engines` named it.

        Raises UnavailableError when too many are registered.
        """
        self.registry.add_engine(node_id, info)

    def unregister_engine(self, engine_id: str, dp_rank: int | None) -> list[EngineKey]:
        """Forget a registered rank, or all of the engine's, at once; who was forgotten."""
        gone = self.registry.remove_engine(engine_id, dp_rank)
        for key in gone:
            self._followers.follow(self._engines.forget(key))
        return gone

    def register_daemon(self, address: str) -> None:
        """Follow a daemon as if `index.nodes` named it.

        Raises UnavailableError when too many are registered.
        """
        if address not in self._tasks:
            self.registry.add_daemon(address)
            self.subscribe(address)

    async def unregister_daemon(self, address: str) -> bool:
        """Follow a registered daemon no longer; False when it was not registered."""
        if not self.registry.remove_daemon(address):
            return False
        await self.unsubscribe(address)
        return True

    def query(self, keys: Keys) -> list[NodeHit]:
        """Leading runs of a chain on the nodes that are OK, longest first. Never waits."""
        return self._directory.query(keys)

    def hits(self, keys: Keys) -> ChainHits:
        """The same, and beside it what each engine finds in its own HBM or on its node."""
        found = self._index.query(keys)
        return ChainHits(tuple(self._directory.node_hits(found)), tuple(self._engines.hits(found)))

    def answer_now(self, keys: Keys) -> ChainHits | None:
        """As `answer`, where nothing has to be waited for; None in Redis mode."""
        return self.hits(keys) if self.shared is None else None

    async def answer(self, keys: Keys) -> ChainHits:
        """As `hits`, over all nodes: in Redis mode also those that other processes follow.

        Waits for Redis `index.redis_query_seconds` at most, without Redis mode for nothing.
        """
        own = self.hits(keys)
        return own if self.shared is None else await self.shared.answer(keys, own)

    def explain(self, keys: Keys) -> list[ChainTrace]:
        """Each node's run and the tiers of each block; nodes left out of answers included."""
        return self._directory.explain(keys)

    def explain_engines(self, keys: Keys) -> list[EngineTrace]:
        """Which of the blocks each engine has in its own HBM; engines left out included."""
        return self._engines.explain(keys)

    def copy_nodes(self, node_ids: Sequence[NodeId]) -> AsyncGenerator[SnapshotPage, None]:
        """Rows of these nodes, or of all when none is named; for another index to start from."""
        wanted = node_ids or [node.node_id for node in self._directory.nodes(self._clock())]
        return copied_pages(self._directory, wanted)

    def nodes(self) -> list[NodeView]:
        """All known nodes and their engines, in Redis mode also those that others follow."""
        own = self._directory.nodes(self._clock())
        if self.shared is None:
            return own
        others = self.shared.others(self._wall())
        theirs = {view.node_id for view in others}
        return [view for view in own if view.node_id not in theirs] + others

    def _standings(self) -> dict[NodeId, Standing]:
        standings = self._directory.standings()
        if self.shared is not None:
            for view in self.shared.others(self._wall()):
                standings[view.node_id] = Standing(
                    view.incarnation,
                    view.liveness,
                    view.exactness,
                    view.grpc_address,
                    view.engines,
                )
        return standings

    def followed(self) -> list[FollowedNode]:
        """Nodes that this process follows, once they have rows."""
        return self._directory.followed()

    def followed_at(self, address: str) -> FollowedNode | None:
        return self._directory.followed_at(address)

    def view(self, node_id: NodeId) -> NodeView:
        """One node that this process knows itself."""
        return self._directory.node(node_id, self._clock())

    def engines(self) -> list[EngineView]:
        """All engines whose events are followed."""
        return self._engines.views()

    @property
    def refused_engines(self) -> int:
        """Announced engines whose events are not followed."""
        return self._engines.refused

    def configured_engines(self) -> list[tuple[NodeId, EngineInfo]]:
        """Those of the settings, each rank by itself, and their nodes."""
        return [pair for engine in self._section.engines for pair in engine.infos()]

    def discovered_engines(self) -> tuple[EnginePod, ...]:
        """Those that run in pods, each rank by itself, ready or not."""
        return self.discovery.found.engines if self.discovery is not None else ()

    def size(self) -> TableSize:
        return self._index.size()

    def streams(self) -> dict[str, StreamCounts]:
        """How each address's connection fares."""
        return {address: sub.counts for address, sub in self._subscribers.items()}

    def lookups(self) -> dict[HostPort, NameCounts]:
        """How the lookups of each name in `index.nodes` fare."""
        return self._names.counts

    def check_integrity(self) -> None:
        self._directory.check_integrity(self._engines.live_holders())
        self._engines.check_integrity()
        self._names.check_integrity()
        self.watch.check_integrity()
        self.registry.check_integrity()
        if self.discovery is not None:
            self.discovery.check_integrity()
        if self.shared is not None:
            self.shared.check_integrity()

    async def _follow_names(self) -> None:
        await follow(self._names, self._renew, self._section.resolve_seconds)

    async def _renew(self, changes: Changes) -> None:
        for address in changes.added:
            self.subscribe(address)
        found = self.discovery.found.addresses if self.discovery is not None else ()
        for address in changes.removed:
            if address not in (*self._section.addresses, *self.registry.daemons(), *found):
                await self.unsubscribe(address)

    async def _renew_pods(self, found: Discovered) -> None:
        assert self.discovery is not None
        for address in sorted(found.addresses):
            self.subscribe(address)
        kept = (*self._section.addresses, *self.registry.daemons(), *self._names.followed())
        for address in sorted(self.discovery.found.addresses - found.addresses):
            if address not in kept:
                await self.unsubscribe(address)

    async def _end_streams(self, addresses: tuple[str, ...]) -> None:
        tasks = [self._tasks.pop(address) for address in addresses if address in self._tasks]
        for address in addresses:
            self._subscribers.pop(address, None)
        for task in tasks:  # all are cancelled before any can run again
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _seed(self) -> None:
        try:
            if self._section.seed_from and not self._is_seeded.is_set():
                await load_seed(
                    self._section.seed_from,
                    self._directory,
                    self.seed_counts,
                    tls=self.tls,
                    clock=self._clock,
                )
        finally:
            self._is_seeded.set()

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        seconds = min(0.25, self._section.suspect_seconds / 4)
        while True:
            self._directory.tick(self._clock())
            self._follow_engines()
            self.watch.notice()
            due = loop.time() + seconds
            while self._directory.sweep() and loop.time() < due:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(due - loop.time())

    def _follow_engines(self) -> None:
        announced = [
            *self._directory.reported_engines(),
            *self.configured_engines(),
            *self.registry.engines(),
            *(self.shared.engines() if self.shared is not None else ()),
        ]
        # An engine that announces itself tells more than its pod does.
        urls = {info.url for _, info in announced}
        announced += [
            (pod.node_id, pod.info) for pod in self.discovered_engines() if pod.info.url not in urls
        ]
        self._followers.follow(self._engines.sync(announced, self._clock()))

    async def _supervise(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task's work again after a fault of ours, loudly: one node is not all nodes."""
        while True:
            try:
                await run()
                return
            except Exception:  # noqa: PERF203
                self.faults += 1
                log.exception("%s failed and starts again", name)
                await asyncio.sleep(RESTART_SECONDS)
