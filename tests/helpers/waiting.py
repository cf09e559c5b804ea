"""Waiting for something that another task does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from client_sdk import aio


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Raises asyncio.TimeoutError when it does not hold in time."""
    async with aio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
