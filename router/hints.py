"""Tells a node's daemon to bring what a request will need, while the request waits for its engine.

A hint lasts as long as its `with` block: leaving it, by whatever door, calls off what has not begun
to move. A daemon that is away costs nothing but a counter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass

from client_sdk import aio
from client_sdk.hint_client import HintClient, HintProgress
from client_sdk.prefetch import HintedSource
from emberkv_proto.errors import DeadlineError, EmberError, UnavailableError
from emberkv_proto.types import BlockHash, NamespaceId
from router.decision import Decision
from router.engines import Engine
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)
MAX_HINTS = 1024
"""At a time; further requests go without."""
AWAY_SECONDS = 2.0
"""A daemon that could not be reached is not told anything for so long; each time in a row, twice as
long."""
LONGEST_AWAY_SECONDS = 30.0
FIRST_ANSWER_SECONDS = 1.0
"""A daemon says something at once; one that does not is stopped, or as good as that."""


@dataclass(frozen=True, slots=True)
class HintLimits:
    """`least_queue_seconds`: a request that waits for less gets no hint."""

    is_on: bool
    least_queue_seconds: float
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class _Away:
    until: float
    pause_seconds: float


class Hint:
    """A chain on its way to one node's DRAM. Waiting for it is safe at any time."""

    def __init__(self) -> None:
        self.readable_blocks = 0
        """Of the chain's leading blocks, as the daemon said last."""
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """No more will come by it."""
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()

    async def over(self) -> None:
        await self._over.wait()


class Hinter:
    """All hints of one router. Belongs to its event loop; `close` it there."""

    def __init__(
        self,
        client: HintClient,
        limits: HintLimits,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._away: dict[str, _Away] = {}

    def __len__(self) -> int:
        """How many are in progress."""
        return len(self._tasks)

    def queued(self, decision: Decision) -> AbstractContextManager[object] | None:
        """Bring what the estimate fetches from SSD or peers, if the request has to wait."""
        chosen = decision.chosen
        used, limits = chosen.estimate.used, self._limits
        if not (used.ssd_tokens or used.peer_tokens) or decision.kind is None or not limits.is_on:
            return None
        if chosen.estimate.queue_seconds < limits.least_queue_seconds:
            return None
        tokens = used.node_tokens + used.peer_tokens
        hashes = decision.hashes[: tokens // decision.kind.block_tokens]
        return self.bring(chosen.engine, decision.kind.namespace_id, hashes)

    @contextmanager
    def bring(
        self,
        engine: Engine,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        source: HintedSource | None = None,
    ) -> Iterator[Hint]:
        """Have a chain brought to the engine's node while in the block. See `HintClient`."""
        hint = Hint()
        address, now = engine.daemon_address, self._clock()
        if not (address and hashes):
            self._count("no_daemon", hint)
        elif len(self._tasks) >= MAX_HINTS:
            self._count("too_many", hint)
        elif address in self._away and now < self._away[address].until:
            self._count("away", hint)
        else:
            work = self._run(hint, address, namespace_id, hashes, source)
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                yield hint
            finally:
                task.cancel()
            return
        yield hint

    def keep(self, addresses: Set[str]) -> None:
        """Forget all other daemons, and leave those to which no hint is in progress."""
        for address in [known for known in self._away if known not in addresses]:
            del self._away[address]
        if not self._client.addresses <= addresses:
            leaving = asyncio.get_running_loop().create_task(self._client.retain(addresses))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Call all off and wait for them."""
        for task in self._tasks:
            task.cancel()
        if ending := self._tasks | self._leaving:
            await asyncio.wait(ending)
        await self._client.close()

    async def _run(
        self,
        hint: Hint,
        address: str,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        source: HintedSource | None,
    ) -> None:
        outcome = "cancelled"
        try:
            progress = self._client.prefetch(
                address, namespace_id, hashes, self._limits.deadline_seconds, source
            )
            async with aclosing(progress):
                hint.readable_blocks = await _first_of(progress, address)
                self._away.pop(address, None)
                async for said in progress:
                    hint.readable_blocks = said.readable_blocks
            outcome = "done"
        except EmberError as error:
            outcome = "failed"
            log.info("hint to %s: %s", address, error)
            if isinstance(error, UnavailableError | DeadlineError):
                self._leave_alone(address)
        finally:
            self._count(outcome, hint)

    def _leave_alone(self, address: str) -> None:
        last = self._away.get(address)
        pause = min(2 * last.pause_seconds, LONGEST_AWAY_SECONDS) if last else AWAY_SECONDS
        self._away[address] = _Away(self._clock() + pause, pause)

    def _count(self, outcome: str, hint: Hint) -> None:
        self._metrics.hints.labels(outcome).inc()
        hint.end()


async def _first_of(progress: AsyncIterator[HintProgress], address: str) -> int:
    """Readable blocks by the first answer. Raises DeadlineError for a daemon that says nothing."""
    try:
        async with aio.timeout(FIRST_ANSWER_SECONDS):
            async for said in progress:
                return said.readable_blocks
    except asyncio.TimeoutError:
        raise DeadlineError(f"daemon {address} said nothing in {FIRST_ANSWER_SECONDS} s") from None
    return 0  # it had nothing to say, and is done
