"""Fixtures for every test: no leaks; Hypothesis with a fixed profile."""

from __future__ import annotations

import asyncio
import inspect
import logging
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
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a descriptor, thread, task or shared-memory file behind."""
    tasks = _watch_for_left_tasks(monkeypatch)
    before = held_now()
    yield
    leaks = leaked_since(before) + tasks
    assert not leaks, "left behind: " + "; ".join(leaks)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """A server that a test starts in this process sets it: pytest then keeps each later test's
    records, and with an error in one the objects of its traceback."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


def _watch_for_left_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tasks that still run when a runner closes its loop; filled as that happens."""
    left: list[str] = []
    cancel_all = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def note_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
        left.extend(
            f"task {task.get_name()}: {task.get_coro()}"
            for task in asyncio.all_tasks(loop)
            if inspect.iscoroutine(task.get_coro())  # grpc's own are Cython's
        )
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", note_and_cancel)
    return left
