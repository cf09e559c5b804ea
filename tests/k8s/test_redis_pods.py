"""The chart's own Valkey: its pods, run here with a Redis of this machine, become a Cluster."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.cluster import RedisCluster
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError

from tests.helpers.manifests import Manifest, find, template_of
from tests.helpers.pod import Node, Pod, Running, require_mounts
from tests.helpers.redis_server import server_binary

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

PODS = 3
PASSWORD = 'a "password" with \\ and $HOME'
SECONDS = 90.0
PORT = 21379
"""Below the range of outgoing connections; each pod has an address of its own."""


class RedisPods:
    """Three pods of the StatefulSet, each on an address of its own."""

    def __init__(self, manifests: list[Manifest], directory: Path, shm: Path) -> None:
        self._manifests = manifests
        first = os.getpid() % 200 + 20  # so that two runs at once do not meet
        self.addresses = [f"127.77.{first}.{number + 1}" for number in range(PODS)]
        service = "emberkv-redis.emberkv.svc"
        names = {f"emberkv-redis-{n}.{service}": a for n, a in enumerate(self.addresses)}
        self._node = Node(
            directory, shm, addresses=names, secrets={"valkey": {"password": PASSWORD}}
        )
        self.running: dict[int, list[Running]] = {}
        self.pods: dict[int, Pod] = {}

    def start(self, number: int) -> None:
        """A new pod, as the StatefulSet makes it: its volumes are empty."""
        spec = find(self._manifests, "StatefulSet", "emberkv-redis")["spec"]["template"]["spec"]
        node = replace(self._node, pod_ip=self.addresses[number])
        pod = Pod(spec, node, self._manifests, name=f"emberkv-redis-{number}")
        self.running[number] = [pod.start("redis"), pod.start("form")]
        self.pods[number] = pod

    def kill(self, number: int) -> None:
        for running in self.running.pop(number):
            running.kill()

    def close(self) -> None:
        for number in [*self.running]:
            self.kill(number)

    def said(self) -> str:
        return "\n".join(one.output()[-1500:] for pair in self.running.values() for one in pair)

    def nodes(self, number: int) -> dict[str, Manifest]:
        """The Cluster as one of its nodes sees it."""
        with redis.Redis(
            self.addresses[number], PORT, password=PASSWORD, socket_timeout=5
        ) as client:
            found: dict[str, Manifest] = client.cluster("nodes")
            return found

    def cluster(self, number: int) -> RedisCluster:
        host = self.addresses[number]
        return RedisCluster(host=host, port=PORT, password=PASSWORD, socket_timeout=5)

    def is_whole(self) -> bool:
        """All see the same three, connected, with all slots between them."""
        for number in range(PODS):
            nodes = self.nodes(number)
            if {key.partition("@")[0] for key in nodes} != {f"{a}:{PORT}" for a in self.addresses}:
                return False
            slots = sorted(
                (int(first), int(last)) for node in nodes.values() for first, last in node["slots"]
            )
            if slots != [(0, 5460), (5461, 10921), (10922, 16383)]:
                return False
            if not all("fail" not in node["flags"] for node in nodes.values()):
                return False
        return True

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if holds():
                    return
            except (RedisError, RedisClusterException, OSError):
                pass
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[RedisPods]:
    require_mounts()
    if Path(server_binary()).name != "redis-server" or shutil.which("redis-cli") is None:
        pytest.skip("NOT CHECKED: no redis-server and redis-cli by these names")
    tmp_path.chmod(0o755)
    server = {"enabled": True, "replicas": PODS, "port": PORT}
    values: Manifest = {"redis": {"passwordSecret": "valkey", "server": server}}
    manifests = template_of(values, tmp_path)
    script = find(manifests, "ConfigMap", "emberkv-redis")["data"]
    script["form.sh"] = script["form.sh"].replace("${FORM_SECONDS:-5}", "0.3")
    pods = RedisPods(manifests, tmp_path, tmp_path / "shm")
    try:
        yield pods
    finally:
        pods.close()


def test_pods_become_a_cluster_and_one_that_comes_back_empty_takes_its_share_again(
    pods: RedisPods,
) -> None:
    for number in range(PODS):
        pods.start(number)
    pods.until(pods.is_whole)

    def written() -> bool:
        with pods.cluster(0) as client:
            for number in range(200):
                client.set(f"row-{number}", "warm")
            return all(client.get(f"row-{number}") == b"warm" for number in range(200))

    pods.until(written)
    for number in range(PODS):
        for container in ("redis", "form"):
            assert pods.pods[number].execute(container, "livenessProbe") == 0
        for running in pods.running[number]:
            assert "password" not in Path(f"/proc/{running.pid}/cmdline").read_text()
    with (
        redis.Redis(pods.addresses[0], PORT, socket_timeout=5) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.ping()
    pods.kill(1)
    pods.until(lambda: any("fail" in node["flags"] for node in pods.nodes(0).values()))
    pods.start(1)
    pods.until(pods.is_whole)
    pods.until(written)
    with pods.cluster(2) as client:
        assert client.dbsize(target_nodes=RedisCluster.ALL_NODES) == 200


def test_a_script_that_forms_no_more_is_restarted(pods: RedisPods) -> None:
    pods.start(0)
    pods.until(lambda: pods.pods[0].execute("form", "livenessProbe") == 0)
    pods.running[0][1].kill()
    (pods.pods[0].volumes["formed"] / "at").write_text(f"{int(time.time()) - 121}\n")
    assert pods.pods[0].execute("form", "livenessProbe") == 1
