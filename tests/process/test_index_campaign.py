"""The index campaign with short stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.index_campaign import run_campaign

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
GENEROUS_SECONDS = 60.0
"""The stated bound is for a machine that is not busy with other tests."""


def test_indexes_are_exact_again_after_each_blow_and_requests_are_served_throughout(
    tmp_path: Path,
) -> None:
    report = run_campaign(
        tmp_path,
        pause_seconds=4.0,
        seed=5,
        bound_seconds=GENEROUS_SECONDS,
        is_short=True,
    )
    assert not report.findings, report.findings
    assert report.blows == len(report.agreed_seconds) == 7
    assert min(report.requests, report.calls) > 100
    assert report.elsewhere > 0, "no request came to a router that was down"
