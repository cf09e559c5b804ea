"""What the SDK promises, and what it must not drag into an engine's process."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from difflib import unified_diff
from pathlib import Path

import pytest

import client_sdk
from tests.helpers.public_api import public_api

PUBLIC = {
    "AsyncClient",
    "AsyncLease",
    "AsyncPrefetch",
    "AsyncStagedWrite",
    "AttachedPool",
    "ClientCounters",
    "Lease",
    "NodeStatus",
    "OperatorClient",
    "Patience",
    "Prefetch",
    "ProbeResult",
    "PutResult",
    "StagedWrite",
    "SyncClient",
    "TierStatus",
    "gather_from_pages",
    "scatter_into_pages",
}


def test_public_names_are_exactly_the_intended_ones() -> None:
    assert set(client_sdk.__all__) == PUBLIC
    assert all(hasattr(client_sdk, name) for name in PUBLIC)
    assert list(client_sdk.__all__) == sorted(client_sdk.__all__)


def test_signatures_are_as_they_were() -> None:
    """Whoever changes them on purpose writes the file anew and says so in CHANGELOG.md:

    python -m tests.helpers.public_api > tests/data/public_api.txt
    """
    kept = (Path(__file__).parents[1] / "data" / "public_api.txt").read_text(encoding="utf-8")
    changes = [
        line
        for line in unified_diff(kept.splitlines(), public_api().splitlines(), lineterm="", n=0)
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
    ]
    assert not changes, "\n".join(changes)


@pytest.mark.process
def test_the_wheel_holds_our_packages_typed_and_nothing_else(tmp_path: Path) -> None:
    root = Path(client_sdk.__file__).parent.parent
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("emberkv-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"client_sdk", "emberkv_proto", "global_index", "router", "store_daemon"}
    assert {"client_sdk/py.typed", "emberkv_proto/py.typed"} <= set(names)
    ours = {
        path.relative_to(folder).as_posix()
        for folder in (root, root / "proto")
        for package in tops
        for path in (folder / package).rglob("*.py")
    }
    assert ours <= set(names)
    assert not [name for name in names if "test" in name.rpartition("/")[2]]


@pytest.mark.process
def test_importing_the_sdk_loads_only_the_base_dependencies() -> None:
    program = "import sys, client_sdk; print('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(client_sdk.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    heavy = {"grpc", "pydantic", "yaml", "torch", "numba", "aiohttp", "typer", "rich", "rocksdict"}
    assert not heavy & set(output.split())
    assert {"numpy", "blake3", "xxhash", "google"} <= set(output.split())
