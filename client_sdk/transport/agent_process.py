"""The daemon's end of one UCX agent process: start it, command it, be sure that it is gone."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from client_sdk.transport.base import Segment
from client_sdk.transport.lane import (
    HEADER_BYTES,
    AgentFacts,
    Command,
    Header,
    Move,
    Reply,
    pack_frame,
    unpack_places,
)
from client_sdk.transport.memory import HostMemory, Memory
from client_sdk.transport.timed_socket import Clock, TimedSocket
from emberkv_proto.errors import DeadlineError, FrameError, UnavailableError

log = logging.getLogger(__name__)

UCX_AGENT = "client_sdk.transport.ucx_agent"
UCP_AGENT = "client_sdk.transport.ucp_agent"
START_SECONDS = 30.0
END_WARNING_SECONDS = 10.0
COMMAND_SECONDS = 5.0
"""For what needs no peer: a name to learn or to forget."""


class AgentLostError(UnavailableError):
    """The agent was destroyed under a transfer that was not to blame; begin again on another."""


class RemoteLostError(UnavailableError):
    """UCX says that the peer's agent is gone."""


class Lane:
    """Commands to an agent, one thread at a time."""

    def __init__(self, sock: TimedSocket) -> None:
        self._sock = sock
        self._unanswered = 0

    @property
    def unanswered(self) -> int:
        """Commands whose replies have still to come."""
        return self._unanswered

    def await_start(self, seconds: float) -> AgentFacts:
        """What a new agent says first. Raises as `reply`, and DeadlineError."""
        if not self._sock.wait_readable(seconds):
            raise DeadlineError(f"a UCX agent did not start within {seconds} s")
        self._sock.set_deadline(COMMAND_SECONDS)
        self._unanswered += 1  # it was started, which is as good as a command
        return AgentFacts.unpack(self.reply())

    def ask(self, command: Command, body: bytes) -> bytes:
        self._sock.set_deadline(COMMAND_SECONDS)
        self._unanswered += 1
        self._sock.send(pack_frame(command, body))
        return self.reply()

    def post(self, move: Move, deadline_seconds: float) -> None:
        """Begin a move; its `reply` comes after those of earlier ones."""
        self._sock.set_deadline(deadline_seconds)
        self._unanswered += 1
        self._sock.send(pack_frame(Command.MOVE, move.pack()))

    def reply(self) -> bytes:
        """Raises as TimedSocket does, RemoteLostError, or UnavailableError with UCX's words."""
        header = Header.unpack(self._sock.receive(HEADER_BYTES))
        body = bytes(self._sock.receive(header.body_bytes))
        self._unanswered -= 1
        if header.kind == Reply.LOST:
            raise RemoteLostError(f"UCX lost the peer: {body.decode(errors='replace')}")
        if header.kind != Reply.OK:
            raise UnavailableError(f"UCX: {body.decode(errors='replace')}")
        return body

    def drain(self) -> None:
        """Take the replies to come, good or bad. Raises when one does not come at all."""
        while self._unanswered > 0:
            unanswered = self._unanswered
            try:
                self.reply()
            except UnavailableError:
                if self._unanswered == unanswered:
                    raise

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True)
class _Region:
    """Where a region begins: counted through all regions, and from the agent's base."""

    start: int
    from_base: int
    length: int


def _laid_out(memory: Sequence[Memory], addresses: Sequence[int], base: int) -> tuple[_Region, ...]:
    regions, start = [], 0
    for region, address in zip(memory, addresses, strict=True):
        if address < base:
            raise FrameError("an agent's region lies before its base")
        regions.append(_Region(start, address - base, region.length))
        start += region.length
    return tuple(regions)


class AgentProcess:
    """One agent. Starting blocks until it can work; `destroy` is quick and final, from any thread.

    The thread that makes it must outlive it: the kernel ends the process with that thread.
    """

    def __init__(
        self,
        name: str,
        memory: Sequence[Memory],
        lanes: int,
        environment: Mapping[str, str],
        progress_seconds: float,
        clock: Clock = time.monotonic,
        program: str = UCX_AGENT,
    ) -> None:
        """Raises UnavailableError (why it cannot work) or DeadlineError."""
        self.name = name
        self._lock = threading.Lock()
        self._is_destroyed = False
        self._is_retired = False
        self._lent = 0
        self._spoiled = 0
        self._names: Counter[bytes] = Counter()
        self._naming = threading.Lock()
        """Held until the agent has done it: a name is not forgotten behind who introduced it."""
        ours, theirs = zip(*(socket.socketpair() for _ in range(lanes)), strict=True)
        self._lanes = [Lane(TimedSocket(sock, progress_seconds, clock)) for sock in ours]
        self._idle = list(self._lanes)
        self._freed = threading.Condition(self._lock)
        numbers = [sock.fileno() for sock in theirs]
        mapped = [region.descriptor for region in memory if isinstance(region, HostMemory)]
        specs = ",".join(region.spec() for region in memory)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(os.getpid()), name, specs, *map(str, numbers)],
                pass_fds=[*numbers, *mapped],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
        except OSError as error:
            for lane in self._lanes:
                lane.close()
            raise UnavailableError(f"cannot start a UCX agent: {error}") from None
        finally:
            for sock in theirs:
                sock.close()
        try:
            self.facts = self._lanes[0].await_start(START_SECONDS)
            raw = self._lanes[0].ask(Command.PLACES, b"")
            self._regions = _laid_out(memory, unpack_places(raw, len(memory)), self.facts.base)
        except BaseException:
            self.destroy()
            self.close()
            raise

    @property
    def span_bytes(self) -> int:
        """From the lowest address of its memory to the highest."""
        return max(region.from_base + region.length for region in self._regions)

    def placed(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Local offsets into all regions, one after another, as offsets from the agent's base.

        No segment may cross the border of two regions.
        """
        if len(self._regions) == 1:
            return segments
        starts = [region.start for region in self._regions]
        placed = []
        for segment in segments:
            region = self._regions[bisect_right(starts, segment.local_offset) - 1]
            within = segment.local_offset - region.start
            placed.append(Segment(region.from_base + within, segment.remote_offset, segment.length))
        return placed

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it lives and takes new work."""
        return self._is_whole and self._process.poll() is None

    @property
    def is_unused(self) -> bool:
        return not self._lent

    @property
    def _is_whole(self) -> bool:
        return not (self._is_destroyed or self._is_retired)

    @contextmanager
    def lane(self, seconds: float) -> Iterator[Lane]:
        """Lend a lane. One that comes back with replies to come is not lent again.

        Raises DeadlineError when none is free in time, AgentLostError when the agent is gone.
        """
        with self._lock:
            self._freed.wait_for(lambda: bool(self._idle) or not self._is_whole, max(0.0, seconds))
            if not self._is_whole:
                raise AgentLostError(f"UCX agent {self.name} is to be replaced")
            if not self._idle:
                raise DeadlineError(f"no free lane of UCX agent {self.name} in {seconds:.3f} s")
            lane = self._idle.pop()
            self._lent += 1
        try:
            yield lane
        finally:
            with self._lock:
                self._lent -= 1
                if lane.unanswered:
                    self._spoiled += 1
                    self._is_retired = True
                else:
                    self._idle.append(lane)
                self._freed.notify()

    def introduce(self, metadata: bytes, seconds: float) -> bytes:
        """Make a remote agent known; give its name. `forget` it as often."""
        with self._naming, self.lane(seconds) as lane:
            name = lane.ask(Command.INTRODUCE, metadata)
            self._names[name] += 1
            return name

    def forget(self, name: bytes, seconds: float) -> None:
        with self._naming:
            self._names[name] -= 1
            if self._names[name] > 0:
                return
            del self._names[name]
            with self.lane(seconds) as lane:
                lane.ask(Command.FORGET, name)

    def retire(self) -> None:
        """Take no new work; whoever keeps it destroys it once it is unused."""
        with self._lock:
            self._is_retired = True
            self._freed.notify_all()

    def destroy(self) -> bool:
        """Kill the process; whether it was this call that did. All that use it fail.

        Once `await_end` has returned, no byte of any of its transfers arrives any more.
        """
        with self._lock:
            is_first = not self._is_destroyed
            self._is_destroyed = True
            self._freed.notify_all()
        self._process.kill()
        return is_first

    def await_end(self) -> None:
        """Wait for the killed process: the kernel lets go of its memory before this returns."""
        while True:
            try:
                self._process.wait(END_WARNING_SECONDS)
            except subprocess.TimeoutExpired:  # noqa: PERF203 - the wait must be begun again
                # Whatever holds it in the kernel may still write: its slots stay in quarantine.
                log.error("UCX agent %s (pid %d) does not end after SIGKILL", self.name, self.pid)
            else:
                return

    def close(self) -> None:
        """Destroy and wait. Nobody may use it any more."""
        self.destroy()
        self.await_end()
        for lane in self._lanes:
            lane.close()

    def check_integrity(self) -> None:
        """Assert that each lane is idle or lent."""
        with self._lock:
            assert len(self._idle) + self._lent + self._spoiled == len(self._lanes)
        with self._naming:
            assert all(count > 0 for count in self._names.values())
