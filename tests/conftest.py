"""Fixtures for every test: no leaks; Hypothesis with a fixed profile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.leaks import held_now, leaked_since

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor, thread or shared-memory file behind.

    Left-over asyncio tasks surface as ResourceWarning or "task was destroyed", which are errors.
    """
    before = held_now()
    yield
    leaks = leaked_since(before)
    assert not leaks, "left behind: " + "; ".join(leaks)
