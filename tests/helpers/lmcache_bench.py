"""LMCache 0.5.6 itself: its own benchmark of an L2 adapter, which compares what it loads.

It is in SGLang's environment (deploy/requirements-sglang-cpu.txt), with which it shares torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.sglang_process import ROOT, python

KEYS, ROUNDS = 16, 2
"""A warm-up round comes before."""
BYTES = 256 << 10
HIT_SHARE = 0.5
"""The most of a lookup's keys that were stored."""
END_SECONDS = 400.0


class LmcacheBench:
    """Starts at once, beside whatever else runs; `results` waits for its end."""

    def __init__(self, directory: Path, adapter: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._output, self._log = directory / "results.json", directory / "lmcache.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(python(), "-m", "lmcache.cli.main", "bench", "l2"),
                    *("--l2-adapter", json.dumps(adapter), "--num-keys", str(KEYS)),
                    *("--data-size-kb", str(BYTES >> 10), "--rounds", str(ROUNDS)),
                    *("--lookup-max-hit-rate", str(HIT_SHARE), "--no-skip-verify"),
                    *("--format", "json", "-q", "--output", self._output),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
                    "LMCACHE_TRACK_USAGE": "false",
                    "OMP_NUM_THREADS": "1",
                },
            )

    def results(self) -> dict[str, dict[str, Any]]:
        """By operation (Store, Lookup, Load). Raises AssertionError with what it said."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            code = None
        assert code == 0, f"LMCache ended with {code}:\n{self._log.read_text()[-6000:]}"
        metrics = json.loads(self._output.read_text())["metrics"]
        return {row["operation"]: row for name, row in metrics.items() if name.startswith("op_")}

    def end(self) -> None:
        """Also when it has ended."""
        self._process.kill()
        self._process.wait(END_SECONDS)


def assert_all_was_stored_and_loaded(results: Mapping[str, Mapping[str, Any]]) -> None:
    """And found exactly where it was stored."""
    for operation in ("Store", "Load"):
        row = results[operation]
        assert (row["total_success"], row["rounds_timed_out"]) == (KEYS * ROUNDS, 0), row
    assert results["Lookup"]["total_success"] == KEYS * ROUNDS * HIT_SHARE, results["Lookup"]
