"""Ctrl-C at any moment of the demo leaves no process and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from client_sdk.cli.cluster_plan import SHM
from tests.helpers.processes import pids_with

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting node-a", signal.SIGTERM),
        ("kill -9 engine-a", signal.SIGINT),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    demo = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "client_sdk.cli.main",
            "demo",
            "--quick",
            "--base-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    try:
        seen = ""
        for line in demo.stdout:
            seen += line
            if moment in line:
                break
        assert moment in seen, seen
        (run_dir,) = tmp_path.iterdir()
        run_id = run_dir.name.removeprefix("emberkv-")
        demo.send_signal(number)
        rest = demo.stdout.read()
        assert demo.wait(timeout=90) == 130, seen + rest
    finally:
        demo.kill()
        demo.wait(timeout=90)
        demo.stdout.close()
    assert pids_with(run_id) == []
    assert os.listdir(tmp_path) == []
    assert not list(SHM.glob(f"emberkv-{run_id}-*"))
