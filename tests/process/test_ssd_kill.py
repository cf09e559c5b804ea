"""kill -9 in mid-append, and in mid-reclaim over three drives, many times on the same directory.

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

from tests.helpers.ssd import assert_reads_back, drives, record, store, stored

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
RECLAIMING_CHILD = """
import sys
from pathlib import Path
from tests.helpers.ssd import drives, read, record, store

first = int(sys.argv[2])
with store(Path(sys.argv[1]), config=drives(Path(sys.argv[1]), "abc", segments=4)) as s:
    s.tier.keep(lambda row: int.from_bytes(row.block_hash, "big") <= 6, lambda row: False)
    print("open", flush=True)
    while True:
        s.tier.upkeep()
        batch = range(first, first + 3)
        print("begin", *batch, flush=True)
        rows = s.tier.append([record(n, (300, 5000, 9000)[n % 3]) for n in batch])
        read(s.tier, rows[0])
        s.tier.reclaim()
        print("stored", *(int.from_bytes(row.block_hash, "big") for row in rows), flush=True)
        first += 3
"""
KILLS = 20
RECLAIM_KILLS = 12
PINNED = 6
LONGEST_SECONDS = 35.0
"""After that no more kills; a busy machine does fewer."""


def run_and_kill(
    child_code: str, directory: Path, first: int, seconds: float, appends: int
) -> tuple[set[int], set[int]]:
    """Numbers begun and acknowledged by a child, killed `seconds` after its so manyth append."""
    begun: set[int] = set()
    stored: set[int] = set()
    child = subprocess.Popen(
        [sys.executable, "-c", child_code, str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n", "the child did not open its store"
        killer = threading.Timer(seconds, child.kill)
        if not appends:
            killer.start()
        for line in child.stdout:
            if not line.endswith("\n"):
                continue  # cut by the kill: it counts as never said
            word, *numbers = line.split()
            {"begin": begun, "stored": stored}[word].update(map(int, numbers))
            if word == "stored":
                appends -= 1
                if appends == 0:
                    killer.start()
        child.wait(60)
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
        seconds = rng.uniform(0.005, 0.15)
        newly_begun, newly_stored = run_and_kill(CHILD, tmp_path, first, seconds, (kill + 1) % 3)
        begun |= newly_begun
        acknowledged |= newly_stored
        if kill % 5 == 4 or time.monotonic() - started > LONGEST_SECONDS:
            with store(tmp_path, segments=4096) as s:
                rows = s.tier.recovered_rows()
                found = {int.from_bytes(row.block_hash, "big") for row in rows}
                assert not acknowledged - found, "an acknowledged record was lost"
                assert not found - begun, "a record appeared that was never begun"
                assert_reads_back(s.tier, rows)
                assert (s.tier.corrupt_segments, s.tier.rows_dropped) == (0, 0)
            if time.monotonic() - started > LONGEST_SECONDS:
                break
    assert acknowledged


@pytest.mark.slow
@pytest.mark.process
def test_pinned_records_survive_kills_in_the_middle_of_reclaim(tmp_path: Path) -> None:
    """Six pinned records move from segment to segment while all others come and go."""
    rng = random.Random(7)
    config = drives(tmp_path, "abc", segments=4)
    with store(tmp_path, config=config) as s:
        pinned = stored(s.tier.append([record(number) for number in range(1, PINNED + 1)]))
    places = {(row.segment, row.offset) for row in pinned}
    begun: set[int] = set(range(1, PINNED + 1))
    moved = 0
    started = time.monotonic()
    for kill in range(RECLAIM_KILLS):
        if moved and time.monotonic() - started > LONGEST_SECONDS:
            break
        if kill % 4 == 3:
            (tmp_path / "rocksdb").rename(tmp_path / f"lost-{kill}")
        seconds = rng.uniform(0.05, 0.4)
        newly_begun, _ = run_and_kill(RECLAIMING_CHILD, tmp_path, max(begun) + 1, seconds, kill % 3)
        begun |= newly_begun
        with store(tmp_path, config=config) as s:
            rows = s.tier.recovered_rows()
            found = {int.from_bytes(row.block_hash, "big"): row for row in rows}
            assert not set(range(1, PINNED + 1)) - set(found), "a pinned record was lost"
            assert not set(found) - begun, "a record appeared that was never begun"
            assert_reads_back(s.tier, rows)
            assert s.tier.corrupt_segments == 0
            assert s.tier.used_bytes <= s.tier.capacity_bytes
            now = {(found[n].segment, found[n].offset) for n in range(1, PINNED + 1)}
            moved += len(now - places)
            places = now
    assert moved, "nothing was re-appended: the kills met no reclaim"
