"""A real Kubernetes control plane on loopback: etcd, kube-apiserver, controller-manager, scheduler.

`tests/k8s/build-control-plane.sh` builds them, once a machine. There is no kubelet: `Kubelets`
says of each bound pod that it runs, and lets deleted ones go, which is all that controllers see.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.helpers.certificates import Authority
from tests.helpers.manifests import Manifest, tool
from tests.helpers.ports import free_port

_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
BINARIES = Path(os.environ.get("EMBERKV_KUBE", f"{_CACHE}/emberkv-kube")) / "bin"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
START_SECONDS = 120.0
POLL_SECONDS = 0.2


class ApiError(Exception):
    """The server refused; the message is its own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def require_control_plane(programs: Sequence[str] = PROGRAMS) -> None:
    missing = [name for name in programs if not (BINARIES / name).is_file()]
    if missing:
        pytest.skip(
            f"NOT CHECKED: no {', '.join(missing)} in {BINARIES}; `make kube-control-plane`"
            " builds them in ten minutes"
        )


def wait_until(done: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Raises AssertionError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)


@dataclass
class ControlPlane:
    """Use as a context manager. `api` asks the server, `kubectl` runs the program.

    Without the controllers among `programs` nothing happens but what a test does.
    """

    directory: Path
    programs: Sequence[str] = PROGRAMS
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> ControlPlane:
        self._authority = Authority(self.directory, "ca")
        self._files = self._authority.issue("server")
        self._context = ssl.create_default_context(cafile=str(self._files.ca))
        self._token = os.urandom(16).hex()
        tokens = self.directory / "tokens.csv"
        tokens.write_text(f"{self._token},admin,1,system:masters\n")
        self._port = free_port()
        self._write_kubeconfig()
        try:
            self._start(tokens)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def api(
        self, path: str, body: Manifest | None = None, method: str = "", token: str = ""
    ) -> Manifest:
        """Raises ApiError."""
        patch = method == "PATCH"
        kind = "application/strategic-merge-patch+json" if patch else "application/json"
        request = Request(
            f"https://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method or ("GET" if body is None else "POST"),
            headers={"Authorization": f"Bearer {token or self._token}", "Content-Type": kind},
        )
        try:
            with urlopen(request, timeout=60, context=self._context) as answer:  # noqa: S310
                loaded: Manifest = json.loads(answer.read() or b"{}")
                return loaded
        except HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise ApiError(error.code, said) from None

    def kubectl(self, *arguments: str, text: str = "") -> str:
        """What it prints. Raises AssertionError with its complaint."""
        command = [tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *manifests: Manifest) -> None:
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(manifests))

    def pods(self, component: str, namespace: str = "emberkv") -> list[Manifest]:
        """Those that are not being deleted."""
        selector = f"labelSelector=app.kubernetes.io/component%3D{component}"
        items = self.api(f"/api/v1/namespaces/{namespace}/pods?{selector}")["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def add_node(self, name: str, **resources: str) -> None:
        """A node that takes pods; `resources` beside its CPUs and memory."""
        amounts = {"cpu": "16", "memory": "64Gi", "pods": "110", **resources}
        labels = {"kubernetes.io/hostname": name}
        self.api("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        conditions = [{"type": "Ready", "status": "True", "reason": "test", "message": ""}]
        status = {"capacity": amounts, "allocatable": amounts, "conditions": conditions}
        self.api(f"/api/v1/nodes/{name}/status", {"status": status}, "PATCH")
        # The admission plugin's not-ready taint; who would lift it is the controller left out.
        self.api(f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, "PATCH")

    def token_of(self, account: str, namespace: str = "emberkv") -> str:
        """As kubelet asks for it, for the account of a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token: str = self.api(path, request)["status"]["token"]
        return token

    def kill_api_server(self) -> None:
        """kill -9; etcd goes on."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait(60)

    def start_api_server(self) -> None:
        self._run("kube-apiserver", *self._server_options)
        wait_until(self._is_ready, "kube-apiserver answers /readyz", START_SECONDS)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca_file(self) -> Path:
        return self._files.ca

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def _write_kubeconfig(self) -> None:
        cluster = {
            "server": f"https://127.0.0.1:{self._port}",
            "certificate-authority": str(self._files.ca),
        }
        content: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def _start(self, tokens: Path) -> None:
        store, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )
        wait_until(lambda: self._etcd_is_healthy(store), "etcd is healthy", START_SECONDS)
        accounts = self._accounts_key()
        self._server_options = (
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--insecure-port=0",
            f"--tls-cert-file={self._files.cert}",
            f"--tls-private-key-file={self._files.key}",
            f"--client-ca-file={self._files.ca}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={accounts}",
            f"--service-account-key-file={accounts}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--cert-dir={self.directory}",
        )
        self.start_api_server()
        if "kube-scheduler" in self.programs:
            self._start_controllers(accounts)

    def _start_controllers(self, accounts: Path) -> None:
        own = [
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--port=0",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.directory}",
        ]
        self._run(
            "kube-controller-manager",
            *own,
            "--controllers=*,-nodelifecycle,-cronjob",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={accounts}",
            f"--root-ca-file={self._files.ca}",
        )
        own[3] = f"--secure-port={free_port()}"
        self._run("kube-scheduler", *own)
        wait_until(self._has_accounts, "the controller-manager works", START_SECONDS)

    def _accounts_key(self) -> Path:
        """The server's key in the only form that 1.20 takes to sign tokens with."""
        path = self.directory / "accounts.key"
        command = ["openssl", "ec", "-in", str(self._files.key), "-out", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=90)
        return path

    def _etcd_is_healthy(self, url: str) -> bool:
        self._check_alive()
        try:
            with urlopen(f"{url}/health", timeout=90) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                said = (self.directory / f"{name}.log").read_text(errors="replace")
                raise AssertionError(f"{name} ended: {said[-2000:]}")

    def _is_ready(self) -> bool:
        self._check_alive()
        try:
            self.api("/readyz", method="GET")
        except json.JSONDecodeError:
            return True  # it says ok
        except (ApiError, OSError):
            return False
        return True

    def _has_accounts(self) -> bool:
        self._check_alive()
        return bool(self.api("/api/v1/namespaces/default/serviceaccounts")["items"])

    def _run(self, name: str, *options: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            command = [str(BINARIES / name), *options]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            self._processes[name] = process

    def _stop(self) -> None:
        processes = [*reversed(self._processes.values())]
        for process in processes:
            process.terminate()
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


@dataclass
class Kubelets:
    """All nodes' kubelets, as far as controllers can tell. `unready` names pods that never are."""

    plane: ControlPlane
    unready: set[str] = field(default_factory=set)
    fewest_ready: dict[str, int] = field(default_factory=dict)
    """Of a component: the fewest ready pods that were seen since the entry was made."""
    faults: list[str] = field(default_factory=list)
    _next_ip: int = 1

    def __enter__(self) -> Kubelets:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelets", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.faults, self.faults

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self._sync_or_note()

    def _sync_or_note(self) -> None:
        try:
            self._sync()
        except ApiError as error:
            if error.code not in (404, 409):  # somebody was faster
                self.faults.append(str(error))
        except OSError as error:
            self.faults.append(repr(error))

    def _sync(self) -> None:
        pods = self.plane.api("/api/v1/pods")["items"]
        ready: dict[str, int] = dict.fromkeys(self.fewest_ready, 0)
        for pod in pods:
            meta = pod["metadata"]
            component = meta.get("labels", {}).get("app.kubernetes.io/component", "")
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            if "deletionTimestamp" in meta:
                now = {"gracePeriodSeconds": 0}
                self.plane.api(path, now, "DELETE")
            elif pod["spec"].get("nodeName"):
                wanted = meta["name"] not in self.unready
                conditions = pod["status"].get("conditions", ())
                is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
                if pod["status"]["phase"] != "Running" or is_ready != wanted:
                    self.plane.api(f"{path}/status", self._status(pod, wanted), "PATCH")
                elif is_ready and component in ready:
                    ready[component] += 1
        for component, count in ready.items():
            fewest = self.fewest_ready.get(component)  # the test may have taken it out meanwhile
            if fewest is not None:
                self.fewest_ready[component] = min(fewest, count)

    def _status(self, pod: Manifest, is_ready: bool) -> Manifest:
        address = pod["status"].get("podIP")
        if address is None:
            address = f"10.1.0.{self._next_ip}"
            self._next_ip += 1
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {
                "type": kind,
                "status": "True" if is_ready else "False",
                "lastTransitionTime": moment,
            }
            for kind in ("Ready", "ContainersReady")
        ]
        containers = [
            {
                "name": container["name"],
                "ready": is_ready,
                "restartCount": 0,
                "image": container["image"],
                "imageID": "",
                "state": {"running": {"startedAt": moment}},
            }
            for container in pod["spec"]["containers"]
        ]
        status = {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": containers,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": moment,
        }
        return {"status": status}
