"""The pods' own commands, users, mounts and probes, run on this machine as the manifests say."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from tests.helpers.manifests import CHART, find
from tests.helpers.pod import root_is_read_only, status_of
from tests.helpers.site import Site, metrics_of, metrics_page

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

CHAINS, CHAIN_BLOCKS = 60, 100
AT_ONCE = 20
"""Chains written before their writeback is waited for: fewer blocks than its queue takes."""
ENGINE = f"""
import json, sys
from client_sdk import SyncClient
from tests.helpers.chains import NAMESPACE, chain_of, read_chain, write_chain

chains = [chain_of(number, {CHAIN_BLOCKS}) for number in range(int(sys.argv[2]), int(sys.argv[3]))]

with SyncClient("/run/emberkv/daemon.sock", NAMESPACE, timeout_seconds=30.0) as client:
    if sys.argv[1] == "write":
        print(json.dumps(sum(len(write_chain(client, chain)) for chain in chains)))
    else:
        print(json.dumps([read_chain(client, chain, 20.0) for chain in chains]))
"""
_NAME = re.compile(r"\bemberkv_[a-z0-9_]+")


def _engine(site: Site, what: str, chains: range) -> object:
    """An engine's view: the vLLM example's user, groups and mounts, with the SDK in it."""
    pod = site.pod("Deployment", "emberkv-vllm")
    span = (str(chains[0]), str(chains[-1] + 1))
    engine = site.start(pod, "vllm", "python", "-c", ENGINE, what, *span)
    assert engine.finish(90) == 0, engine.output()
    return json.loads(engine.output().splitlines()[-1])


def _tier(metrics: dict[str, float], tier: str) -> float:
    return metrics[f'emberkv_store_blocks{{tier="{tier}"}}']


def test_an_upgraded_pod_serves_what_the_old_one_held(site: Site) -> None:
    pod, store = site.start_store()
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
        while _tier(metrics_of(pod, "store", "metrics"), "ssd") < (first + AT_ONCE) * CHAIN_BLOCKS:
            assert time.monotonic() < deadline, "writeback does not end"
            time.sleep(0.1)
    before = metrics_of(pod, "store", "metrics")
    assert 0 < _tier(before, "dram") < CHAINS * CHAIN_BLOCKS, "some must be on SSD alone"

    allowed = pod.spec["terminationGracePeriodSeconds"]
    store.stop(allowed)
    assert pod.probe("store", "readinessProbe") == 0

    pod, store = site.start_store()  # a new pod, the same directories
    after = metrics_of(pod, "store", "metrics")
    assert _tier(after, "dram") >= 0.99 * _tier(before, "dram")
    assert _tier(after, "ssd") == _tier(before, "ssd")
    assert (
        _engine(site, "read", range(CHAINS)) == [CHAIN_BLOCKS] * CHAINS
    )  # every byte is compared there
    read = metrics_of(pod, "store", "metrics")
    assert read['emberkv_store_hit_blocks_total{source="dram"}'] > 0
    assert read['emberkv_store_hit_blocks_total{source="ssd"}'] > 0
    assert read["emberkv_store_missed_blocks_total"] == 0
    store.stop(allowed)


def test_an_operator_in_the_pod_needs_no_token(site: Site) -> None:
    """As the chart's notes say: `kubectl exec`, the pod's own configuration, loopback."""
    pod, _ = site.start_store()
    port = pod.container("store")["ports"][0]["containerPort"]
    where = ("--config", "/etc/emberkv/emberkv.yaml", "--address", f"127.0.0.1:{port}")
    asked = site.start(pod, "store", "python", "-m", "client_sdk.cli.main", "status", *where)
    assert asked.finish(60) == 0, asked.output()
    assert "node-1" in asked.output()
    assert "serving" in asked.output()


def test_a_router_finds_the_daemon_by_its_services_name(site: Site) -> None:
    site.start_store()
    _engine(site, "write", range(3))
    pod, router = site.start_router()
    assert pod.probe("router", "livenessProbe") == 200
    assert pod.probe("router", "readinessProbe") == 503  # there is no engine
    deadline = time.monotonic() + 40
    while metrics_of(pod, "router", "http").get('emberkv_index_node_ok{node="node-1"}') != 1:
        assert time.monotonic() < deadline, router.output()
        time.sleep(0.1)
    router.stop(pod.spec["terminationGracePeriodSeconds"])


def test_alerts_and_dashboard_ask_for_metrics_that_exist(site: Site) -> None:
    store_pod, _ = site.start_store()
    router_pod, _ = site.start_router()
    known = set()
    for pod, container, port in ((store_pod, "store", "metrics"), (router_pod, "router", "http")):
        for line in metrics_page(pod, container, port).splitlines():
            match line.split():
                case ["#", "TYPE", name, "histogram"]:
                    known |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
                case ["#", "TYPE", name, _]:
                    known.add(name)
    rules = find(site.manifests, "PrometheusRule", "emberkv")["spec"]["groups"]
    asked = [rule["expr"] for group in rules for rule in group["rules"]]
    dashboards = [json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")]
    panels = [panel for dashboard in dashboards for panel in dashboard["panels"]]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) >= 15
    assert len(shown) >= 18
    unknown = {name for text in asked + shown for name in _NAME.findall(text)} - known
    assert not unknown


def test_a_preflight_that_refuses_the_node_says_so_in_the_last_line(site: Site) -> None:
    pod = site.pod("DaemonSet", "emberkv-store")
    store = site.start(pod, "store")  # without the init container the directories are root's
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
