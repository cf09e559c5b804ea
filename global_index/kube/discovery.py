"""Follows pods and leases through the API, and tells what they come to whenever that changes.

One task for each collection. While the API is away nothing changes: what was found stays found.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from client_sdk import aio
from emberkv_proto.errors import ConfigError, EmberError, InvalidRequestError, UnavailableError
from global_index.kube.api import Access, KubeApi, RefusedError, server_url
from global_index.kube.listing import Listing, ListPage, Watch
from global_index.kube.pods import (
    Discovered,
    Heartbeats,
    Lease,
    Pod,
    discovered,
    parse_lease,
    parse_pod,
)
from global_index.kube.settings import ACCOUNT, KubernetesSection

log = logging.getLogger(__name__)

PAGE_OBJECTS = 500
RETRY_FIRST_SECONDS = 0.25
RETRY_MAX_SECONDS = 15.0
SHORTEST_SECONDS = 1.0
"""Between two lists, and of a watch that was not cut off: a server in trouble is not hammered."""
TICK_SECONDS = 1.0
"""How often nodes' silence is looked at."""
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

Apply = Callable[[Discovered], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Collection:
    """One thing that is listed and watched."""

    label: str
    """For logs and metrics."""
    path: str
    selector: str
    listing: Listing[Any]
    listed_at: float = 0.0
    is_current: bool = False
    """A watch runs: what the API knows reaches us."""


class KubernetesDiscovery:
    """All collections of one index. Belongs to one event loop.

    Raises ConfigError when it is not in a pod and no `api_url` is given.
    """

    def __init__(
        self, section: KubernetesSection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._section = section
        self._clock = clock
        self._access = Access(section.api_url or server_url(), section.ca_file, section.token_file)
        own = section.namespace or own_namespace()
        self._daemons: list[Listing[Pod]] = []
        self._engines: list[Listing[Pod]] = []
        self._leases: list[Listing[Lease]] = []
        self.collections: list[Collection] = []
        self.found = Discovered()
        self.silent_nodes: frozenset[str] = frozenset()
        self._heartbeats = Heartbeats()
        self._woken = asyncio.Event()
        if section.daemons:
            self._daemons.append(self._pods("daemons", own, section.daemons))
        for namespace in (section.engine_namespaces or (own,)) if section.engines else ():
            self._engines.append(self._pods("engines", namespace, section.engines))
        if section.node_leases:
            leases = Listing(parse_lease)
            self._leases.append(leases)
            self.collections.append(Collection("node leases", LEASES, "", leases))

    def _pods(self, kind: str, namespace: str, selector: str) -> Listing[Pod]:
        listing = Listing(parse_pod)
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.collections.append(Collection(f"{kind} in {namespace}", path, selector, listing))
        return listing

    async def run(self, apply: Apply) -> None:
        """Follow for ever. Only cancellation and faults of our own get out.

        `apply` gets what was found, when it is something else than before; never a part of what
        the first lists tell.
        """
        async with KubeApi(self._access) as api, aio.TaskGroup() as tasks:
            for collection in self.collections:
                tasks.create_task(self._follow(api, collection))
            tasks.create_task(self._tell(apply))

    def check_integrity(self) -> None:
        for collection in self.collections:
            collection.listing.check_integrity()
            assert not (collection.is_current and collection.listing.is_listing)
        self._heartbeats.check_integrity()
        assert len(self.found.addresses) <= len(self.found.daemons)

    async def _follow(self, api: KubeApi, collection: Collection) -> None:
        listing, delay = collection.listing, RETRY_FIRST_SECONDS
        was_lost = False
        while True:
            told = listing.counts.events + listing.counts.lists
            problem: EmberError | None = None
            try:
                await self._step(api, collection)
            except RefusedError as error:
                listing.on_refused(error.status)
                problem = error
            except UnavailableError as error:
                listing.on_lost()
                problem = error
            except InvalidRequestError as error:
                listing.on_nonsense()
                problem = error
            if problem is None or listing.counts.events + listing.counts.lists > told:
                delay, was_lost = RETRY_FIRST_SECONDS, False
            if problem is None:
                continue
            if not was_lost:
                log.warning("%s: %s", collection.label, problem)
            was_lost = True
            # Jitter keeps many routers from knocking in step.
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
            delay = min(2 * delay, RETRY_MAX_SECONDS)

    async def _step(self, api: KubeApi, collection: Collection) -> None:
        """One page, or one watch to its end."""
        listing, began = collection.listing, self._clock()
        selector = {"labelSelector": collection.selector} if collection.selector else {}
        match listing.ask():
            case ListPage(token):
                if not token and listing.is_complete:
                    await asyncio.sleep(collection.listed_at + SHORTEST_SECONDS - began)
                more = {"continue": token} if token else {}
                page = await api.get(collection.path, limit=str(PAGE_OBJECTS), **selector, **more)
                is_changed = listing.on_page(page)
                if not listing.is_listing:
                    collection.listed_at = self._clock()
                if is_changed:
                    self._woken.set()
            case Watch(version):
                was_told = False
                async with (
                    self._current(collection),
                    api.watch(collection.path, resourceVersion=version, **selector) as events,
                ):
                    listing.on_watching()
                    collection.is_current = True
                    async for event in events:
                        was_told = True
                        if listing.on_event(event):
                            self._woken.set()
                        if listing.is_listing:
                            return
                        if self._is_due(collection):
                            break
                if self._is_due(collection):
                    listing.relist()
                elif not was_told and self._clock() - began < SHORTEST_SECONDS:
                    raise UnavailableError("the watch was ended at once")

    @asynccontextmanager
    async def _current(self, collection: Collection) -> AsyncIterator[None]:
        try:
            yield
        finally:
            collection.is_current = False

    def _is_due(self, collection: Collection) -> bool:
        return self._clock() - collection.listed_at > self._section.relist_seconds

    async def _tell(self, apply: Apply) -> None:
        while True:
            try:
                async with aio.timeout(TICK_SECONDS):
                    await self._woken.wait()
            except (asyncio.TimeoutError, TimeoutError):
                pass
            self._woken.clear()
            self._listen()
            if not all(collection.listing.is_complete for collection in self.collections):
                continue
            found = discovered(
                (pod for listing in self._daemons for pod in listing.objects.values()),
                (pod for listing in self._engines for pod in listing.objects.values()),
                self.silent_nodes,
            )
            if found != self.found:
                for fault in set(found.faults) - set(self.found.faults):
                    log.warning("%s", fault)
                log.info(
                    "%d daemons and %d engines are found", len(found.daemons), len(found.engines)
                )
                await apply(found)
                self.found = found

    def _listen(self) -> None:
        now = self._clock()
        for listing in self._leases:
            self._heartbeats.on_leases(listing.objects.values(), now)
        if not all(c.is_current for c in self.collections if c.path == LEASES):
            self._heartbeats.on_blind(now)
        self.silent_nodes = self._heartbeats.silent(now)


def own_namespace() -> str:
    """Of the pod that this runs in. Raises ConfigError outside of one."""
    path = ACCOUNT / "namespace"
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"index.kubernetes.namespace is not set, and {path} cannot be read: {error}"
        ) from error
