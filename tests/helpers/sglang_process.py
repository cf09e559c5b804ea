"""Real SGLang in processes of its own: scripts of the tests, and the server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "sglang_stand_in"
RUN_SECONDS = 400.0


def python() -> Path:
    """The interpreter of the environment that SGLang is in; `make test-sglang` makes it."""
    return Path(os.environ.get("EMBERKV_SGLANG_PYTHON", ROOT / ".venvs/sglang/bin/python"))


def environment(**more: str) -> dict[str, str]:
    """Offline, one thread (its number changes the last bits), this checkout importable."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPATH": f"{STAND_IN}:{ROOT}:{ROOT / 'proto'}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_DISABLE_REQUEST_LOGGING": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def extra_config(socket_path: Path, **settings: Any) -> dict[str, Any]:
    """`--hicache-storage-backend-extra-config` of our backend."""
    return {
        "backend_name": "emberkv",
        "module_path": "client_sdk.engine.sglang_backend",
        "class_name": "EmberHiCache",
        "interface_v1": 1,
        "socket_path": str(socket_path),
        **settings,
    }


def run(script: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Run a script with SGLang's interpreter; what it printed. Fails with all it said."""
    done = subprocess.run(
        [python(), script, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=environment(**(variables or {})),
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{said}"
    return done.stdout


def run_together(script: Path, each: Sequence[Sequence[str]], directory: Path) -> list[str]:
    """`run` with each of these arguments at the same time; none outlives the call."""
    logs = [directory / f"{number}.log" for number in range(len(each))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for arguments, log in zip(each, logs, strict=True):
            with log.open("wb") as out:
                command: list[str | Path] = [python(), script, *arguments]
                running.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment()))
        ends = [process.wait(2 * RUN_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = [log.read_text() for log in logs]
    assert not any(ends), f"{script.name} ended with {ends}:\n" + "\n".join(s[-4000:] for s in said)
    return said
