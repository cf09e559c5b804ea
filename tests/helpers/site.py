"""A rendered release on one node of this machine: its pods started, probed and asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from tests.helpers.manifests import Manifest, find, template_of
from tests.helpers.pod import Node, Pod, Running, require_mounts
from tests.helpers.ports import free_port

NAMES = ("emberkv-store.emberkv.svc", "emberkv-index.emberkv.svc")


def small_values() -> Manifest:
    """Small tiers, free ports, monitoring and the engine example on; all else as the chart is."""
    grpc, metrics, transfer, router, index, index_metrics, engine = (free_port() for _ in range(7))
    return {
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
        "index": {"ports": {"grpc": index, "metrics": index_metrics}},
        "monitoring": {"enabled": True},
        "vllm": {"enabled": True, "port": engine},
    }


@contextmanager
def running_site(
    directory: Path, values: Manifest, secrets: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Site]:
    """The release of these values on one node; its Secrets by name and key."""
    require_mounts()
    directory.chmod(0o755)
    shm = Path(f"/dev/shm/emberkv-test-k8s-{os.getpid()}")
    shm.mkdir(mode=0o755)
    node = Node(directory, shm, hosts=NAMES, secrets=secrets or {})
    try:
        site = Site(template_of(values, directory), node)
        try:
            yield site
        finally:
            site.close()
    finally:
        shutil.rmtree(shm)


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
    with urlopen(f"http://{pod.node.pod_ip}:{ports[port]}/metrics", timeout=90) as page:
        text: str = page.read().decode()
    return text


def metrics_of(pod: Pod, container: str, port: str) -> dict[str, float]:
    """By name, labels as they are printed: `...blocks{tier="dram"}`."""
    lines = metrics_page(pod, container, port).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
