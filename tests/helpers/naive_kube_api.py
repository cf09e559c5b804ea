"""What a Kubernetes API server tells of one collection: objects, versions, a history that expires.

`NaiveKubeApi` is pure; `serving` puts it behind HTTP, with faults that a test asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Raw = dict[str, Any]


class ExpiredError(Exception):
    """410: the version is older than what is kept."""


def pod(name: str, node: str = "node-1", ip: str = "10.0.0.1", **more: Any) -> Raw:
    """A ready pod with ports grpc and http. `more`: annotations, labels, ready, phase, leaving."""
    annotations = {f"emberkv.dev/{key}": value for key, value in more.get("notes", {}).items()}
    meta: Raw = {"namespace": "ns", "name": name, "annotations": annotations}
    meta["labels"] = more.get("labels", {"part": "store"})
    if more.get("leaving"):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ports = [{"name": "grpc", "containerPort": 7100}, {"name": "http", "containerPort": 8000}]
    ready = "True" if more.get("ready", True) else "False"
    return {
        "metadata": meta,
        "spec": {"nodeName": node, "containers": [{"name": "main", "ports": ports}]},
        "status": {
            "podIP": ip,
            "phase": more.get("phase", "Running"),
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


@dataclass
class NaiveKubeApi:
    """All objects and every change since the last compaction. Versions count up."""

    objects: dict[str, Raw] = field(default_factory=dict)
    history: list[tuple[int, str, Raw]] = field(default_factory=list)
    version: int = 100
    oldest: int = 100
    """Watches from before it are refused."""

    def put(self, item: Raw) -> None:
        name = item["metadata"]["name"]
        self._note("MODIFIED" if name in self.objects else "ADDED", item)
        self.objects[name] = self.history[-1][2]

    def delete(self, name: str) -> None:
        self._note("DELETED", self.objects.pop(name))

    def compact(self) -> None:
        self.history.clear()
        self.oldest = self.version

    def page(self, token: str, limit: int) -> Raw:
        """Raises ExpiredError for the token of a list that began before the last compaction."""
        names = sorted(self.objects)
        version, start = self.version, 0
        if token:
            version, start = (int(part) for part in token.split("."))
            if version < self.oldest:
                raise ExpiredError
            names = self._names_at(version)
        shown = names[start : start + limit]
        end = start + len(shown)
        more = f"{version}.{end}" if end < len(names) else ""
        items = [self._object_at(name, version) for name in shown]
        return {"metadata": {"resourceVersion": str(version), "continue": more}, "items": items}

    def since(self, version: str) -> list[Raw]:
        """Raises ExpiredError."""
        if int(version) < self.oldest:
            raise ExpiredError
        return [
            {"type": kind, "object": item} for at, kind, item in self.history if at > int(version)
        ]

    def bookmark(self) -> Raw:
        meta = {"resourceVersion": str(self.version)}
        return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": meta}}

    def _note(self, kind: str, item: Raw) -> None:
        self.version += 1
        meta = {**item["metadata"], "resourceVersion": str(self.version)}
        self.history.append((self.version, kind, {**item, "metadata": meta}))

    def _names_at(self, version: int) -> list[str]:
        names = set(self.objects)
        for at, kind, item in reversed(self.history):
            if at > version:
                name = item["metadata"]["name"]
                if kind == "ADDED":
                    names.discard(name)
                elif kind == "DELETED":
                    names.add(name)
        return sorted(names)

    def _object_at(self, name: str, version: int) -> Raw:
        before = [i for at, _, i in self.history if i["metadata"]["name"] == name and at <= version]
        if before:
            return before[-1]
        after = [i for at, _, i in self.history if i["metadata"]["name"] == name]
        return after[0] if after else self.objects[name]


@dataclass
class ServedKubeApi:
    """Collections by path, each with label selection by equality. Faults are taken once each."""

    collections: dict[str, NaiveKubeApi]
    url: str = ""
    token: str = ""
    """Wanted of each caller; empty: anybody's."""
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    cuts: list[bytes] = field(default_factory=list)
    """Of the next watches: sent at their start in the place of events, and then no more."""
    unspoken: set[str] = field(default_factory=set)
    """Kinds of events that watches swallow."""
    seen: list[Mapping[str, str]] = field(default_factory=list)
    """Parameters of each call."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watches: set[asyncio.Task[Any]] = field(default_factory=set)
    others: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = field(
        default_factory=dict
    )
    """What answers at other paths."""

    def tell(self) -> None:
        """After a change: running watches send it."""
        self.changed.set()
        self.changed = asyncio.Event()

    def drop_watches(self) -> None:
        for task in self.watches:
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.query))
        if self.refusals:
            return _refusal(self.refusals.pop(0))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _refusal(401)
        if request.path in self.others:
            return await self.others[request.path](request)
        collection = self.collections.get(request.path)
        if collection is None:
            return _refusal(404)
        try:
            if "watch" in request.query:
                return await self._watch(request, collection)
            token, limit = request.query.get("continue", ""), int(request.query["limit"])
            page = collection.page(token, limit)
        except ExpiredError:
            return _refusal(410)
        page["items"] = [item for item in page["items"] if _selects(request, item)]
        return web.json_response(page)

    async def _watch(self, request: web.Request, collection: NaiveKubeApi) -> web.StreamResponse:
        version = request.query["resourceVersion"]
        collection.since(version)
        task = asyncio.current_task()
        assert task is not None
        self.watches.add(task)
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            if self.cuts:
                await answer.write(self.cuts.pop(0))
                return answer
            while True:
                changed = self.changed
                for event in collection.since(version):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] not in self.unspoken and _selects(request, event["object"]):
                        await answer.write(json.dumps(event).encode() + b"\n")
                await changed.wait()
        finally:
            self.watches.discard(task)


def _selects(request: web.Request, item: Raw) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(key) == value for key, value in wanted)


def _refusal(status: int) -> web.Response:
    return web.json_response({"kind": "Status", "message": f"no: {status}"}, status=status)


@asynccontextmanager
async def serving(**collections: NaiveKubeApi) -> AsyncIterator[ServedKubeApi]:
    """Pods of the namespace ns as `pods`, node leases as `leases`."""
    paths = {
        "pods": "/api/v1/namespaces/ns/pods",
        "leases": "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
    }
    served = ServedKubeApi({paths[name]: api for name, api in collections.items()})
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", served.handle)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        served.url = f"http://{host}:{port}"
        yield served
    finally:
        served.drop_watches()
        await runner.cleanup()
