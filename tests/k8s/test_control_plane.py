"""Our manifests under a real control plane: what its controllers and its scheduler make of them.

The server is 1.20.2, the newest whose source can be had as a Debian package, so what is newer than
that is translated or left out here; test_manifests.py checks it against the schemas of 1.29 on.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from client_sdk.cli.doctor import Finding, Verdict
from client_sdk.cli.doctor_k8s import Release, examine_release
from tests.helpers.control_plane import (
    ApiError,
    ControlPlane,
    Kubelets,
    require_control_plane,
    wait_until,
)
from tests.helpers.manifests import Manifest, find, kustomized, template_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

MARK = "checksum/config"
SELECTOR = "app.kubernetes.io/name=emberkv,app.kubernetes.io/component=store"
NODES = ("node-a", "node-b", "node-c")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    require_control_plane()
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        for name in NODES:
            plane.add_node(name)
        yield plane


@pytest.fixture(scope="module")
def kubelets(plane: ControlPlane) -> Iterator[Kubelets]:
    with Kubelets(plane) as kubelets:
        yield kubelets


@pytest.fixture(scope="module")
def release(plane: ControlPlane, kubelets: Kubelets) -> list[Manifest]:
    """The kustomize base, applied in its own order."""
    manifests = for_this_server(kustomized("base"))
    plane.apply(*manifests)
    settle(plane)
    return manifests


def for_this_server(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Without what 1.20 does not know."""
    known = copy.deepcopy(list(manifests))
    for manifest in known:
        if manifest["kind"] == "PodDisruptionBudget":
            manifest["apiVersion"] = "policy/v1beta1"
            del manifest["spec"]["unhealthyPodEvictionPolicy"]
        if manifest["kind"] == "Service":
            manifest["spec"].pop("internalTrafficPolicy", None)
    return known


def status(plane: ControlPlane, kind: str, name: str) -> Manifest:
    path = f"/apis/apps/v1/namespaces/emberkv/{kind}/{name}"
    found: Manifest = plane.api(path)
    return found


def settle(plane: ControlPlane, nodes: int = len(NODES)) -> None:
    """Until the DaemonSet has brought all its pods to its newest template, and they are ready."""

    def is_settled() -> bool:
        daemons = status(plane, "daemonsets", "emberkv-store")
        state, generation = daemons["status"], daemons["metadata"]["generation"]
        numbers = [state.get(key, 0) for key in ("numberReady", "updatedNumberScheduled")]
        is_seen = state.get("observedGeneration") == generation
        return is_seen and numbers == [nodes, nodes] and len(plane.pods("store")) == nodes

    wait_until(is_settled, "the DaemonSet settles", 120)


def templates_of(plane: ControlPlane) -> dict[str, str]:
    """Of each store pod the checksum of the configuration it was made for."""
    return {
        pod["spec"].get("nodeName", "not yet bound"): pod["metadata"]["annotations"][MARK]
        for pod in plane.pods("store")
    }


def changed(release: list[Manifest], mark: str, strategy: Manifest) -> Manifest:
    daemons = copy.deepcopy(find(release, "DaemonSet", "emberkv-store"))
    daemons["spec"]["template"]["metadata"]["annotations"][MARK] = mark
    daemons["spec"]["updateStrategy"] = strategy
    daemons["spec"]["minReadySeconds"] = 0
    return daemons


def test_each_node_gets_one_daemon_and_routers_spread(
    plane: ControlPlane, release: list[Manifest]
) -> None:
    pods = plane.pods("store")
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == sorted(NODES)
    for pod in pods:
        assert pod["spec"]["priority"] == 1000000
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert volumes == {"pool", "socket", "data", "ssd-0", "config"}  # and no token
    routers = plane.pods("router")
    assert len({pod["spec"]["nodeName"] for pod in routers}) == len(routers) == 2


def test_a_daemon_that_is_not_ready_keeps_its_address_and_a_router_loses_it(
    plane: ControlPlane, kubelets: Kubelets, release: list[Manifest]
) -> None:
    store, router = plane.pods("store")[0], plane.pods("router")[0]

    def addresses(service: str) -> set[str]:
        found = plane.api(f"/api/v1/namespaces/emberkv/endpoints/{service}")
        subsets = found.get("subsets", ())
        return {entry["ip"] for subset in subsets for entry in subset.get("addresses", ())}

    names = {pod["metadata"]["name"] for pod in (store, router)}
    kubelets.unready |= names
    try:
        lost = router["status"]["podIP"]
        wait_until(lambda: lost not in addresses("emberkv-router"), "the router is taken out")
        assert len(addresses("emberkv-store")) == 3
        assert store["status"]["podIP"] in addresses("emberkv-store")
        assert lost in addresses("emberkv-index")  # daemons may still ask it
    finally:
        kubelets.unready -= names
    wait_until(lambda: len(addresses("emberkv-router")) == 2, "the router is back")
    settle(plane)


def test_on_delete_waits_for_the_operator_and_rolling_takes_one_node_at_a_time(
    plane: ControlPlane, kubelets: Kubelets, release: list[Manifest]
) -> None:
    old = set(templates_of(plane).values())
    assert len(old) == 1
    plane.apply(changed(release, "second", {"type": "OnDelete"}))

    def is_seen() -> bool:
        daemons = status(plane, "daemonsets", "emberkv-store")
        return bool(daemons["status"]["observedGeneration"] == daemons["metadata"]["generation"])

    wait_until(is_seen, "the controller has seen the change")
    assert set(templates_of(plane).values()) == old
    victim = plane.pods("store")[0]
    plane.kubectl("-n", "emberkv", "delete", "pod", victim["metadata"]["name"], "--wait=false")
    node = victim["spec"]["nodeName"]
    wait_until(lambda: templates_of(plane).get(node) == "second", "the deleted pod's successor")
    assert sorted(templates_of(plane).values()) == sorted([*old, *old, "second"])

    wait_until(
        lambda: status(plane, "daemonsets", "emberkv-store")["status"].get("numberReady") == 3,
        "all are ready",
    )
    kubelets.fewest_ready["store"] = 3
    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    plane.apply(changed(release, "third", one_by_one))
    settle(plane)
    assert set(templates_of(plane).values()) == {"third"}
    assert kubelets.fewest_ready.pop("store") >= 2


def test_accounts_may_do_nothing(plane: ControlPlane, release: list[Manifest]) -> None:
    """Nobody asks the API server, so nothing is granted; what everybody may ask stays."""
    accounts = [m["metadata"]["name"] for m in release if m["kind"] == "ServiceAccount"]
    assert accounts == ["emberkv-router", "emberkv-store"]
    for account in accounts:
        user = f"system:serviceaccount:emberkv:{account}"
        for verb in ("get", "list", "watch", "create", "delete"):
            for group, resource in (
                ("", "pods"),
                ("", "secrets"),
                ("", "configmaps"),
                ("", "nodes"),
                ("coordination.k8s.io", "leases"),
                ("discovery.k8s.io", "endpointslices"),
            ):
                attributes = {
                    "verb": verb,
                    "group": group,
                    "resource": resource,
                    "namespace": "emberkv",
                }
                review = plane.api(
                    "/apis/authorization.k8s.io/v1/subjectaccessreviews",
                    {
                        "apiVersion": "authorization.k8s.io/v1",
                        "kind": "SubjectAccessReview",
                        "spec": {
                            "user": user,
                            "groups": ["system:serviceaccounts", "system:authenticated"],
                            "resourceAttributes": attributes,
                        },
                    },
                )
                assert not review["status"]["allowed"], attributes


def test_the_token_that_an_account_has_is_refused(
    plane: ControlPlane, release: list[Manifest]
) -> None:
    token = plane.token_of("emberkv-store")
    with pytest.raises(ApiError) as refused:
        plane.api("/api/v1/namespaces/emberkv/pods", token=token)
    assert refused.value.code == 403


def test_a_pool_of_huge_pages_goes_only_where_there_are_enough(
    plane: ControlPlane, kubelets: Kubelets, release: list[Manifest], tmp_path: Path
) -> None:
    plane.add_node("node-huge", **{"hugepages-2Mi": "16Gi"})
    try:
        settle(plane, 4)
        values: Manifest = {
            "nameOverride": "huge",
            "store": {"pool": {"medium": "hugetlbfs", "hostPath": "/dev/hugepages/emberkv"}},
            "router": {"enabled": False},
        }
        manifests = for_this_server(template_of(values, tmp_path))
        plane.apply(*manifests)

        def nodes() -> list[str]:
            return [
                pod["spec"].get("nodeName", "")
                for pod in plane.pods("store")
                if "emberkv-huge" in pod["metadata"]["name"]
            ]

        wait_until(lambda: sorted(nodes()) == ["", "", "", "node-huge"], "the scheduler's choice")
    finally:
        plane.kubectl(
            "-n", "emberkv", "delete", "daemonset", "-l", "app.kubernetes.io/name=emberkv"
        )
        plane.kubectl("delete", "node", "node-huge")
        plane.apply(find(release, "DaemonSet", "emberkv-store"))
        settle(plane)


def test_the_doctor_sees_what_is_ready_and_what_is_not(
    plane: ControlPlane, kubelets: Kubelets, release: list[Manifest]
) -> None:
    def seen() -> dict[str, Finding]:
        asked = Release("emberkv", SELECTOR, plane.kubeconfig)
        return {finding.check: finding for finding in asyncio.run(examine_release(asked))}

    findings = seen()
    verdicts = {name: finding.verdict for name, finding in findings.items()}
    assert verdicts.pop("Kubernetes") is Verdict.WARN  # 1.20 is older than the chart wants
    assert set(verdicts.values()) == {Verdict.OK}
    assert findings["daemons"].seen == "3 of 3 ready"
    pod = plane.pods("store")[0]
    kubelets.unready.add(pod["metadata"]["name"])
    try:
        wait_until(lambda: seen()["daemons"].seen == "2 of 3 ready", "it is seen")
        assert f"daemon on {pod['spec']['nodeName']}" in seen()
    finally:
        kubelets.unready.discard(pod["metadata"]["name"])
    settle(plane)


def test_a_field_that_does_not_exist_is_refused_by_the_server(
    plane: ControlPlane, release: list[Manifest]
) -> None:
    daemons = copy.deepcopy(find(release, "DaemonSet", "emberkv-store"))
    daemons["spec"]["template"]["spec"]["hostIpc"] = True
    with pytest.raises(AssertionError, match="hostIpc"):
        plane.apply(daemons)
