"""Runs a pod's containers on this machine, as far as Linux goes without a kubelet.

What a manifest says of command, arguments, environment, user, groups, capabilities, read-only root
and mounts is done: each container gets a mount namespace and a root of its own. Its image is this
machine's /usr, this checkout at /src and this virtual environment at /opt/emberkv; or, where
EMBERKV_IMAGE_ROOT names the unpacked one of `make image`, that, with the checkout for engines only.
Not done: seccomp, cgroups, a network of its own (all containers share the host's, with DNS names
in /etc/hosts), user namespaces.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.helpers.manifests import ROOT, Manifest, find

_ENTER = """
set -eu
root=$1 image=$2; shift 2
mount -t tmpfs -o mode=755,size=4m none "$root"
for part in bin sbin lib lib32 lib64 usr ${image:+opt}; do
  if [ -L "$image/$part" ]; then cp -P "$image/$part" "$root/$part"
  elif [ -d "$image/$part" ]; then mkdir "$root/$part"; mount --rbind "$image/$part" "$root/$part"
    mount -o remount,bind,ro "$root/$part"; fi
done
while [ "$1" != -- ]; do
  source=$1 target=$root$2 mode=$3; shift 3
  if [ -d "$source" ]; then mkdir -p "$target"; else
    mkdir -p "$(dirname "$target")"; touch "$target"; fi
  mount --rbind "$source" "$target"
  [ "$mode" = rw ] || mount -o "remount,bind,$mode" "$target"
done
shift
mount -o "remount,${ROOT_MODE},size=4m" "$root"
exec chroot "$root" "$@"
"""
IMAGE = os.environ.get("EMBERKV_IMAGE_ROOT", "")
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def require_mounts() -> None:
    """Skip the test where this process may not make mount namespaces."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    except OSError as error:
        pytest.skip(f"NOT CHECKED: no pod can be run here: {error}")
    if done.returncode != 0:
        pytest.skip(f"NOT CHECKED: no pod can be run here: {done.stderr.strip()}")


@dataclass
class Running:
    """A container's process, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def finish(self, seconds: float) -> int:
        """The exit status of a process that ends by itself. Raises TimeoutExpired."""
        return self.process.wait(seconds)

    def stop(self, seconds: float) -> float:
        """SIGTERM as kubelet sends it; how long the process took to end with status 0."""
        began = time.monotonic()
        self.process.terminate()
        status = self.process.wait(seconds)
        assert status == 0, f"ended with status {status}: {self.output()[-3000:]}"
        return time.monotonic() - began

    def kill(self) -> None:
        """Whatever state it is in."""
        self.process.kill()
        self.process.wait(60)


@dataclass
class Node:
    """What a node has beside its pods: directories, a name, an address, names that resolve."""

    directory: Path
    shm: Path
    """Stands for the node's /dev/shm."""
    name: str = "node-1"
    pod_ip: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    """Names of Services; they are this machine."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Names of pods, and their loopback addresses."""
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By name, what each key holds."""

    def host_path(self, path: str) -> Path:
        if path.startswith("/dev/shm/"):
            return self.shm / path.removeprefix("/dev/shm/")
        return self.directory / "node" / path.lstrip("/")


@dataclass
class Pod:
    """One pod of a template's spec on a node. Volumes are made when the pod is."""

    spec: Manifest
    node: Node
    manifests: Sequence[Manifest]
    """Where its ConfigMaps are."""
    volumes: dict[str, Path] = field(default_factory=dict)
    name: str = "pod-1"

    def __post_init__(self) -> None:
        self.directory = self.node.directory / f"pod-{time.monotonic_ns()}"
        for volume in self.spec["volumes"]:
            self.volumes[volume["name"]] = self._lay_out(volume)
        hosts = self.directory / "hosts"
        lines = [f"{address} {name}" for name, address in self.node.addresses.items()]
        own = f"127.0.0.1 localhost {' '.join(self.node.hosts)}"
        hosts.write_text("\n".join([own, *lines, ""]))

    def container(self, name: str) -> Manifest:
        every = [*self.spec.get("initContainers", ()), *self.spec["containers"]]
        found: Manifest = next(one for one in every if one["name"] == name)
        return found

    def run_init(self) -> None:
        """Raises AssertionError when an init container fails."""
        for container in self.spec.get("initContainers", ()):
            running = self.start(container["name"])
            assert running.finish(30) == 0, running.output()

    def start(self, name: str, command: Sequence[str] = (), venv: Path | None = None) -> Running:
        """Start a container; `command` takes the place of its own.

        `venv` stands in its image where that is not ours, with a /tmp that can be written.
        """
        container = self.container(name)
        environment = {
            "PATH": "/opt/emberkv/bin:/usr/local/bin:/usr/bin:/bin",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",  # every container has these
            "KUBERNETES_SERVICE_PORT": "1",
        }
        if venv is not None:
            environment["PATH"] = f"{venv}/bin:{environment['PATH']}"
        if not self._is_from_image(container):
            environment["PYTHONPATH"] = "/src:/src/proto"
        environment |= self._environment(container)
        root = self.directory / f"root-{name}-{time.monotonic_ns()}"
        root.mkdir()
        security = container.get("securityContext", {})
        own = [*container["command"], *container.get("args", ())]
        full = [
            "unshare",
            "--mount",
            "--propagation=private",
            "sh",
            "-c",
            _ENTER,
            "enter",
            str(root),
            IMAGE,
            *self._mounts(container, venv),
            "--",
            *self._identity(security),
            "env",
            "-i",
            *(f"{key}={value}" for key, value in environment.items()),
            *(command or [_expanded(word, environment) for word in own]),
        ]
        log = root.with_suffix(".log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                full,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "ROOT_MODE": "ro" if security.get("readOnlyRootFilesystem") else "rw",
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
            )
        return Running(process, log)

    def execute(self, container_name: str, kind: str) -> int:
        """The exit status of an exec probe's command, in a container of the same making."""
        command = self.container(container_name)[kind]["exec"]["command"]
        return self.start(container_name, command).finish(30)

    def probe(self, container_name: str, kind: str) -> int:
        """The HTTP status that kubelet would see; 0 when nobody answers."""
        container = self.container(container_name)
        probe = container[kind]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        get = probe["httpGet"]
        port = ports.get(get["port"], get["port"])
        url = f"http://{self.node.pod_ip}:{port}{get['path']}"
        try:
            with urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                return int(answer.status)
        except URLError as error:
            return int(getattr(error, "code", 0) or 0)
        except OSError:
            return 0

    def wait_for(
        self, container_name: str, kind: str, running: Running, seconds: float = 120.0
    ) -> None:
        """Until a probe succeeds; as long as kubelet would wait, and no longer than `seconds`."""
        probe = self.container(container_name)[kind]
        allowed = min(seconds, probe["failureThreshold"] * probe["periodSeconds"])
        deadline = time.monotonic() + allowed
        while self.probe(container_name, kind) != 200:
            if running.process.poll() is not None:
                status = running.process.returncode
                raise AssertionError(f"{container_name} ended ({status}): {running.output()}")
            assert time.monotonic() < deadline, f"{kind} fails: {running.output()[-3000:]}"
            time.sleep(0.1)

    def _lay_out(self, volume: Manifest) -> Path:
        path: Path = self.directory / "volumes" / volume["name"]
        match volume:
            case {"hostPath": {"path": host, "type": "DirectoryOrCreate"}}:
                path = self.node.host_path(host)
                if not path.is_dir():
                    path.mkdir(parents=True)
                    path.chmod(0o755)
                self.directory.mkdir(parents=True, exist_ok=True)
            case {"configMap": {"name": name}}:
                path.mkdir(parents=True)
                for key, text in find(self.manifests, "ConfigMap", name)["data"].items():
                    (path / key).write_text(text)
            case {"secret": {"secretName": name, **how}}:
                path.mkdir(parents=True)
                mode = int(str(how.get("defaultMode", 0o644)))
                for key, text in self.node.secrets[name].items():
                    self._lay_out_secret(path / key, text, mode)
            case {"emptyDir": _}:
                path.mkdir(parents=True)
                path.chmod(0o777)
            case _:
                raise AssertionError(f"a volume of a kind that is not laid out here: {volume}")
        return path

    def _lay_out_secret(self, path: Path, text: str, mode: int) -> None:
        """Root's, and the pod's group may read it, as kubelet does where there is an fsGroup."""
        path.write_text(text)
        group = self.spec.get("securityContext", {}).get("fsGroup")
        if group is not None:
            os.chown(path, 0, group)
            mode |= 0o440
        path.chmod(mode)

    def _mounts(self, container: Manifest, venv: Path | None) -> list[str]:
        triples = [
            (Path("/proc"), "/proc", "rw"),
            (Path("/sys"), "/sys", "ro"),
            (Path("/dev"), "/dev", "rw"),
            (self.directory / "hosts", "/etc/hosts", "ro"),
            (Path("/etc/nsswitch.conf"), "/etc/nsswitch.conf", "ro"),
        ]
        if not self._is_from_image(container):
            triples.append((ROOT, "/src", "ro"))
        if not IMAGE:
            triples.append((Path(sys.prefix), "/opt/emberkv", "ro"))
            if not sys.base_prefix.startswith("/usr"):
                triples.append((Path(sys.base_prefix), sys.base_prefix, "ro"))
        if venv is not None:
            scratch = self.directory / "tmp"
            scratch.mkdir(exist_ok=True)
            base = (venv / "bin/python").resolve().parents[1]
            triples += [(scratch, "/tmp", "rw"), (venv, str(venv), "ro")]
            if not str(base).startswith(("/usr", sys.base_prefix)):
                triples.append((base, str(base), "ro"))
        for mount in container.get("volumeMounts", ()):
            mode = "ro" if mount.get("readOnly") else "rw"
            triples.append((self.volumes[mount["name"]], mount["mountPath"], mode))
        return [word for source, target, mode in triples for word in (str(source), target, mode)]

    def _is_from_image(self, container: Manifest) -> bool:
        return bool(IMAGE) and container["name"] != "vllm"

    def _identity(self, own: Manifest) -> list[str]:
        pod = self.spec.get("securityContext", {})
        uid = own.get("runAsUser", pod.get("runAsUser", 0))
        gid = own.get("runAsGroup", pod.get("runAsGroup", 0))
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            assert uid != 0, "kubelet would refuse root"
        groups = [str(group) for group in pod.get("supplementalGroups", ())]
        capabilities = own.get("capabilities", {})
        assert capabilities.get("drop") == ["ALL"], "wants capabilities that are not known here"
        added = "".join(f",+{name.lower()}" for name in capabilities.get("add", ()))
        return [
            "setpriv",
            f"--reuid={uid}",
            f"--regid={gid}",
            f"--groups={','.join(groups)}" if groups else "--clear-groups",
            f"--bounding-set=-all{added}",
            "--inh-caps=-all",
            *(["--no-new-privs"] if own.get("allowPrivilegeEscalation") is False else []),
        ]

    def _environment(self, container: Manifest) -> dict[str, str]:
        fields = {
            "spec.nodeName": self.node.name,
            "status.podIP": self.node.pod_ip,
            "metadata.name": self.name,
        }
        found = {}
        for variable in container.get("env", ()):
            match variable:
                case {"value": value}:
                    found[variable["name"]] = value
                case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    found[variable["name"]] = fields[path]
                case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                    found[variable["name"]] = self.node.secrets[name][key]
        return found


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as kubelet expands it; an unknown name stays as it is."""
    return _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), word)


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status by name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def root_is_read_only(pid: int) -> bool:
    """Of a container's process: whether the last mount on its / is read-only."""
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    options = [",".join((fields[5], fields[-1])) for fields in mounts if fields[4] == "/"]
    return "ro" in options[-1].split(",")
