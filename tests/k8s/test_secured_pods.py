"""Pods with Secrets as kubelet lays them out: TLS, an operator's token, keys; and the doctor."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from client_sdk.cli.main import run_with
from tests.helpers.certificates import Authority
from tests.helpers.manifests import Manifest
from tests.helpers.pod import Pod
from tests.helpers.site import Site, metrics_of, running_site, small_values

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "0123456789abcdef0123456789abcdef"


def emberkv(site: Site, pod: Pod, container: str, *words: str) -> tuple[int, str]:
    """What `kubectl exec POD -- emberkv ...` ends with and says."""
    asked = site.start(pod, container, "python", "-m", "client_sdk.cli.main", *words)
    return asked.finish(60), asked.output()


def completion(port: int, key: str = "") -> int:
    """The status of a request for one."""
    body = json.dumps({"model": "m", "prompt": "a"}).encode()
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    try:
        with urlopen(request, timeout=30) as answer:  # noqa: S310
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_pods_start_with_secrets_as_kubelet_lays_them_out_and_serve_who_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("emberkv", "subjectAltName=DNS:emberkv")
    keys = tmp_path / "keys.json"
    assert run_with(["router-key", "create", "--file", str(keys), "--tenant", "team-a"]) == 0
    key = capsys.readouterr().out.split()[-1]
    secrets = {
        "emberkv-tls": {
            "tls.crt": files.cert.read_text(),
            "tls.key": files.key.read_text(),
            "ca.crt": files.ca.read_text(),
        },
        "operators": {"token": TOKEN},
        "keys": {"keys.json": keys.read_text(), "tenants": TOKEN},
    }
    values: Manifest = {**small_values(), "tls": {"secret": "emberkv-tls"}}
    values["store"]["operatorTokenSecret"] = "operators"
    values["router"] |= {
        "volumes": [{"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}}],
        "volumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
    }
    values["router"]["config"]["router"] = {
        "key_file": "/keys/keys.json",
        "tenant_secret_file": "/keys/tenants",
    }
    with running_site(tmp_path, values, secrets) as site:
        store_pod, _ = site.start_store()
        router_pod, router = site.start_router()
        deadline = time.monotonic() + 60
        while metrics_of(router_pod, "router", "http").get(NODE_OK) != 1:
            assert time.monotonic() < deadline, router.output()
            time.sleep(0.1)

        port = values["router"]["port"]
        assert completion(port) == 401
        assert completion(port, "no-key-of-ours") == 401
        assert completion(port, key) == 503  # it may, but there is no engine

        grpc = values["store"]["ports"]["grpc"]
        where = ("--config", "/etc/emberkv/emberkv.yaml", "--address", f"127.0.0.1:{grpc}")
        ended, said = emberkv(site, store_pod, "store", "status", *where)
        assert ended == 0, said
        assert "serving" in said


NODE_OK = 'emberkv_index_node_ok{node="node-1"}'


def test_the_doctor_runs_in_a_daemon_s_pod_which_has_no_account_and_no_place_to_write(
    site: Site,
) -> None:
    pod, _ = site.start_store()
    where = ("--config", "/etc/emberkv/emberkv.yaml", "--json")
    ended, said = emberkv(site, pod, "store", "doctor", "k8s", *where)
    findings: dict[str, Any] = {found["check"]: found for found in json.loads(said)}
    failed = [name for name, found in findings.items() if found["verdict"] == "fail"]
    assert (ended, failed) == (0, []), said
    assert "no account" in findings["API"]["seen"]
    for directory in ("pool", "socket", "data", "ssd 0"):
        assert findings[f"{directory} directory"]["verdict"] == "ok", said
    assert "ssd 0 pressure" in findings
