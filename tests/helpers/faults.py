"""Faults by name inside a test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from client_sdk import faults


@contextmanager
def making(text: str) -> Iterator[faults.Faults]:
    """Make these faults while the body runs: `with making("segment_write=fail:ENOSPC@3"):`."""
    armed = faults.arm(text)
    try:
        yield armed
    finally:
        faults.disarm()
