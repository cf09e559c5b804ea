"""Discovery against a real kube-apiserver: churn, kill -9, 410, bookmarks, rights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from client_sdk import aio
from global_index.kube import api as api_module
from global_index.kube import discovery as discovery_module
from global_index.kube.discovery import KubernetesDiscovery
from global_index.kube.pods import Discovered, discovered, parse_pod
from global_index.kube.settings import KubernetesSection
from tests.helpers.cluster import IndexProcess, RouterProcess
from tests.helpers.control_plane import ApiError, ControlPlane, require_control_plane, wait_until
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.manifests import Manifest, find, template_of
from tests.helpers.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAMS = ("etcd", "kube-apiserver")
VALUES: Manifest = {
    "discovery": {"mode": "kubernetes", "engineNamespaces": ["engines"], "nodeLeases": True},
    "index": {"enabled": True},
}
STORE = {
    "app.kubernetes.io/name": "emberkv",
    "app.kubernetes.io/instance": "emberkv",
    "app.kubernetes.io/component": "store",
}
ENGINE = {"emberkv.dev/engine": "true"}
SECONDS = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A server that nobody else talks to: what happens there, a test did."""
    require_control_plane(PROGRAMS)
    with ControlPlane(tmp_path_factory.mktemp("kube"), PROGRAMS) as plane:
        for namespace in ("emberkv", "engines"):
            plane.api("/api/v1/namespaces", {"metadata": {"name": namespace}})
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            plane.api(path, {"metadata": {"name": "default"}})
        yield plane


@pytest.fixture(scope="module")
def release(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """What the chart grants, applied."""
    manifests = template_of(VALUES, tmp_path_factory.mktemp("chart"))
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    plane.apply(*(m for m in manifests if m["kind"] in kinds))
    return manifests


@pytest.fixture
def pods(plane: ControlPlane) -> Iterator[Pods]:
    pods = Pods(plane)
    yield pods
    pods.remove_all()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_FIRST_SECONDS", "RETRY_MAX_SECONDS", "SHORTEST_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(discovery_module, name, 0.1)


class Pods:
    """Pods as kubelets would bring them to be."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def add(
        self,
        name: str,
        node: str,
        ip: str,
        namespace: str = "emberkv",
        labels: dict[str, str] | None = None,
        **notes: str,
    ) -> None:
        annotations = {f"emberkv.dev/{key.replace('_', '-')}": text for key, text in notes.items()}
        if labels is None:
            labels = STORE if namespace == "emberkv" else ENGINE
        ports = [{"name": "grpc", "containerPort": 7100}, {"name": "http", "containerPort": 8000}]
        pod = {
            "metadata": {"name": name, "labels": labels, "annotations": annotations},
            "spec": {
                "nodeName": node,
                "automountServiceAccountToken": False,
                "containers": [{"name": "main", "image": "none", "ports": ports}],
            },
        }
        self._plane.api(f"/api/v1/namespaces/{namespace}/pods", pod)
        self.set_ready(name, True, namespace, ip)

    def set_ready(
        self, name: str, is_ready: bool, namespace: str = "emberkv", ip: str = ""
    ) -> None:
        condition = {"type": "Ready", "status": "True" if is_ready else "False"}
        status: Manifest = {"phase": "Running", "conditions": [condition]}
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self._plane.api(path, {"status": status}, "PATCH")

    def delete(self, name: str, namespace: str = "emberkv", grace: int = 0) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self._plane.api(path, {"gracePeriodSeconds": grace}, "DELETE")

    def all(self, namespace: str) -> list[Manifest]:
        listed: list[Manifest] = self._plane.api(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return listed

    def expected(self) -> Discovered:
        """What a list of this moment comes to."""
        daemons, engines = (
            [parse_pod(raw) for raw in self.all(namespace)] for namespace in ("emberkv", "engines")
        )
        return discovered(daemons, engines)

    def remove_all(self) -> None:
        for namespace in ("emberkv", "engines"):
            for pod in self.all(namespace):
                self.delete(pod["metadata"]["name"], namespace)


def _phase(is_ready: bool) -> Manifest:
    condition = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {"phase": "Running", "conditions": [condition]}


@pytest.fixture
def settings(plane: ControlPlane, release: list[Manifest], tmp_path: Path) -> Manifest:
    """`index.kubernetes` as the chart writes it for a router, with that router's token."""
    text = find(release, "ConfigMap", "emberkv-router")["data"]["emberkv.yaml"]
    section: Manifest = yaml.safe_load(text)["index"]["kubernetes"]
    token = tmp_path / "token"
    token.write_text(plane.token_of("emberkv-router"))
    return {
        **section,
        "api_url": plane.url,
        "token_file": str(token),
        "ca_file": str(plane.ca_file),
    }


class Followed:
    def __init__(self, settings: Manifest) -> None:
        self.discovery = KubernetesDiscovery(KubernetesSection.model_validate(settings))
        self.told = 0
        self._task: asyncio.Task[None] | None = None

    async def apply(self, _: Discovered) -> None:
        self.told += 1

    def begin(self) -> None:
        self._task = asyncio.create_task(self.discovery.run(self.apply))

    async def end(self) -> None:
        assert self._task is not None
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def total(self, name: str) -> int:
        return sum(getattr(c.listing.counts, name) for c in self.discovery.collections)

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds, SECONDS)
        self.discovery.check_integrity()

    async def until_current(self) -> None:
        await self.until(lambda: all(c.is_current for c in self.discovery.collections))

    async def until_equal(self, pods: Pods) -> None:
        expected = await asyncio.to_thread(pods.expected)
        await self.until(lambda: self.discovery.found == expected)


@asynccontextmanager
async def following(settings: Manifest) -> AsyncIterator[Followed]:
    followed = Followed(settings)
    followed.begin()
    try:
        yield followed
    finally:
        await followed.end()


async def test_pods_of_all_kinds_are_followed_through_churn(pods: Pods, settings: Manifest) -> None:
    rng = random.Random(8)

    def churn(number: int) -> None:
        ip = f"10.0.{number // 250}.{number % 250 + 1}"
        node = f"node-{rng.randrange(6)}"
        namespace = rng.choice(["emberkv", "engines"])
        there = [pod["metadata"]["name"] for pod in pods.all(namespace)]
        match rng.choice(["add", "add", "unready", "ready", "delete", "leave"]):
            case "add":
                pods.add(f"p-{number}", node, ip, namespace, model=f"m-{number}")
            case "unready" if there:
                pods.set_ready(rng.choice(there), False, namespace)
            case "ready" if there:
                pods.set_ready(rng.choice(there), True, namespace)
            case "delete" if there:
                pods.delete(rng.choice(there), namespace)
            case "leave" if there:
                pods.delete(rng.choice(there), namespace, grace=30)

    pods.add("daemon", "node-0", "10.9.0.1")
    pods.add("engine", "node-0", "10.9.0.2", "engines", model="m", port="8123")
    async with following(settings) as followed:
        await followed.until_current()
        await followed.until_equal(pods)
        (engine,) = followed.discovery.found.engines
        assert (engine.node_id, engine.info.url) == ("node-0", "http://10.9.0.2:8123")
        for number in range(120):
            await asyncio.to_thread(churn, number)
        await followed.until_equal(pods)
        assert followed.total("losses") == followed.total("expired") == 0
        assert followed.total("lists") == 3
        assert followed.told > 20


async def test_a_killed_api_server_changes_nothing_and_is_found_again(
    plane: ControlPlane, pods: Pods, settings: Manifest
) -> None:
    pods.add("a", "node-0", "10.9.0.1")
    pods.add("b", "node-1", "10.9.0.2")
    async with following(settings) as followed:
        await followed.until_equal(pods)
        await followed.until_current()
        found, told = followed.discovery.found, followed.told
        await asyncio.to_thread(plane.kill_api_server)
        losses = followed.total("losses")
        await followed.until(lambda: followed.total("losses") >= losses + 6)
        assert (followed.discovery.found, followed.told) == (found, told)
        await asyncio.to_thread(plane.start_api_server)
        await followed.until_current()
        await asyncio.to_thread(pods.add, "c", "node-2", "10.9.0.3")
        await asyncio.to_thread(pods.delete, "a")
        await followed.until_equal(pods)


async def test_a_version_that_expired_is_410_and_the_deletes_it_missed_are_found(
    plane: ControlPlane, pods: Pods, settings: Manifest
) -> None:
    for number in range(3):
        pods.add(f"old-{number}", f"node-{number}", f"10.9.0.{number + 1}")
    followed = Followed(settings)
    followed.begin()
    try:
        await followed.until_equal(pods)
        await followed.until_current()
    finally:
        await followed.end()  # from here on nobody tells it anything
    pods.delete("old-1")
    pods.add("new", "node-1", "10.9.0.9")
    plane.kill_api_server()
    plane.start_api_server()  # its cache of events begins now
    assert "10.9.0.2:7100" in followed.discovery.found.addresses
    followed.begin()
    try:
        await followed.until_equal(pods)
        assert followed.total("expired") > 0
        assert "10.9.0.2:7100" not in followed.discovery.found.addresses
    finally:
        await followed.end()


async def test_bookmarks_carry_the_version_over_others_changes(
    plane: ControlPlane, pods: Pods, settings: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "WATCH_SECONDS", 5)
    pods.add("a", "node-0", "10.9.0.1")
    async with following(settings) as followed:
        await followed.until_current()
        own = followed.discovery.collections[0].listing
        before, events = own.ask(), own.counts.events
        # A pod that no selector of ours has: versions go on, and only bookmarks tell us.
        await asyncio.to_thread(pods.add, "other", "node-0", "10.9.0.2", "emberkv", {"a": "b"})
        await followed.until(lambda: own.counts.bookmarks > 0)
        assert own.ask() != before
        assert own.counts.events == events
        watches = own.counts.watches
        await followed.until(lambda: own.counts.watches > watches)  # it goes on from there
        await asyncio.to_thread(pods.set_ready, "a", False)
        await followed.until(lambda: not followed.discovery.found.daemons[0].is_ready)
        assert followed.total("lists") == 3
        assert followed.total("losses") == followed.total("expired") == 0


async def test_a_node_whose_lease_runs_out_is_silent(
    plane: ControlPlane, pods: Pods, settings: Manifest
) -> None:
    """Leases as kubelets keep them: node-0's is renewed, node-1's is not."""
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    moments = itertools.count(1)

    def moment() -> str:
        return f"2026-01-01T00:00:{next(moments) % 60:02}.000001Z"

    for number in (0, 1):
        pods.add(f"d-{number}", f"node-{number}", f"10.9.0.{number + 1}")
        spec = {
            "holderIdentity": f"node-{number}",
            "leaseDurationSeconds": 4,
            "renewTime": moment(),
        }
        plane.api(path, {"metadata": {"name": f"node-{number}"}, "spec": spec})
    try:
        async with following(settings) as followed:
            async with aio.timeout(SECONDS):
                while followed.discovery.silent_nodes != {"node-1"}:
                    renewed = {"spec": {"renewTime": moment()}}
                    await asyncio.to_thread(plane.api, f"{path}/node-0", renewed, "PATCH")
                    await asyncio.sleep(0.3)
            ready = {d.node_id: d.is_ready for d in followed.discovery.found.daemons}
            assert ready == {"node-0": True, "node-1": False}
    finally:
        for number in (0, 1):
            plane.api(f"{path}/node-{number}", method="DELETE")


VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    ("", "pods"),
    ("", "pods/exec"),
    ("", "pods/log"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "nodes"),
    ("", "services"),
    ("", "serviceaccounts/token"),
    ("apps", "daemonsets"),
    ("coordination.k8s.io", "leases"),
    ("rbac.authorization.k8s.io", "roles"),
)


@pytest.mark.parametrize("account", ["emberkv-router", "emberkv-index", "emberkv-store"])
def test_an_account_may_do_what_discovery_does_and_nothing_else(
    account: str, plane: ControlPlane, release: list[Manifest]
) -> None:
    token = plane.token_of(account)
    allowed = set()
    for namespace in ("emberkv", "engines", "kube-node-lease", "default", ""):
        for (group, resource), verb in itertools.product(RESOURCES, VERBS):
            name, _, sub = resource.partition("/")
            attributes = {
                "verb": verb,
                "group": group,
                "resource": name,
                "subresource": sub,
                "namespace": namespace,
            }
            review = plane.api(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": attributes},
                },
                token=token,
            )
            if review["status"]["allowed"]:
                allowed.add((namespace, resource, verb))
    pods = {(n, "pods", verb) for n in ("emberkv", "engines") for verb in ("list", "watch")}
    leases = {("kube-node-lease", "leases", verb) for verb in ("list", "watch")}
    assert allowed == (set() if account == "emberkv-store" else pods | leases)


def test_what_is_not_granted_is_refused_when_it_is_asked(
    plane: ControlPlane, release: list[Manifest], pods: Pods
) -> None:
    pods.add("a", "node-0", "10.9.0.1")
    token = plane.token_of("emberkv-router")
    assert len(plane.api("/api/v1/namespaces/emberkv/pods", token=token)["items"]) == 1
    for path in (
        "/api/v1/pods",
        "/api/v1/namespaces/emberkv/pods/a",
        "/api/v1/namespaces/default/pods",
        "/api/v1/namespaces/emberkv/secrets",
        "/api/v1/nodes",
    ):
        with pytest.raises(ApiError) as refused:
            plane.api(path, token=token)
        assert refused.value.code == 403, path


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_without_either_verb_it_does_not_work(
    verb: str, plane: ControlPlane, release: list[Manifest], pods: Pods, settings: Manifest
) -> None:
    pods.add("a", "node-0", "10.9.0.1")
    role = find(
        [m for m in release if m["metadata"].get("namespace") == "emberkv"],
        "Role",
        "emberkv-discovery",
    )
    path = "/apis/rbac.authorization.k8s.io/v1/namespaces/emberkv/roles/emberkv-discovery"
    (rule,) = role["rules"]
    less = [{**rule, "verbs": [kept for kept in rule["verbs"] if kept != verb]}]
    try:
        plane.api(path, {"rules": less}, "PATCH")
        async with following(settings) as followed:
            await followed.until(lambda: followed.total("losses") >= 3)
            own = followed.discovery.collections[0]
            assert not own.is_current
            plane.api(path, {"rules": role["rules"]}, "PATCH")
            await followed.until_current()  # granted again, without a restart
            await followed.until_equal(pods)
    finally:
        plane.api(path, {"rules": role["rules"]}, "PATCH")


def metrics(url: str) -> dict[str, float]:
    with urlopen(f"{url}/metrics", timeout=30) as page:  # noqa: S310
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_a_router_and_an_index_follow_a_daemon_by_its_pod(
    plane: ControlPlane, pods: Pods, settings: Manifest, tmp_path: Path
) -> None:
    index_token = tmp_path / "index-token"
    index_token.write_text(plane.token_of("emberkv-index"))
    with DaemonProcess(tmp_path / "daemon", "node-7") as daemon:
        port = daemon.endpoints["grpc_address"].rpartition(":")[2]
        pods.add("store-x", "node-7", "127.0.0.1", grpc_port=port)
        pods.add("engine-x", "node-7", "127.0.0.1", "engines", model="m", port="9")
        router = RouterProcess(
            tmp_path / "router", 0, [], {"index.kubernetes": json.dumps(settings)}
        )
        own = {**settings, "token_file": str(index_token)}
        index = IndexProcess(tmp_path / "index", [], {"index.kubernetes": json.dumps(own)})
        with contextlib.ExitStack() as stack:
            for server in (router, index):
                stack.callback(server.clean)
                server.start()
            urls = (router.endpoint["url"], f"http://{index.http_address}")

            def is_seen(url: str) -> bool:
                seen = metrics(url)
                return (
                    seen.get('emberkv_index_node_ok{node="node-7"}') == 1
                    and seen['emberkv_index_kube_pods{kind="daemon",ready="true"}'] == 1
                    and seen['emberkv_index_kube_pods{kind="engine",ready="true"}'] == 1
                )

            wait_until(lambda: all(map(is_seen, urls)), "the pods are followed")
            wait_until(lambda: engine_url(urls[0]) == "http://127.0.0.1:9", "the engine is known")
            pods.delete("engine-x", "engines")
            pods.delete("store-x")
            name = 'emberkv_index_kube_pods{kind="daemon",ready="true"}'
            wait_until(lambda: {metrics(url)[name] for url in urls} == {0}, "the pod is gone")


def engine_url(router: str) -> str:
    with urlopen(f"{router}/workers", timeout=30) as answer:  # noqa: S310
        listed: Any = json.load(answer)
        urls = [str(engine["url"]) for engine in listed["workers"]]
        return urls[0] if urls else ""
