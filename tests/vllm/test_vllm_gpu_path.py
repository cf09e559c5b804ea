"""The connector's path for GPUs with vLLM's own classes, and all but the GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import ROOT, START_SECONDS, environment, python
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.since_vllm(0, 29, "before 0.29 vLLM has no layouts with blocks before layers"),
]


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), capacity_bytes=16 * MIB) as daemon:
        done = subprocess.run(
            [python(), "-m", "tests.helpers.vllm_gpu_path", model, daemon.socket_path],
            cwd=ROOT,
            env=environment(),
            timeout=START_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_puts_blocks_before_layers_where_its_backend_can(seen: dict[str, Any]) -> None:
    assert seen["resolved"] == {
        "cpu": "LBHNC",
        "flash attention": "BLNHC",
        "flex attention": "LBNHC",  # ours is dropped, with a warning
        "flash attention on Blackwell": "BLHNC",
        "FlashInfer on Blackwell": "BLHNC",
    }


def test_no_layout_is_asked_for_where_it_could_cost_the_engine(seen: dict[str, Any]) -> None:
    asked = {name for name, layout in seen["wishes"].items() if layout is not None}
    assert asked == {"gpu", "gpu again", "flash attention"}
    assert len(seen["wishes"]) == 14


def test_layers_that_wait_for_loads_are_in_no_graph_of_the_whole_step(seen: dict[str, Any]) -> None:
    assert seen["piecewise"] == [False, False, True]


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_blocks_come_back_as_they_were_saved_beside_the_engines_work(
    seen: dict[str, Any], layout: str
) -> None:
    trip = seen["trips"][layout]
    assert trip["whole"] == layout.startswith("B")
    assert trip["stats"] == {"saved_blocks": 8}
    assert trip["loaded"]
    assert trip["by layer"]
    assert trip["streams"] == 2
    assert trip["engine waits"] == 3, "one save and two loads waited for the engine's work"
    assert trip["copy waits"] >= 1 + 1 + 3, "each piece of the save, the load, each layer"


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_the_whole_pool_is_pinned_in_chunks_and_given_back(
    seen: dict[str, Any], layout: str
) -> None:
    trip = seen["trips"][layout]
    assert trip["pinned"] == trip["pool"] == trip["chunks"]
    assert trip["chunk sizes"][0] == 1 << 16
    assert trip["left"] == 0
    assert (1 << 16) % trip["part"], "no slot lay across two chunks"


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_an_idle_engine_waits_until_a_load_or_save_ends_and_for_nothing_else(
    seen: dict[str, Any], layout: str
) -> None:
    assert seen["trips"][layout]["waits"] == [True, True, True]


def test_engines_with_another_layout_share_nothing(seen: dict[str, Any]) -> None:
    assert len({trip["namespace"] for trip in seen["trips"].values()}) == 4
