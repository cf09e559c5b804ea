"""Discovery against an HTTP server that speaks the API's list and watch, with its faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from client_sdk import aio
from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError, InvalidRequestError, UnavailableError
from global_index.config import IndexSettings
from global_index.embedded import GlobalIndex
from global_index.kube import discovery as discovery_module
from global_index.kube.api import Access, KubeApi, RefusedError, server_url
from global_index.kube.discovery import KubernetesDiscovery
from global_index.kube.pods import Discovered
from global_index.kube.settings import KubernetesSection
from global_index.metrics import IndexMetrics
from tests.helpers.naive_kube_api import NaiveKubeApi, Raw, ServedKubeApi, pod, serving
from tests.helpers.waiting import until

ENGINE = {"part": "engine"}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_FIRST_SECONDS", "RETRY_MAX_SECONDS", "SHORTEST_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(discovery_module, name, 0.02)


def section_of(served: ServedKubeApi, token_file: Path, **more: object) -> KubernetesSection:
    token_file.touch()
    return KubernetesSection.model_validate(
        {
            "namespace": "ns",
            "daemons": "part=store",
            "engines": "part=engine",
            "api_url": served.url,
            "token_file": token_file,
            **more,
        }
    )


class Followed:
    """A running discovery and what it told."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.discovery = discovery
        self.told: list[Discovered] = []

    async def apply(self, found: Discovered) -> None:
        self.told.append(found)

    async def until(self, is_so: Callable[[], bool]) -> None:
        await until(is_so)
        self.discovery.check_integrity()

    async def until_addresses(self, *hosts: str) -> None:
        wanted = {f"{host}:7100" for host in hosts}
        await self.until(lambda: self.discovery.found.addresses == wanted)

    def total(self, name: str) -> int:
        return sum(getattr(c.listing.counts, name) for c in self.discovery.collections)


@asynccontextmanager
async def following(section: KubernetesSection) -> AsyncIterator[Followed]:
    followed = Followed(KubernetesDiscovery(section))
    task = asyncio.create_task(followed.discovery.run(followed.apply))
    try:
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_that_come_change_and_go_are_followed(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    api.put(pod("e1", "n2", "10.0.1.1", labels=ENGINE))
    async with serving(pods=api) as served, following(section_of(served, tmp_path / "t")) as f:
        await f.until_addresses("10.0.0.1")
        (engine,) = f.discovery.found.engines
        assert (engine.node_id, engine.is_ready) == ("", True)
        api.put(pod("d2", "n2", "10.0.0.2"))
        served.tell()
        await f.until_addresses("10.0.0.1", "10.0.0.2")
        assert f.discovery.found.engines[0].node_id == "n2"
        api.put(pod("e1", "n2", "10.0.1.1", labels=ENGINE, leaving=True))
        api.delete("d1")
        served.tell()
        await f.until_addresses("10.0.0.2")
        await f.until(lambda: not f.discovery.found.engines[0].is_ready)
        assert f.total("losses") == 0
        assert {seen.get("labelSelector") for seen in served.seen} == {"part=store", "part=engine"}


async def test_a_first_list_of_many_pages_is_told_at_once(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    for number in range(1203):
        api.put(pod(f"d{number}", f"n{number}", f"10.0.{number // 256}.{number % 256}"))
    async with serving(pods=api) as served, following(section_of(served, tmp_path / "t")) as f:
        await f.until(lambda: len(f.discovery.found.daemons) == 1203)
        assert len(f.told) == 1
        assert sum("continue" in seen for seen in served.seen) >= 2


@pytest.mark.parametrize("how", ["status", "event", "cut line", "no json", "refused", "closed"])
async def test_a_watch_that_breaks_loses_nothing(how: str, tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    async with serving(pods=api) as served, following(section_of(served, tmp_path / "t")) as f:
        await f.until(lambda: f.total("watches") == 2)
        api.put(pod("d2", "n2", "10.0.0.2"))
        api.delete("d1")  # nobody is told: a DELETED that is missed
        match how:
            case "status":
                api.compact()
            case "event":
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
                served.cuts += [json.dumps(gone).encode() + b"\n"] * 2
            case "cut line":
                served.cuts += [b'{"type": "ADDED", "obj'] * 2
            case "no json":
                served.cuts += [b"<html>\n"] * 2
            case "refused":
                served.refusals += [500, 503]
        served.drop_watches()
        await f.until_addresses("10.0.0.2")
        if how in ("status", "event"):
            assert f.total("expired") == 2
        if how == "closed":
            assert f.total("lists") == 2, "the watch went on where it was"


async def test_bookmarks_keep_the_version_young(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    async with serving(pods=api) as served, following(section_of(served, tmp_path / "t")) as f:
        await f.until(lambda: f.total("watches") == 2)
        for _ in range(5):
            api.put(pod("other", labels={"part": "else"}))
        api.delete("other")
        api.compact()
        served.cuts += [json.dumps(api.bookmark()).encode() + b"\n"] * 2
        served.drop_watches()  # these two watches' versions are too old: lists, then the bookmarks
        await f.until(lambda: f.total("bookmarks") == 2)
        await f.until(lambda: f.total("watches") == 6)
        assert f.total("expired") == 2
        assert f.total("lists") == 4
        assert int(served.seen[-1]["resourceVersion"]) == api.version


async def test_a_change_that_no_watch_told_is_found_by_the_next_list(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    async with serving(pods=api) as served:
        section = section_of(served, tmp_path / "t", relist_seconds=0.2)
        async with following(section) as f:
            await f.until_addresses("10.0.0.1")
            served.unspoken.add("DELETED")
            api.delete("d1")
            api.put(pod("d2", "n2", "10.0.0.2"))
            served.tell()
            await f.until(lambda: "10.0.0.2:7100" in f.discovery.found.addresses)
            async with aio.timeout(30):
                while f.discovery.found.addresses != {"10.0.0.2:7100"}:
                    api.put(pod("d2", "n2", "10.0.0.2"))  # the watch lives, and hides one thing
                    served.tell()
                    await asyncio.sleep(0.01)


async def test_while_the_api_is_away_what_was_found_stays(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    async with serving(pods=api) as served, following(section_of(served, tmp_path / "t")) as f:
        await f.until(lambda: f.total("watches") == 2)
        served.refusals += [503] * 40
        served.drop_watches()
        await f.until(lambda: not served.refusals)
        assert f.discovery.found.addresses == {"10.0.0.1:7100"}
        assert len(f.told) == 1
        api.put(pod("d2", "n2", "10.0.0.2"))
        served.tell()
        await f.until_addresses("10.0.0.1", "10.0.0.2")


async def test_a_renewed_token_is_taken(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "10.0.0.1"))
    token = tmp_path / "t"
    async with serving(pods=api) as served:
        served.token = "new"
        async with following(section_of(served, token)) as f:
            await f.until(lambda: f.total("losses") >= 2)
            assert f.told == []
            token.write_text("new\n")
            await f.until_addresses("10.0.0.1")


async def test_nodes_that_are_not_heard_of_make_their_pods_unready(tmp_path: Path) -> None:
    def lease(name: str, moment: int) -> Raw:
        spec = {"holderIdentity": name, "renewTime": str(moment), "leaseDurationSeconds": 40}
        return {"metadata": {"namespace": "kube-node-lease", "name": name}, "spec": spec}

    now = 1000.0
    pods, leases = NaiveKubeApi(), NaiveKubeApi()
    for number in (1, 2):
        pods.put(pod(f"d{number}", f"n{number}", f"10.0.0.{number}"))
        leases.put(lease(f"n{number}", 0))
    async with serving(pods=pods, leases=leases) as served:
        section = section_of(served, tmp_path / "t", node_leases=True)
        followed = Followed(KubernetesDiscovery(section, clock=lambda: now))
        task = asyncio.create_task(followed.discovery.run(followed.apply))
        try:
            await followed.until(lambda: followed.total("watches") == 3)
            await followed.until(lambda: len(followed.told) == 1)
            leases.put(lease("n2", 1))
            served.tell()
            await followed.until(lambda: followed.total("events") == 1)
            await asyncio.sleep(0.1)  # it has looked at them
            now += 39
            leases.put(lease("n2", 2))
            served.tell()
            await followed.until(lambda: followed.total("events") == 2)
            await asyncio.sleep(0.1)
            now += 2
            await followed.until(lambda: followed.discovery.silent_nodes == {"n1"})
            await followed.until(
                lambda: [d.is_ready for d in followed.discovery.found.daemons] == [False, True]
            )
            assert len(followed.discovery.found.addresses) == 2  # still followed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_an_index_follows_the_pods_beside_its_nodes(tmp_path: Path) -> None:
    api = NaiveKubeApi()
    api.put(pod("d1", "n1", "127.0.0.1", notes={"grpc-port": "9"}))
    api.put(pod("d2", "n2", "127.0.0.1", notes={"grpc-port": "11"}))
    notes = {"events-port": "9", "model": "m"}
    api.put(pod("e1", "n1", "127.0.0.1", labels=ENGINE, notes=notes))
    async with serving(pods=api) as served:
        section = load_settings(
            IndexSettings, None, ["index.nodes=['127.0.0.1:11']", "index.backend=python"], {}
        ).index.model_copy(update={"kubernetes": section_of(served, tmp_path / "t")})
        addresses = {"127.0.0.1:9", "127.0.0.1:11"}
        async with GlobalIndex(section) as index:
            await until(lambda: set(index.streams()) == addresses and bool(index.engines()))
            (view,) = index.engines()
            assert (view.key.node_id, view.info.engine_id) == ("n1", "e1")
            (engine,) = index.discovered_engines()
            assert engine.info.url == "http://127.0.0.1:8000"
            page = generate_latest(IndexMetrics(index).registry).decode()
            assert 'emberkv_index_kube_pods{kind="daemon",ready="true"} 2.0' in page
            assert 'emberkv_index_kube_current{collection="daemons in ns"} 1.0' in page
            for name in ("d1", "d2", "e1"):
                api.delete(name)
            served.tell()
            of_the_file = {"127.0.0.1:11"}
            await until(lambda: set(index.streams()) == of_the_file and not index.engines())
            index.check_integrity()


async def test_outside_of_a_pod_it_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        server_url({})
    pod_environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert server_url(pod_environment) == "https://[fd00::1]:443"
    with pytest.raises(ConfigError, match=r"kubernetes\.namespace"):
        KubernetesDiscovery(KubernetesSection(daemons="a=b", api_url="https://127.0.0.1:1"))


async def test_calls_end_with_errors_of_ours(tmp_path: Path) -> None:
    async with serving(pods=NaiveKubeApi()) as served:
        async with KubeApi(Access(served.url)) as api:
            with pytest.raises(RefusedError, match="404: no: 404"):
                await api.get("/api/v1/nowhere")
        async with KubeApi(Access(served.url, token_file=tmp_path / "none")) as api:
            with pytest.raises(UnavailableError, match="token cannot be read"):
                await api.get("/api/v1/nowhere")
    async with KubeApi(Access(served.url)) as api:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await api.get("/api/v1/nowhere")
    with pytest.raises(ConfigError, match="certificates"):
        async with KubeApi(Access("https://127.0.0.1:1", ca_file=tmp_path / "none")):
            pass


@pytest.mark.parametrize("text", [b"[]\n", b"[" * 100_000 + b"\n", b"x" * (9 << 20)])
async def test_a_watch_without_sense_is_an_error_of_ours(text: bytes) -> None:
    async with serving(pods=NaiveKubeApi()) as served:
        served.cuts.append(text)
        async with KubeApi(Access(served.url)) as api:
            with pytest.raises(InvalidRequestError):
                await _read(api)


async def _read(api: KubeApi) -> None:
    async with api.watch("/api/v1/namespaces/ns/pods", resourceVersion="100") as events:
        async for _ in events:
            pass
