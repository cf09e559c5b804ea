"""A rendered release on one node of this machine: its pods started, probed and asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.request import urlopen

from tests.helpers.manifests import Manifest, find
from tests.helpers.pod import Node, Pod, Running


@dataclass
class Site:
    """`close` ends whatever was started and has not been stopped."""

    manifests: list[Manifest]
    node: Node
    started: list[Running] = field(default_factory=list)

    def pod(self, kind: str, name: str) -> Pod:
        """A new pod, as after a restart: its own directory, the node's host paths."""
        spec = find(self.manifests, kind, name)["spec"]["template"]["spec"]
        return Pod(spec, self.node, self.manifests)

    def start(self, pod: Pod, container: str, *command: str) -> Running:
        running = pod.start(container, command)
        self.started.append(running)
        return running

    def start_store(self) -> tuple[Pod, Running]:
        """A daemon's pod, when its startup probe has succeeded."""
        pod = self.pod("DaemonSet", "emberkv-store")
        pod.run_init()
        store = self.start(pod, "store")
        pod.wait_for("store", "startupProbe", store)
        return pod, store

    def start_router(self) -> tuple[Pod, Running]:
        pod = self.pod("Deployment", "emberkv-router")
        router = self.start(pod, "router")
        pod.wait_for("router", "startupProbe", router)
        return pod, router

    def close(self) -> None:
        for running in self.started:
            running.kill()


def metrics_page(pod: Pod, container: str, port: str) -> str:
    ports = {entry["name"]: entry["containerPort"] for entry in pod.container(container)["ports"]}
    with urlopen(f"http://{pod.node.pod_ip}:{ports[port]}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


def metrics_of(pod: Pod, container: str, port: str) -> dict[str, float]:
    """By name, labels as they are printed: `...blocks{tier="dram"}`."""
    lines = metrics_page(pod, container, port).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
