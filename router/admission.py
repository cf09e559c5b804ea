"""Lets requests through to the engines that have room; the others wait in line, for a bounded time.

A request waits only while every engine of its model is full. One waiter at a time is told to look
again, when a charge ended or an engine came; it looks in its own task and passes the word on when
it has left the line, by whatever door: so a client that went away holds up nobody.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import Enum

from client_sdk.aio import timeout
from router.decision import Chooser, Decision, Plan, SaturatedError
from router.metrics import RouterMetrics
from router.waiting import Place, Priority, WaitingLine


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many may wait (0: nobody), how long, and the bounds of what Retry-After says."""

    max_requests: int
    max_seconds: float
    least_retry_seconds: int
    most_retry_seconds: int


class Turn(Enum):
    LOOK = "look"
    DISPLACED = "displaced"


class _Waiter(Place):
    __slots__ = ("plan", "turn")

    def __init__(self, plan: Plan, priority: Priority, turn: asyncio.Future[Turn]) -> None:
        super().__init__(plan.model, priority)
        self.plan = plan
        self.turn = turn


class Admission:
    """The one way from a plan to a first engine. On the event loop."""

    def __init__(self, chooser: Chooser, limits: AdmissionLimits, metrics: RouterMetrics) -> None:
        self._chooser = chooser
        self._limits = limits
        self._metrics = metrics
        self._line: WaitingLine[_Waiter] = WaitingLine(limits.max_requests)
        self._looking: _Waiter | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._line)

    def waiting(self, priority: Priority) -> int:
        return self._line.count(priority)

    def set_limits(self, limits: AdmissionLimits) -> None:
        """From now on; those in line beyond a smaller limit stay until their time is over."""
        self._limits = limits
        self._line.limit = max(limits.max_requests, len(self._line))

    def try_now(self, plan: Plan, priority: Priority) -> Decision | None:
        """Choose an engine, or return None where the request has to wait.

        Raises:
            NoEngineError, UnknownModelError
            SaturatedError: nobody may wait.
        """
        if len(self._line) and self._line.ahead(plan.model, priority):
            return None
        try:
            return self._chooser.choose(plan, ())
        except SaturatedError:
            if not self._limits.max_requests:
                raise
            return None

    async def wait(self, plan: Plan, priority: Priority) -> Decision:
        """Wait in line and choose. Whoever gets the decision charges it without waiting again.

        When cancelled the place is given up at once.

        Raises:
            NoEngineError, UnknownModelError
            SaturatedError: the line is full, or the time is over, or a higher class came.
        """
        waiter = self._join(plan, priority)
        began = self._loop.time()
        try:
            async with timeout(self._limits.max_seconds):
                while True:
                    if await waiter.turn is Turn.DISPLACED:
                        raise SaturatedError(
                            "a request of a higher class took the place", "displaced"
                        )
                    try:
                        return self._chooser.choose(plan, ())
                    except SaturatedError:
                        # Somebody of a higher class was quicker.
                        waiter.turn = self._loop.create_future()
                        self._pass_on(waiter)
        except (TimeoutError, asyncio.TimeoutError):
            waited = self._limits.max_seconds
            raise SaturatedError(f"no engine had room for {waited} s", "queue_timeout") from None
        finally:
            self._line.leave(waiter)
            self._line.limit = max(self._limits.max_requests, len(self._line))
            self._pass_on(waiter)
            self._metrics.waited_seconds.observe(self._loop.time() - began)

    def notice(self) -> None:
        """There may be room: tell the first waiter whose model has some to look again."""
        if self._looking is not None or not len(self._line):
            return
        full: set[str] = set()
        for waiter in self._line:
            if waiter.model in full or waiter.turn.done():
                continue
            if self._chooser.has_other(waiter.plan, ()):
                self._looking = waiter
                waiter.turn.set_result(Turn.LOOK)
                return
            full.add(waiter.model)

    def retry_after_seconds(self, model: str) -> int:
        """When a request refused now may find room, at the pace at which engines finish."""
        wait = self._chooser.seconds_to_room(model, self._line.ahead(model, Priority.LOW) + 1)
        limits = self._limits
        return min(max(math.ceil(wait), limits.least_retry_seconds), limits.most_retry_seconds)

    def check_integrity(self) -> None:
        self._line.check_integrity()
        for waiter in self._line:
            if waiter.turn.done() and waiter.turn.result() is Turn.LOOK:
                assert waiter is self._looking, "told to look without being the one who looks"
        assert self._looking is None or self._looking in tuple(self._line)

    def _join(self, plan: Plan, priority: Priority) -> _Waiter:
        waiter = _Waiter(plan, priority, self._loop.create_future())
        if self._line.is_full:
            last = self._line.displaceable(priority)
            if last is None or last.turn.done():
                raise SaturatedError(f"{len(self._line)} requests wait already", "queue_full")
            self._line.leave(last)
            last.turn.set_result(Turn.DISPLACED)
        self._line.join(waiter)
        # Room may have come for a model whose line was not looked at since.
        self._loop.call_soon(self.notice)
        return waiter

    def _pass_on(self, waiter: _Waiter) -> None:
        """`waiter` looks no more; the next one does, once what it decided has been charged."""
        if self._looking is waiter:
            self._looking = None
        self._loop.call_soon(self.notice)
