"""A release with small tiers on this machine, for the tests that run its pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.site import Site, running_site, small_values


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path, small_values()) as site:
        yield site
