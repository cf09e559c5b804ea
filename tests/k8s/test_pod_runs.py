"""The pods' own commands, users, mounts and probes, run on this machine as the manifests say."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.helpers.cluster import free_port
from tests.helpers.manifests import CHART, Manifest, find, template_of
from tests.helpers.pod import Node, Pod, Running, require_mounts, root_is_read_only, status_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

CHAINS, CHAIN_BLOCKS = 60, 100
AT_ONCE = 20
"""Chains written before their writeback is waited for: fewer blocks than its queue takes."""
ENGINE = f"""
import json, sys
from client_sdk import SyncClient
from tests.helpers.chains import NAMESPACE, chain_of, read_chain, write_chain

chains = [chain_of(number, {CHAIN_BLOCKS}) for number in range(int(sys.argv[2]), int(sys.argv[3]))]

with SyncClient("/run/emberkv/daemon.sock", NAMESPACE, timeout_seconds=5.0) as client:
    if sys.argv[1] == "write":
        print(json.dumps(sum(len(write_chain(client, chain)) for chain in chains)))
    else:
        print(json.dumps([read_chain(client, chain, 20.0) for chain in chains]))
"""
_NAME = re.compile(r"\bemberkv_[a-z0-9_]+")


@dataclass
class Site:
    """A rendered release on one node."""

    manifests: list[Manifest]
    node: Node

    def pod(self, kind: str, name: str) -> Pod:
        spec = find(self.manifests, kind, name)["spec"]["template"]["spec"]
        return Pod(spec, self.node, self.manifests)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Small tiers, free ports, monitoring on; all else as the chart has it."""
    require_mounts()
    tmp_path.chmod(0o755)
    grpc, metrics, transfer, router, index = (free_port() for _ in range(5))
    values = {
        "store": {
            "ports": {"grpc": grpc, "metrics": metrics, "transfer": transfer},
            "pool": {"capacityMi": 64},
            "ssd": {"capacityMi": 512},
            "config": {
                "dram": {"capacity_bytes": 16 << 20, "extent_bytes": 1 << 20},
                "ssd": {"segment_bytes": 8 << 20},
            },
        },
        "router": {"port": router, "config": {"index": {"backend": "python"}}},
        "index": {"ports": {"grpc": index, "metrics": free_port()}},
        "monitoring": {"enabled": True},
        "vllm": {"enabled": True},
    }
    shm = Path(f"/dev/shm/emberkv-test-k8s-{os.getpid()}")
    shm.mkdir(mode=0o755)
    names = ("emberkv-store.emberkv.svc", "emberkv-index.emberkv.svc")
    try:
        yield Site(template_of(values, tmp_path), Node(tmp_path, shm, hosts=names))
    finally:
        shutil.rmtree(shm)


@pytest.fixture
def running() -> Iterator[list[Running]]:
    """Ends whatever a test has started and not stopped."""
    started: list[Running] = []
    yield started
    for one in started:
        one.kill()


def _start_store(site: Site, running: list[Running]) -> tuple[Pod, Running]:
    pod = site.pod("DaemonSet", "emberkv-store")
    pod.run_init()
    store = pod.start("store")
    running.append(store)
    pod.wait_for("store", "startupProbe", store)
    return pod, store


def _engine(site: Site, what: str, chains: range) -> object:
    """An engine's view: the vLLM example's user, groups and mounts, with the SDK in it."""
    pod = site.pod("Deployment", "emberkv-vllm")
    engine = pod.start("vllm", ["python", "-c", ENGINE, what, str(chains[0]), str(chains[-1] + 1)])
    assert engine.finish(90) == 0, engine.output()
    return json.loads(engine.output().splitlines()[-1])


def _metrics(pod: Pod, container: str, port_name: str) -> dict[str, float]:
    ports = {p["name"]: p["containerPort"] for p in pod.container(container)["ports"]}
    with urlopen(f"http://127.0.0.1:{ports[port_name]}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _tier(metrics: dict[str, float], tier: str) -> float:
    return metrics[f'emberkv_store_blocks{{tier="{tier}"}}']


def test_an_upgraded_pod_serves_what_the_old_one_held(site: Site, running: list[Running]) -> None:
    pod, store = _start_store(site, running)
    status = status_of(store.pid)
    assert status["Uid"].split() == ["10001"] * 4
    assert status["Groups"] == ""
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert root_is_read_only(store.pid)
    for directory in ("run/emberkv", "var/lib/emberkv/data", "var/lib/emberkv/ssd"):
        made = site.node.host_path(f"/{directory}").stat()
        assert (made.st_uid, made.st_gid, made.st_mode & 0o777) == (10001, 10001, 0o750)
    assert pod.probe("store", "readinessProbe") == pod.probe("store", "livenessProbe") == 200

    for first in range(0, CHAINS, AT_ONCE):
        written = _engine(site, "write", range(first, first + AT_ONCE))
        assert written == AT_ONCE * CHAIN_BLOCKS
        deadline = time.monotonic() + 60
        while _tier(_metrics(pod, "store", "metrics"), "ssd") < (first + AT_ONCE) * CHAIN_BLOCKS:
            assert time.monotonic() < deadline, "writeback does not end"
            time.sleep(0.1)
    before = _metrics(pod, "store", "metrics")
    assert 0 < _tier(before, "dram") < CHAINS * CHAIN_BLOCKS, "some must be on SSD alone"

    allowed = pod.spec["terminationGracePeriodSeconds"]
    store.stop(allowed)
    assert pod.probe("store", "readinessProbe") == 0

    pod, store = _start_store(site, running)  # a new pod, the same directories
    after = _metrics(pod, "store", "metrics")
    assert _tier(after, "dram") >= 0.99 * _tier(before, "dram")
    assert _tier(after, "ssd") == _tier(before, "ssd")
    assert (
        _engine(site, "read", range(CHAINS)) == [CHAIN_BLOCKS] * CHAINS
    )  # every byte is compared there
    read = _metrics(pod, "store", "metrics")
    assert read['emberkv_store_hit_blocks_total{source="dram"}'] > 0
    assert read['emberkv_store_hit_blocks_total{source="ssd"}'] > 0
    assert read["emberkv_store_missed_blocks_total"] == 0
    store.stop(allowed)


def test_a_router_finds_the_daemon_by_its_services_name(site: Site, running: list[Running]) -> None:
    _start_store(site, running)
    _engine(site, "write", range(3))
    pod = site.pod("Deployment", "emberkv-router")
    router = pod.start("router")
    running.append(router)
    pod.wait_for("router", "startupProbe", router)
    assert pod.probe("router", "livenessProbe") == 200
    assert pod.probe("router", "readinessProbe") == 503  # there is no engine
    deadline = time.monotonic() + 40
    while _metrics(pod, "router", "http").get('emberkv_index_node_ok{node="node-1"}') != 1:
        assert time.monotonic() < deadline, router.output()
        time.sleep(0.1)
    router.stop(pod.spec["terminationGracePeriodSeconds"])


def test_alerts_and_dashboard_ask_for_metrics_that_exist(
    site: Site, running: list[Running]
) -> None:
    store_pod, _ = _start_store(site, running)
    router_pod = site.pod("Deployment", "emberkv-router")
    router = router_pod.start("router")
    running.append(router)
    router_pod.wait_for("router", "startupProbe", router)
    known = set()
    for pod, container, port in ((store_pod, "store", "metrics"), (router_pod, "router", "http")):
        ports = {p["name"]: p["containerPort"] for p in pod.container(container)["ports"]}
        with urlopen(f"http://127.0.0.1:{ports[port]}/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                match line.split():
                    case ["#", "TYPE", name, "histogram"]:
                        known |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
                    case ["#", "TYPE", name, _]:
                        known.add(name)
    rules = find(site.manifests, "PrometheusRule", "emberkv")["spec"]["groups"]
    asked = [rule["expr"] for group in rules for rule in group["rules"]]
    dashboard = json.loads((CHART / "dashboards/emberkv.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 15
    assert len(shown) >= 18
    unknown = {name for text in asked + shown for name in _NAME.findall(text)} - known
    assert not unknown


def test_a_preflight_that_refuses_the_node_says_so_in_the_last_line(
    site: Site, running: list[Running]
) -> None:
    pod = site.pod("DaemonSet", "emberkv-store")
    store = pod.start("store")  # without the init container the directories are root's
    running.append(store)
    assert store.finish(50) == 2
    said = store.output().splitlines()[-1]  # FallbackToLogsOnError shows it in the pod's status
    assert "not writable for uid 10001" in said


def test_directories_of_another_user_are_left_alone(site: Site) -> None:
    pod = site.pod("DaemonSet", "emberkv-store")
    foreign = site.node.host_path("/var/lib/emberkv/data")
    os.chown(foreign, 4242, 4242)
    pod.run_init()
    assert foreign.stat().st_uid == 4242
    assert site.node.host_path("/run/emberkv").stat().st_uid == 10001
