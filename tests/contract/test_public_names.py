"""What the SDK promises, and what it must not drag into an engine's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import client_sdk

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


def test_the_sdk_is_typed() -> None:
    assert (Path(client_sdk.__file__).parent / "py.typed").is_file()


@pytest.mark.process
def test_importing_the_sdk_loads_only_the_base_dependencies() -> None:
    program = "import sys, client_sdk; print('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(client_sdk.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    ).stdout
    heavy = {"grpc", "pydantic", "yaml", "torch", "numba", "aiohttp", "typer", "rich", "rocksdict"}
    assert not heavy & set(output.split())
    assert {"numpy", "blake3", "xxhash", "google"} <= set(output.split())
