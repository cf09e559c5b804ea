"""Clients that hang up leave nothing behind, and engines that restart cost no request."""

from __future__ import annotations

import pytest

from tests.process.router_soak import soak

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


async def test_a_thousand_clients_that_hang_up_leave_nothing_behind() -> None:
    report = await soak(0.0, 1, least_departures=1000, has_restarts=False)
    assert report.outcomes["left"] >= 1000
    assert report.is_good, report


async def test_engines_that_restart_cost_no_request_that_another_could_answer() -> None:
    report = await soak(8.0, 2)
    assert report.restarts >= 2
    assert report.outcomes["answered"] >= 50
    assert report.is_good, report
