"""Waiting for something that another task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from client_sdk import aio


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Raises asyncio.TimeoutError when it does not hold in time."""
    async with aio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_asked(holds: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    """The same of what has to be asked for. Others run between two tries, whatever asking does."""
    async with aio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
