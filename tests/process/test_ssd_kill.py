"""kill -9 in mid-append, 20 times on the same directory.

The child says over a pipe what it begins and what was acknowledged; the parent is the journal.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.ssd import assert_reads_back, store

CHILD = """
import sys
from pathlib import Path
from tests.helpers.ssd import record, store

first = int(sys.argv[2])
lengths = (300, 5000, 12000, 40000)
with store(Path(sys.argv[1]), segments=4096) as s:
    print("open", flush=True)
    while True:
        batch = range(first, first + 4)
        print("begin", *batch, flush=True)
        rows = s.tier.append([record(n, lengths[n % 4]) for n in batch])
        print("stored", *(int.from_bytes(row.block_hash, "big") for row in rows), flush=True)
        first += 4
"""
KILLS = 20


def run_and_kill(directory: Path, first: int, seconds: float) -> tuple[set[int], set[int]]:
    """Numbers begun and numbers acknowledged by a child that is killed `seconds` after opening."""
    begun: set[int] = set()
    stored: set[int] = set()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n", "the child did not open its store"
        killer = threading.Timer(seconds, child.kill)
        killer.start()
        for line in child.stdout:
            if not line.endswith("\n"):
                continue  # cut by the kill: it counts as never said
            word, *numbers = line.split()
            {"begin": begun, "stored": stored}[word].update(map(int, numbers))
        child.wait(20)
        killer.join()
    return begun, stored


@pytest.mark.slow
@pytest.mark.process
def test_whatever_was_acknowledged_before_a_kill_reads_back(tmp_path: Path) -> None:
    rng = random.Random(20)
    begun: set[int] = set()
    acknowledged: set[int] = set()
    started = time.monotonic()
    for kill in range(KILLS):
        if kill % 7 == 6:  # the index is a cache: losing it too must cost nothing
            (tmp_path / "rocksdb").rename(tmp_path / f"lost-{kill}")
        first = max(begun, default=0) + 1
        newly_begun, newly_stored = run_and_kill(tmp_path, first, rng.uniform(0.005, 0.15))
        begun |= newly_begun
        acknowledged |= newly_stored
        if kill % 5 == 4 or time.monotonic() - started > 40:
            with store(tmp_path, segments=4096) as s:
                rows = s.tier.recovered_rows()
                found = {int.from_bytes(row.block_hash, "big") for row in rows}
                assert not acknowledged - found, "an acknowledged record was lost"
                assert not found - begun, "a record appeared that was never begun"
                assert_reads_back(s.tier, rows)
                assert (s.tier.corrupt_segments, s.tier.rows_dropped) == (0, 0)
        assert time.monotonic() - started < 55, f"only {kill + 1} kills in time"
    assert len(acknowledged) > 100
