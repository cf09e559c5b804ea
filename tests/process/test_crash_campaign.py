"""Twenty loops of the crash campaign, and that it would find what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.crash_campaign import (
    EXITS,
    LOOPS_A_LIFE,
    Journal,
    Life,
    blow_of,
    run_campaign,
)
from tests.process.crash_worker import CHAIN_BLOCKS, hashes_of, is_abandoned

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
SEED = 20


def test_twenty_kills_and_exits_corrupt_lose_and_conjure_up_nothing(tmp_path: Path) -> None:
    report = run_campaign(tmp_path, 2 * LOOPS_A_LIFE, SEED)
    assert not report.findings, report.findings
    assert report.loops == report.kills + sum(report.exits.values()) == 20
    assert len(report.exits) >= 3
    assert report.acknowledged_blocks > 500
    assert report.abandoned_chains > 50
    assert min(report.read_blocks, report.checked_blocks) > 500


def test_the_blows_are_the_seeds_and_reach_every_point() -> None:
    blows = [blow_of(SEED, loop) for loop in range(500)]
    assert blows == [blow_of(SEED, loop) for loop in range(500)]
    assert blows != [blow_of(SEED + 1, loop) for loop in range(500)]
    assert {blow.fault.partition("=")[0] for blow in blows} == {"", *EXITS}


class Planted:
    """A client process that only has a journal."""

    def __init__(self) -> None:
        self.journal = Journal()


def test_lost_and_phantom_blocks_and_the_clients_own_findings_are_found(tmp_path: Path) -> None:
    planted = Planted()
    life = Life(tmp_path, True, [planted], "seed")  # type: ignore[list-item]
    kept = next(number for number in range(1 << 24, 1 << 25) if not is_abandoned(number))
    abandoned = next(number for number in range(1 << 24, 1 << 25) if is_abandoned(number))
    with life.cluster as cluster:
        planted.journal.begun = [kept, abandoned]
        planted.journal.acknowledged[kept] = set(range(CHAIN_BLOCKS - 1))
        planted.journal.findings = ["corrupt: said so"]
        with cluster.nodes[0].client() as client, client.stage(hashes_of(abandoned)) as write:
            write.commit([2])
        findings = life.verify(is_last=True)
    assert any(f"lost: chain {kept} has 0 of {CHAIN_BLOCKS - 1} blocks" in f for f in findings)
    assert any(f"phantom: chain {abandoned} " in f for f in findings)
    assert "corrupt: said so" in findings
