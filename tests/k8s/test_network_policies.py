"""Who may reach whom by the chart's policies, judged as a network plugin judges them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.manifests import Manifest, kustomized, template_of

OWN = "emberkv"
VALUES: Manifest = {
    "store": {
        "config": {
            "events": {
                "zmq_endpoint": "tcp://0.0.0.0:5557",
                "zmq_replay_endpoint": "tcp://0.0.0.0:5558",
            }
        }
    },
    "router": {"extProcPort": 9002, "config": {"index": {"http_port": 7300}}},
    "index": {"enabled": True},
    "redis": {"server": {"enabled": True, "replicas": 3}},
    "networkPolicy": {
        "routerClients": [{"namespaceSelector": {"matchLabels": {"who": "clients"}}}],
        "indexClients": [{"podSelector": {"matchLabels": {"app": "epp"}}}],
        "eventListeners": [{"podSelector": {"matchLabels": {"app": "epp"}}}],
        "engines": [{"namespaceSelector": {"matchLabels": {"who": "engines"}}}],
    },
}


@dataclass(frozen=True)
class Peer:
    """A pod, or an address of none."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = OWN
    namespace_labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.1.2.3"


def of(part: str) -> Peer:
    keys = {"name": "emberkv", "instance": "emberkv", "component": part}
    return Peer({f"app.kubernetes.io/{key}": value for key, value in keys.items()})


def elsewhere(namespace: str, **labels: str) -> Peer:
    named = {"kubernetes.io/metadata.name": namespace, **labels}
    return Peer({}, namespace, named)


PARTS = {part: of(part) for part in ("store", "router", "index", "redis")}
PEERS = {
    **PARTS,
    "epp": Peer({"app": "epp"}),
    "stranger": Peer({"app": "other"}),
    "client": elsewhere("web", who="clients"),
    "engine": elsewhere("vllm", who="engines"),
    "prometheus": elsewhere("monitoring"),
    "dns": elsewhere("kube-system"),
    "openshift dns": elsewhere("openshift-dns"),
    "node-local dns": Peer({}, "", {}, "169.254.20.10"),
}


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _is_named(rule: Manifest, peer: Peer) -> bool:
    if "ipBlock" in rule:
        return ip_address(peer.address) in ip_network(rule["ipBlock"]["cidr"])
    if not peer.namespace:
        return False
    if "namespaceSelector" in rule:
        is_there = _selects(rule["namespaceSelector"], peer.namespace_labels)
    else:
        is_there = peer.namespace == OWN
    return is_there and _selects(rule.get("podSelector", {}), peer.labels)


def _lets(rules: Iterable[Manifest], key: str, peer: Peer, port: int, protocol: str) -> bool:
    wanted = {"port": port, "protocol": protocol}
    return any(
        (key not in rule or any(_is_named(named, peer) for named in rule[key]))
        and ("ports" not in rule or wanted in rule["ports"])
        for rule in rules
    )


@dataclass(frozen=True)
class Policies:
    manifests: list[Manifest]

    def let(self, source: str, target: str, port: int, protocol: str = "TCP") -> bool:
        """Both ends must allow it; a pod that no policy selects allows everything."""
        out = self._of(PEERS[source], "egress")
        into = self._of(PEERS[target], "ingress")
        return (out is None or _lets(out, "to", PEERS[target], port, protocol)) and (
            into is None or _lets(into, "from", PEERS[source], port, protocol)
        )

    def _of(self, peer: Peer, way: str) -> list[Manifest] | None:
        policies = [
            m["spec"]
            for m in self.manifests
            if m["kind"] == "NetworkPolicy"
            and peer.namespace == OWN
            and _selects(m["spec"]["podSelector"], peer.labels)
        ]
        if not policies:
            return None
        assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in policies)
        return [rule for spec in policies for rule in spec[way]]


USED: dict[tuple[str, str], set[int]] = {
    ("store", "store"): {7100, 7102},
    ("router", "store"): {7100},
    ("index", "store"): {7100},
    ("store", "index"): {7200},
    ("store", "router"): {7200},
    ("router", "router"): {7200},
    ("router", "index"): {7200},
    ("index", "router"): {7200},
    ("index", "index"): {7200},
    ("router", "redis"): {6379},
    ("index", "redis"): {6379},
    ("redis", "redis"): {6379, 16379},
    ("client", "router"): {8000, 9002},
    ("prometheus", "store"): {7101},
    ("prometheus", "router"): {8000, 9002},
    ("prometheus", "index"): {7201},
    ("epp", "index"): {7200, 7201},
    ("epp", "router"): {7200, 7300},
    ("epp", "store"): {5557, 5558},
}
"""Of which ports somebody makes use; every other one between these is to be refused."""
PORTS = {7100, 7101, 7102, 7200, 7201, 7300, 8000, 9002, 5557, 5558, 6379, 16379, 22}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(template_of(VALUES, tmp_path_factory.mktemp("chart")))


@pytest.mark.parametrize("target", PARTS)
@pytest.mark.parametrize("source", [name for name in PEERS if "dns" not in name])
def test_ports_are_open_to_whom_they_serve_and_to_nobody_else(
    source: str, target: str, policies: Policies
) -> None:
    let = {port for port in PORTS if policies.let(source, target, port)}
    assert let == USED.get((source, target), set())


@pytest.mark.parametrize("part", ["router", "index"])
def test_engines_are_reached_on_every_port_as_their_events_have_ports_of_their_own(
    part: str, policies: Policies
) -> None:
    assert all(policies.let(part, "engine", port) for port in (8000, 5557, 30000))
    assert not policies.let("store", "engine", 8000)
    assert not policies.let("redis", "engine", 8000)


@pytest.mark.parametrize("part", PARTS)
def test_names_can_be_looked_up_wherever_a_cluster_has_its_dns(
    part: str, policies: Policies
) -> None:
    for protocol in ("UDP", "TCP"):
        assert policies.let(part, "dns", 53, protocol)
        assert policies.let(part, "openshift dns", 5353, protocol)
        assert policies.let(part, "node-local dns", 53, protocol)
    assert not policies.let(part, "dns", 443)
    assert not policies.let(part, "stranger", 53)


@pytest.mark.parametrize(
    ("values", "is_any"),
    [
        ({}, False),
        ({"rdma": {"resource": "rdma/hca"}}, True),
        ({"config": {"transport": {"kind": "ucx"}}}, True),
        ({"config": {"transport": {"kind": "auto"}}}, True),
        ({"config": {"transport": {"kind": "tcp"}}}, False),
    ],
)
def test_daemons_whose_blocks_go_by_ucx_reach_each_other_on_every_port(
    values: dict[str, Any], is_any: bool, tmp_path: Path
) -> None:
    policies = Policies(template_of({"store": values}, tmp_path))
    assert policies.let("store", "store", 41_234) is is_any
    assert not policies.let("router", "store", 41_234)


def test_every_pod_of_ours_has_a_policy(policies: Policies) -> None:
    for name, peer in PARTS.items():
        assert policies._of(peer, "ingress"), name


def test_the_overlay_with_redis_lets_routers_to_it() -> None:
    policies = Policies(kustomized("overlays/redis-ha"))
    assert policies.let("router", "redis", 6379)
    assert policies.let("redis", "redis", 16379)
    assert not policies.let("store", "redis", 6379)
