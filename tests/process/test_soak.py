"""Twenty seconds of the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.soak import run_soak


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_sessions_at_105_percent_of_capacity_read_only_what_was_written(
    tmp_path: Path,
) -> None:
    report = run_soak(tmp_path, seconds=20.0, seed=8)
    assert not report.findings, report.findings
    assert report.checks >= 2
    assert min(report.hits, report.writes, report.evictions) > 200, report
