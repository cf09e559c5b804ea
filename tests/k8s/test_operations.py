"""The commands of docs/kubernetes.md and docs/operations.md, run against a real control plane.

What needs a kubelet (`kubectl exec`, `logs`) is not among them: test_pod_runs.py runs such commands
in pods of this machine. The server is 1.20.2, so a copy of the chart leaves out what is newer.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from client_sdk.cli.main import run_with
from tests.helpers.control_plane import ControlPlane, Kubelets, require_control_plane, wait_until
from tests.helpers.manifests import CHART, ROOT, Manifest, tool
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

INSTALL = (ROOT / "docs/kubernetes.md").read_text().partition("## Install\n")[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
NODES = ("node-a", "node-b", "node-c")


@dataclass(frozen=True)
class Desk:
    """Where an operator sits: helm and kubectl, with a kubeconfig."""

    plane: ControlPlane
    directory: Path

    def __post_init__(self) -> None:
        shutil.copytree(CHART, self.chart)
        for name, newer in (
            ("Chart.yaml", "kubeVersion: "),
            ("templates/services.yaml", "  internalTrafficPolicy: "),
        ):
            path = self.chart / name
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if not line.startswith(newer)]
            assert len(kept) == len(lines) - 1, name
            path.write_text("".join(kept))

    @property
    def chart(self) -> Path:
        return self.directory / "emberkv"

    def run(self, line: str, *more: str) -> str:
        """A line of the pages. Raises AssertionError with its complaint."""
        words = shlex.split(line.replace("deploy/helm/emberkv", str(self.chart)))
        if words[0] == "helm" and words[1] in ("install", "upgrade"):
            # 1.20's schemas are not those that helm validates and merges by.
            more = (*more, "--server-side=false", "--disable-openapi-validation")
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.directory),
            "KUBECONFIG": str(self.plane.kubeconfig),
        }
        done = subprocess.run(
            [tool(words[0]), *words[1:], *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def images(self) -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for pod in self.plane.pods("store")}

    def daemons(self) -> Manifest:
        path = "/apis/apps/v1/namespaces/emberkv/daemonsets/emberkv-store"
        found: Manifest = self.plane.api(path)
        return found


def lines_of(text: str, first: str) -> list[str]:
    """Of the code block that has `first`: its commands, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    (block,) = [block for block in blocks if first in block]
    return str(block).replace("\\\n", " ").splitlines()


def inline(text: str, first: str) -> str:
    """The one command in the page's text that begins so."""
    (line,) = re.findall(rf"`({re.escape(first)}[^`]*)`", text)
    return str(line)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """The release as the page installs it."""
    require_control_plane()
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane, Kubelets(plane):
        for name in NODES:
            plane.add_node(name, memory="256Gi")
        desk = Desk(plane, tmp_path_factory.mktemp("desk"))
        image, *lines = lines_of(INSTALL, "helm install")
        assert image.startswith("make image ")
        for line in lines:
            # Its budget is of policy/v1; nothing here has to settle before it counts.
            more = "router.disruptionBudget.enabled=false,store.minReadySeconds=0"
            desk.run(line, *(("--set", more) if line.startswith("helm ") else ()))
        yield desk


def test_what_the_page_installs_is_rolled_out(desk: Desk) -> None:
    assert lines_of(INSTALL, "helm install")[-1].split()[3:5] == ["rollout", "status"]
    assert len(desk.plane.pods("store")) == len(NODES)
    assert desk.images() == {"registry.example/emberkv:0.1.0"}
    namespace = desk.plane.api("/api/v1/namespaces/emberkv")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_doctor_of_the_page_finds_it_sound(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(OPERATIONS, "emberkv doctor k8s")
    words = line.replace("~/.kube/config", str(desk.plane.kubeconfig)).split()[1:]
    assert run_with(words) == 0
    assert "3 of 3 ready" in capsys.readouterr().out

    port = free_port()
    proxy = subprocess.Popen(
        [tool("kubectl"), "--kubeconfig", str(desk.plane.kubeconfig), "proxy", f"--port={port}"],
        stdout=subprocess.DEVNULL,
    )
    try:
        assert inline(OPERATIONS, "kubectl proxy") == "kubectl proxy"
        option = inline(OPERATIONS, "--api ").replace("8001", str(port)).split()
        told = ("doctor", "k8s", "--namespace", "emberkv", *option)
        wait_until(lambda: run_with(told) == 0, "the proxy answers")
    finally:
        proxy.terminate()
        proxy.wait(20)


def test_an_upgrade_and_the_way_back_roll_one_node_after_the_other(desk: Desk) -> None:
    upgrade, status = lines_of(OPERATIONS, "helm upgrade")
    desk.run(upgrade.replace("NEW", "0.1.1"))
    desk.run(status)
    wait_until(lambda: desk.images() == {"registry.example/emberkv:0.1.1"}, "all are new")
    pool = desk.daemons()["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert pool["memory"] == f"{65_536 + 1536}Mi"  # --reuse-values kept what was set
    desk.run(f"{inline(OPERATIONS, 'helm rollback')} emberkv -n emberkv", "--server-side=false")
    desk.run(status)
    wait_until(lambda: desk.images() == {"registry.example/emberkv:0.1.0"}, "all are back")


def test_a_drained_node_keeps_its_daemon_and_loses_its_router(desk: Desk) -> None:
    routers = {pod["spec"]["nodeName"] for pod in desk.plane.pods("router")}
    node = sorted(routers)[0]
    drain = inline(OPERATIONS, "kubectl drain").replace("NODE", node)
    desk.run(drain, "--timeout=120s")

    def routers_are_elsewhere() -> bool:
        pods = desk.plane.pods("router")
        found = {pod["spec"].get("nodeName", "") for pod in pods}
        return len(pods) == 2 and not found & {node, ""}

    wait_until(routers_are_elsewhere, "the routers are on other nodes")
    assert node in {pod["spec"]["nodeName"] for pod in desk.plane.pods("store")}
    desk.run(f"{inline(OPERATIONS, 'kubectl uncordon')} {node}")
    assert not desk.plane.api(f"/api/v1/nodes/{node}")["spec"].get("unschedulable")


def test_a_node_that_is_labelled_out_loses_its_daemon(desk: Desk) -> None:
    """As under "take it out for good": `store.nodeSelector` chooses."""
    for node in NODES[1:]:
        desk.run(f"kubectl label node {node} emberkv=yes")
    upgrade = lines_of(OPERATIONS, "helm upgrade")[0].replace("image.tag=NEW", "image.tag=0.1.0")
    desk.run(upgrade, "--set", "store.nodeSelector.emberkv=yes")

    def homes() -> set[str]:
        return {pod["spec"].get("nodeName", "") for pod in desk.plane.pods("store")}

    wait_until(lambda: homes() == {*NODES[1:]}, "the daemon is gone from the first", 120)


def test_rolling_for_new_keys_makes_new_pods(desk: Desk) -> None:
    restart = inline(OPERATIONS, "kubectl -n emberkv rollout restart")
    before = {pod["metadata"]["name"] for part in PARTS for pod in desk.plane.pods(part)}
    desk.run(restart)

    def are_all_new() -> bool:
        found = [pod["metadata"]["name"] for part in PARTS for pod in desk.plane.pods(part)]
        return len(found) >= 4 and not before & set(found)

    wait_until(are_all_new, "pods of the new revision", 120)


PARTS = ("store", "router")
