"""Several UCX agents of one purpose: whichever goes is replaced, and the others go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from client_sdk.transport.agent_process import AgentProcess
from client_sdk.transport.timed_socket import Clock
from emberkv_proto.errors import DeadlineError, EmberError, UnavailableError

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two looks for agents that ended by themselves; others are told at once."""
LONGEST_PAUSE_SECONDS = 10.0

MakeAgent = Callable[[int], AgentProcess]
"""Of the agent's running number; blocks until it can work."""


class AgentPool:
    """`size` agents, started and replaced by a thread of the pool's own."""

    def __init__(self, make: MakeAgent, size: int, clock: Clock = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._agents: list[AgentProcess | None] = [None] * size
        self._leaving: list[AgentProcess] = []
        """Retired or destroyed ones that somebody still uses."""
        self._failure: EmberError | None = None
        self._is_closed = False
        self._made = 0
        self.replaced = 0
        """Agents that had to be made anew, for whatever reason."""
        self._keeper = threading.Thread(target=self._keep, name="emberkv-ucx-agents", daemon=True)
        self._keeper.start()

    def take(self, number: int) -> AgentProcess | None:
        """Agent `number` (of any size), or another while that is being replaced; None: none is."""
        with self._lock:
            size = len(self._agents)
            for step in range(size):
                agent = self._agents[(number + step) % size]
                if agent is not None and agent.is_usable:
                    return agent
            self._changed.notify_all()
            return None

    def await_one(self, number: int, seconds: float) -> AgentProcess:
        """As `take`, but wait for one. Raises DeadlineError or why none can be made."""
        deadline = self._clock() + seconds
        while True:
            agent = self.take(number)
            if agent is not None:
                return agent
            with self._lock:
                left = deadline - self._clock()
                if self._is_closed:
                    raise UnavailableError("the transport is shut down")
                if left <= 0:
                    raise self._failure or DeadlineError(f"no UCX agent within {seconds:.1f} s")
                self._changed.wait(min(left, LOOK_SECONDS))

    def await_first(self, seconds: float) -> AgentProcess:
        """As `await_one`, but raise at once why the first one could not be made."""
        deadline = self._clock() + seconds
        while True:
            agent = self.take(0)
            if agent is not None:
                return agent
            with self._lock:
                left = deadline - self._clock()
                if self._failure is not None or left <= 0:
                    raise self._failure or DeadlineError(f"no UCX agent within {seconds:.1f} s")
                self._changed.wait(min(left, LOOK_SECONDS))

    def poke(self) -> None:
        """Look now: an agent was retired or destroyed."""
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Destroy all agents and wait for their ends. What uses them fails."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            for agent in self._agents:
                if agent is not None:
                    agent.destroy()
        self._keeper.join()

    def check_integrity(self) -> None:
        """Assert that agents are sound and none is kept twice."""
        with self._lock:
            agents = [agent for agent in self._agents if agent is not None] + self._leaving
            assert len({id(agent) for agent in agents}) == len(agents)
            assert not (self._is_closed and any(agent.is_usable for agent in agents))
        for agent in agents:
            agent.check_integrity()

    def _keep(self) -> None:
        """The agents die with this thread, so it ends last."""
        pause = 0.0
        while True:
            with self._lock:
                if not self._is_closed and (pause or not self._has_work()):
                    self._changed.wait(pause or LOOK_SECONDS)
                if self._is_closed:
                    break
                missing = self._set_aside()
            self._end_unused()
            for place in missing:
                pause = self._fill(place, pause)
        everyone = [agent for agent in self._agents if agent is not None] + self._leaving
        for agent in everyone:
            agent.destroy()
        deadline = self._clock() + LONGEST_PAUSE_SECONDS
        while not all(agent.is_unused for agent in everyone) and self._clock() < deadline:
            time.sleep(0.01)
        for agent in everyone:
            agent.close()

    def _has_work(self) -> bool:
        return any(agent is None or not agent.is_usable for agent in self._agents)

    def _set_aside(self) -> list[int]:
        """The places to fill; who stood there is leaving."""
        missing = []
        for place, agent in enumerate(self._agents):
            if agent is None or not agent.is_usable:
                missing.append(place)
                if agent is not None:
                    self._leaving.append(agent)
                    self._agents[place] = None
                    self.replaced += 1
        return missing

    def _end_unused(self) -> None:
        staying = []
        for agent in self._leaving:
            if agent.is_unused:
                agent.close()
            else:
                staying.append(agent)
        with self._lock:
            self._leaving = staying

    def _fill(self, place: int, pause: float) -> float:
        """Give the pause before the next try: 0 when it worked."""
        self._made += 1
        try:
            agent = self._make(self._made)
        except EmberError as error:
            if self._failure is None or str(error) != str(self._failure):
                log.warning("UCX agent: %s", error)
            with self._lock:
                self._failure = error
                self._changed.notify_all()
            return min(max(1.0, 2 * pause), LONGEST_PAUSE_SECONDS)
        with self._lock:
            self._agents[place] = agent
            self._failure = None
            self._changed.notify_all()
        return 0.0
