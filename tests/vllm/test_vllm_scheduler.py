"""Our half in vLLM's own scheduler: no layer reads a page that does not hold what it should."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks._vllm import ROOT, START_SECONDS, environment, python, version

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.since_vllm(0, 30, "before 0.30 the connector is off for several groups of layers"),
]
SEEDS = 6


def test_layers_of_all_kinds_read_their_own_tokens_whatever_loads_saves_and_losses_do(
    model: Path,
) -> None:
    done = subprocess.run(
        [python(), "-m", "tests.helpers.vllm_scheduler_model", model, str(SEEDS)],
        cwd=ROOT,
        env=environment(),
        timeout=START_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) == (10 if version() >= (0, 32) else 5)
    for site, seen in counts.items():
        assert seen["loads"] > seen["failed loads"] > 0, f"{site}: no proof"
        assert seen["saved blocks"] > 0
    assert sum(seen.get("preempted", 0) for seen in counts.values()) > 0
