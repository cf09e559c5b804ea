"""Tools that render and check manifests, and what they render. A tool that is missing is a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/emberkv"
KUSTOMIZE = ROOT / "deploy/kustomize"
TOOLS = Path(os.environ.get("EMBERKV_K8S_TOOLS", ROOT / ".venvs/k8s/bin"))
Manifest = dict[str, Any]
RUN_SECONDS = 170


def tool(name: str) -> str:
    """Path of a program that `make test-k8s` installs, or that is in PATH."""
    own = TOOLS / name
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"NOT CHECKED: there is no {name}; `make test-k8s` installs it")
    return found


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool(name), *arguments], capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


def output_of(name: str, *arguments: str) -> str:
    """What a tool prints. Raises AssertionError with its complaint."""
    done = run_tool(name, *arguments)
    assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout


def parse(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def template(*options: str) -> list[Manifest]:
    """The chart, as `helm template` renders it into namespace emberkv."""
    arguments = ("template", "emberkv", str(CHART), "--namespace", "emberkv", *options)
    return parse(output_of("helm", *arguments))


def template_of(values: Manifest, directory: Path) -> list[Manifest]:
    """The chart with these values; `directory` gets a file."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return template("--values", str(path))


def kustomized(name: str) -> list[Manifest]:
    return parse(output_of("kubectl", "kustomize", str(KUSTOMIZE / name)))


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod_specs(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Specs of the pods that workloads make, by kind and name."""
    return {
        f"{m['kind']}/{m['metadata']['name']}": m["spec"]["template"]["spec"]
        for m in manifests
        if m["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    }


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]
