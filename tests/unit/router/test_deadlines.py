"""One timer tells each who waits when its own deadline is over, however deadlines move."""

from __future__ import annotations

import asyncio
import time

from client_sdk.aio import timeout
from router.deadlines import Deadlines


class Waiter:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.told: list[float] = []
        self.longer = 0.0

    def overdue(self) -> None:
        self.told.append(time.monotonic())
        self.deadline += self.longer


async def told(*waiters: Waiter) -> None:
    async with timeout(60):
        while not all(waiter.told for waiter in waiters):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_each_is_told_once_and_not_before_its_deadline() -> None:
    loop = asyncio.get_running_loop()
    deadlines, now = Deadlines(loop), loop.time()
    late, soon, never = Waiter(now + 0.2), Waiter(now + 0.05), Waiter(now + 0.1)
    for waiter in (late, soon, never, soon):
        deadlines.watch(waiter)
    deadlines.forget(never)
    await told(late, soon)
    await asyncio.sleep(0.05)
    assert soon.told[0] >= now + 0.05
    assert late.told[0] >= now + 0.2
    assert [len(waiter.told) for waiter in (late, soon, never)] == [1, 1, 0]
    deadlines.close()


async def test_a_deadline_that_moved_is_waited_for() -> None:
    loop = asyncio.get_running_loop()
    deadlines, now = Deadlines(loop), loop.time()
    moved, again = Waiter(now + 0.05), Waiter(now + 0.05)
    again.longer = 0.1
    deadlines.watch(moved)
    deadlines.watch(again)
    moved.deadline = now + 0.3
    await told(again, moved)
    assert moved.told[0] >= now + 0.3
    assert len(again.told) >= 2
    deadlines.close()


async def test_closing_tells_nobody() -> None:
    loop = asyncio.get_running_loop()
    deadlines, waiter = Deadlines(loop), Waiter(loop.time() + 0.02)
    deadlines.watch(waiter)
    deadlines.close()
    await asyncio.sleep(0.06)
    assert not waiter.told
