"""`emberkv doctor k8s`: what it sees of API, daemons, versions, nodes and mounts."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from client_sdk.cli.doctor import Finding, Verdict
from client_sdk.cli.doctor_k8s import (
    Release,
    check_daemons,
    check_huge_pages,
    check_version,
    check_versions,
    examine_release,
)
from client_sdk.cli.doctor_mounts import (
    check_memory,
    check_mount,
    check_pressure,
    mount_of,
    parse_mounts,
)
from client_sdk.cli.main import run_with
from emberkv_proto import __version__
from emberkv_proto.errors import ConfigError
from global_index.kube.kubeconfig import read_kubeconfig
from tests.helpers.naive_kube_api import NaiveKubeApi, pod, serving

MIB = 1 << 20
LABELS = {"part": "store", "app.kubernetes.io/version": __version__}


def daemon(name: str, **more: Any) -> dict[str, Any]:
    raw = pod(name, labels=LABELS, **more)
    raw["spec"]["containers"] = [{"name": "store", "image": more.get("image", "emberkv:1")}]
    return raw


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


class Reviews:
    """What the API answers beside lists: its version, and that everything is allowed."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/version":
            return web.json_response({"gitVersion": "v1.34.1"})
        asked = (await request.json())["spec"]["resourceAttributes"]
        assert asked["namespace"] == "ns"
        return web.json_response({"status": {"allowed": self._allowed}}, status=201)


async def examined(api: NaiveKubeApi, allowed: bool = True) -> dict[str, Finding]:
    reviews = Reviews(allowed)
    async with serving(pods=api) as served:
        served.others = {
            "/version": reviews.answer,
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": reviews.answer,
        }
        return by_check(await examine_release(Release("ns", "part=store", api=served.url)))


async def test_a_sound_release_is_ok_throughout() -> None:
    api = NaiveKubeApi()
    for number in range(3):
        api.put(daemon(f"d{number}"))
    findings = await examined(api)
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert findings["daemons"].seen == "3 of 3 ready"
    assert findings["Kubernetes"].seen == "v1.34.1"


async def test_missing_rights_are_a_warning_with_the_value_that_grants_them() -> None:
    api = NaiveKubeApi()
    api.put(daemon("d"))
    rights = (await examined(api, allowed=False))["rights"]
    assert rights.verdict is Verdict.WARN
    assert "list or watch" in rights.seen
    assert "discovery.mode" in rights.fix


async def test_an_api_that_is_away_or_refuses_is_one_finding() -> None:
    (away,) = await examine_release(Release("ns", "a=b", api="http://127.0.0.1:9"))
    assert away.verdict is Verdict.FAIL
    assert "cannot be reached" in away.seen
    async with serving(pods=NaiveKubeApi()) as served:
        (refused,) = await examine_release(Release("ns", "a=b", api=served.url))
    assert "404" in refused.seen


def test_outside_of_a_pod_it_says_what_to_give(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run_with(["doctor", "k8s", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert "--kubeconfig" in finding["fix"]


async def test_a_pod_without_an_account_is_told_so_and_needs_no_place_for_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    (finding,) = await examine_release(Release("ns", "a=b"))
    assert finding.verdict is Verdict.WARN
    assert "no account" in finding.seen


def _with_status(raw: dict[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, "status": {**raw["status"], "conditions": [], **status}}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            {
                "containerStatuses": [
                    {
                        "lastState": {
                            "terminated": {"exitCode": 2, "message": "a\nno room in /dev/shm"}
                        }
                    }
                ]
            },
            "ended with 2: no room in /dev/shm",
        ),
        (
            {"initContainerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]},
            "ended with 1: ?",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
                ]
            },
            "ImagePullBackOff: no",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes",
        ),
        ({}, "startup or readiness probe"),
    ],
)
def test_an_unready_daemon_says_why(status: dict[str, Any], said: str) -> None:
    total, one = check_daemons([_with_status(daemon("d", node="n7"), status)])
    assert total.verdict is Verdict.FAIL
    assert one.check == "daemon on n7"
    assert said in one.seen


def test_no_pod_at_all_fails() -> None:
    (finding,) = check_daemons([])
    assert finding.verdict is Verdict.FAIL


def test_mixed_images_and_another_version_are_warned_of() -> None:
    pods = [daemon("a"), daemon("b", image="emberkv:2")]
    pods[0]["metadata"]["labels"] = {**LABELS, "app.kubernetes.io/version": "9.9"}
    findings = by_check(list(check_versions(pods)))
    assert findings["images"].verdict is findings["versions"].verdict is Verdict.WARN
    assert "9.9" in findings["versions"].seen


def test_an_old_or_strange_server_is_warned_of() -> None:
    assert check_version({"gitVersion": "v1.26.9-eks"}).verdict is Verdict.WARN
    assert check_version({}).verdict is Verdict.WARN
    assert check_version({"gitVersion": "v1.30.1-gke.7"}).verdict is Verdict.OK


def test_nodes_without_the_huge_pages_that_pods_ask_for_are_named() -> None:
    raw = daemon("d")
    raw["spec"]["containers"][0]["resources"] = {"limits": {"hugepages-2Mi": "8Gi"}}
    nodes = [
        {"metadata": {"name": name}, "status": {"allocatable": {"hugepages-2Mi": amount}}}
        for name, amount in (("n1", "16Gi"), ("n2", "0"))
    ]
    (finding,) = check_huge_pages([raw], nodes)
    assert finding.verdict is Verdict.WARN
    assert "n2" in finding.fix
    assert "n1" not in finding.fix
    assert not list(check_huge_pages([daemon("d")], nodes))


MOUNTS = """\
100 1 0:50 / / ro,relatime - overlay overlay rw
101 100 0:20 /emberkv /pool rw shared:1 - tmpfs tmpfs rw
102 100 8:1 /var/lib/emberkv/data /data rw - ext4 /dev/sda1 rw
103 100 8:1 /var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/x /ssd/0 rw - ext4 /dev/sda1 rw
104 100 8:1 /run/emberkv /run/emberkv ro - ext4 /dev/sda1 rw
nonsense
"""


@pytest.mark.parametrize(
    ("name", "path", "verdict", "said"),
    [
        ("pool", "/pool", Verdict.OK, "tmpfs"),
        ("data", "/data", Verdict.OK, "ext4"),
        ("ssd 0", "/ssd/0", Verdict.FAIL, "the pod's own"),
        ("socket", "/run/emberkv", Verdict.FAIL, "read-only"),
        ("data", "/elsewhere", Verdict.FAIL, "the container's own"),
        ("pool", "/data", Verdict.FAIL, "no memory"),
    ],
)
def test_directories_must_be_the_node_s(name: str, path: str, verdict: Verdict, said: str) -> None:
    finding = check_mount(name, Path(path), parse_mounts(MOUNTS))
    assert finding.verdict is verdict
    assert said in finding.seen


def test_the_nearest_mount_counts() -> None:
    mounts = parse_mounts(MOUNTS)
    assert len(mounts) == 5
    found = mount_of(Path("/data/deeper"), mounts)
    assert found is not None
    assert found.target == "/data"


def test_a_tier_that_fills_the_node_s_disk_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "segment").write_bytes(bytes(8 * MIB))
    blocks = 100 * MIB // 4096
    system = os.statvfs_result((4096, 4096, blocks, 60 * 256, 60 * 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda _: system)

    def verdict(capacity: int) -> Verdict:
        (finding,) = check_pressure("ssd", tmp_path, capacity)
        return finding.verdict

    assert verdict(8 * MIB) is Verdict.OK  # what it holds takes nothing more
    assert verdict(52 * MIB) is Verdict.OK
    assert verdict(54 * MIB) is Verdict.WARN


@pytest.mark.parametrize(
    ("limit", "pool", "is_huge", "verdict"),
    [
        (1 << 62, 64 * MIB, False, Verdict.WARN),
        (300 * MIB, 100 * MIB, False, Verdict.FAIL),
        (300 * MIB, 100 * MIB, True, Verdict.OK),
        (800 * MIB, 100 * MIB, False, Verdict.OK),
    ],
)
def test_a_limit_leaves_room_beside_the_pool(
    limit: int, pool: int, is_huge: bool, verdict: Verdict
) -> None:
    (finding,) = check_memory(limit, pool, is_huge)
    assert finding.verdict is verdict


def kubeconfig(tmp_path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path = tmp_path / "config"
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_kubeconfig_s_token_and_certificates_are_taken(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    data = base64.b64encode(b"pem").decode()
    user = {"client-certificate-data": data, "client-key": "key.pem"}
    access = read_kubeconfig(
        kubeconfig(tmp_path, user, **{"certificate-authority-data": data}), scratch
    )
    assert access.url == "https://10.0.0.1:6443"
    assert access.ca_file is not None
    assert access.ca_file.read_bytes() == b"pem"
    assert access.certificate is not None
    assert access.certificate[1] == tmp_path / "key.pem"  # relative to the kubeconfig
    assert access.token_file is None
    access = read_kubeconfig(kubeconfig(tmp_path, {"token": "secret"}), scratch)
    assert access.token_file is not None
    assert access.token_file.read_text() == "secret"
    assert access.token_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({"exec": {"command": "aws"}}, {}, "kubectl proxy"),
        ({}, {"insecure-skip-tls-verify": True}, "kubectl proxy"),
        ({}, {"server": "ftp://x"}, "names no server"),
        ({"client-key-data": "!"}, {}, "base64"),
    ],
)
def test_a_kubeconfig_that_cannot_serve_says_what_would(
    user: dict[str, Any], cluster: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_kubeconfig(kubeconfig(tmp_path, user, **cluster), tmp_path)


def test_a_file_that_is_no_kubeconfig_is_said(tmp_path: Path) -> None:
    for text in ("- a", "{}", "{a: ["):
        path = tmp_path / "config"
        path.write_text(text)
        with pytest.raises(ConfigError, match="kubeconfig"):
            read_kubeconfig(path, tmp_path)
