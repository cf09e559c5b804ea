"""The life of an agent process: opens its memory, answers its lanes, dies with its parent."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from client_sdk.page_entries import enter_beside, held_extents
from client_sdk.transport import cuda_ipc
from client_sdk.transport.lane import (
    HEADER_BYTES,
    AgentFacts,
    Command,
    Header,
    Move,
    Reply,
    pack_frame,
    pack_places,
)
from client_sdk.transport.memory import DeviceMemory, HostMemory, Memory, parse_spec
from emberkv_proto.errors import EmberError, UnavailableError

MOVES_AT_ONCE = 4
"""Of one lane. The next is posted while the last one is under way."""
POLL_SECONDS = 50e-6
IDLE_SECONDS = 3600.0
_PR_SET_PDEATHSIG = 1


class MovingAgent(Protocol):
    """What moves the bytes. Belongs to the loop's thread."""

    @property
    def lost(self) -> tuple[type[Exception], ...]:
        """What it raises when a remote agent is gone."""
        ...

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What else it may raise."""
        ...

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of its regions, in their order."""
        ...

    def facts(self) -> AgentFacts: ...

    def introduce(self, metadata: bytes) -> bytes:
        """Know a remote agent, perhaps anew; its name."""
        ...

    def forget(self, name: bytes) -> None: ...

    def post(self, move: Move) -> Any:
        """Begin a move; give its handle."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Raises what the agent's library raises when the move has failed."""
        ...

    def release(self, handle: Any) -> None: ...


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent dies: its next life will own the memory."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class OpenedRegion:
    """A region in this process, and what keeps it there."""

    address: int
    keeps: object


def open_region(region: Memory) -> OpenedRegion:
    """Raises UnavailableError when there is less behind the name than it says, or nothing."""
    if isinstance(region, DeviceMemory):
        return OpenedRegion(cuda_ipc.open_memory(region), None)
    size = os.fstat(region.descriptor).st_size
    if size < region.length:
        raise UnavailableError(f"a file of {size} bytes where {region.length} were announced")
    array = np.frombuffer(mmap.mmap(region.descriptor, region.length), np.uint8)
    return OpenedRegion(int(array.ctypes.data), array)


@dataclass(slots=True)
class _Lane:
    sock: socket.socket
    moves: deque[Any] = field(default_factory=deque)
    """Handles under way, oldest first."""
    is_open: bool = True


class AgentLoop:
    """Serves lanes until the daemon has closed them all."""

    def __init__(self, agent: MovingAgent, lanes: list[socket.socket]) -> None:
        self._agent = agent
        self._lanes = {sock.fileno(): _Lane(sock) for sock in lanes}
        self._poll = select.poll()
        for number in self._lanes:
            self._poll.register(number, select.POLLIN)

    def run(self) -> None:
        while self._lanes:
            is_busy = any(lane.moves for lane in self._lanes.values())
            ready = self._poll.poll(0 if is_busy else IDLE_SECONDS * 1000)
            has_moved = False
            for number, _ in ready:
                lane = self._lanes[number]
                if len(lane.moves) < MOVES_AT_ONCE:
                    self._take(lane)
                    has_moved = True
            for lane in list(self._lanes.values()):
                has_moved |= self._settle(lane)
            if not has_moved and is_busy:
                time.sleep(POLL_SECONDS)

    def _take(self, lane: _Lane) -> None:
        raw = _receive(lane.sock, HEADER_BYTES)
        if raw is None:
            self._poll.unregister(lane.sock)
            del self._lanes[lane.sock.fileno()]
            for handle in lane.moves:
                self._agent.release(handle)
            return
        header = Header.unpack(raw)
        body = _receive(lane.sock, header.body_bytes) or b""
        with self._answering_errors(lane.sock):
            match Command(header.kind):
                case Command.INTRODUCE:
                    name = self._agent.introduce(bytes(body))
                    lane.sock.sendall(pack_frame(Reply.OK, name))
                case Command.FORGET:
                    self._agent.forget(bytes(body))
                    lane.sock.sendall(pack_frame(Reply.OK, b""))
                case Command.PLACES:
                    lane.sock.sendall(pack_frame(Reply.OK, pack_places(self._agent.addresses)))
                case Command.MOVE:
                    lane.moves.append(self._agent.post(Move.unpack(body)))

    def _settle(self, lane: _Lane) -> bool:
        """Answer the moves that have ended; whether there were any."""
        has_ended = False
        while lane.moves:
            with self._answering_errors(lane.sock):
                if not self._agent.is_done(lane.moves[0]):
                    return has_ended
                lane.sock.sendall(pack_frame(Reply.OK, b""))
            has_ended = True
            self._agent.release(lane.moves.popleft())
        return has_ended

    @contextmanager
    def _answering_errors(self, sock: socket.socket) -> Iterator[None]:
        failures: tuple[type[Exception], ...] = (ValueError, EmberError, *self._agent.failures)
        try:
            yield
        except self._agent.lost as error:
            sock.sendall(pack_frame(Reply.LOST, str(error).encode()))
        except failures as error:
            sock.sendall(pack_frame(Reply.FAILED, f"{type(error).__name__}: {error}".encode()))


def prefault(address: int, region: HostMemory) -> None:
    """Take the page faults of what the file holds, before a transfer does. In a thread of its own.

    Holes of the file stay holes.
    """
    with suppress(OSError):  # it could only have been quicker
        extents = held_extents(region.descriptor, region.length)
        enter_beside(address, extents, threading.Event())


def _receive(sock: socket.socket, length: int) -> bytes | None:
    """None when the daemon has closed the lane."""
    raw = b""
    while len(raw) < length:
        piece = sock.recv(length - len(raw))
        if not piece:
            return None
        raw += piece
    return raw


def run_agent(make: Callable[[str, tuple[Memory, ...]], MovingAgent]) -> None:
    """The whole life of the process, by its arguments: PARENT NAME MEMORY LANE..."""
    parent, name, specs, *lane_fds = sys.argv[1:]
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    lanes = [socket.socket(fileno=int(number)) for number in lane_fds]
    try:
        memory = tuple(map(parse_spec, specs.split(",")))
        agent = make(name, memory)
        lanes[0].sendall(pack_frame(Reply.OK, agent.facts().pack()))
        for address, region in zip(agent.addresses, memory, strict=True):
            if isinstance(region, HostMemory):
                threading.Thread(target=prefault, args=(address, region), daemon=True).start()
        AgentLoop(agent, lanes).run()
    except OSError:
        os._exit(0)  # the parent is gone
    except Exception as error:
        # Whatever its library raised, the parent learns why it has no agent.
        with suppress(OSError):
            lanes[0].sendall(pack_frame(Reply.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    os._exit(0)  # at once, with everything under way
