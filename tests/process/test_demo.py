"""The quick form of the demo: every expectation holds, the JSON says so, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]


def test_the_quick_demo_holds_and_leaves_only_its_json(tmp_path: Path) -> None:
    base, shown = tmp_path / "base", tmp_path / "demo.json"
    base.mkdir()
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "client_sdk.cli.main", "demo", "--quick"),
            *("--base-dir", str(base), "--json", str(shown)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(shown.read_text())
    assert report["ok"] is True
    assert all(expectation["held"] for expectation in report["expectations"])
    phases = {phase["phase"]: phase for phase in report["phases"]}
    assert sum(phase["requests"] for phase in phases.values()) > 24
    assert all(phase["identical"] for phase in phases.values())
    assert phases["daemon A back"]["hit_tokens"]["ssd"] > 0
    assert phases["daemon A back"]["hit_tokens"]["dram"] > 0
    assert phases["only B up"]["hit_tokens"]["peer"] > 0
    assert os.listdir(base) == []
