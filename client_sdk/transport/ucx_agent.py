"""A UCX agent, a process of its own: `python -m ...ucx_agent PARENT NAME MEMORY LANE...`.

UCX ends the process it lives in when it meets what it did not expect, and cannot take back bytes
that are under way. So it lives here and not in the daemon: that a transfer was given up becomes
certain by killing this process. It opens the regions of MEMORY, registers them with NIXL once and
answers commands (lane.py) on the sockets LANE..., all in one thread beside NIXL's own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from client_sdk.transport import cuda_ipc
from client_sdk.transport.lane import (
    HEADER_BYTES,
    AgentFacts,
    Command,
    Direction,
    Header,
    Move,
    Reply,
    pack_frame,
    pack_places,
)
from client_sdk.transport.memory import HOST, DeviceMemory, Memory, check_memory, parse_spec
from emberkv_proto.errors import EmberError, UnavailableError

nixl: Any = import_module("nixl_cu12._bindings")  # its Python layer fixes the delay below at 0

PROGRESS_DELAY_MICROSECONDS = 100
"""Between two looks of NIXL's thread. Without it, it spins on a whole core."""
MOVES_AT_ONCE = 4
"""Of one lane. The next is posted while the last one is under way."""
POLL_SECONDS = 50e-6
IDLE_SECONDS = 3600.0
_PR_SET_PDEATHSIG = 1
_UCP_FEATURE_RMA = 2
_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(nixl, name) for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error")
)
_FAILURES: tuple[type[Exception], ...] = (*_NIXL_ERRORS, ValueError, EmberError)


def die_with(parent: int) -> None:
    """Be killed by the kernel when the daemon dies: its next life will own the pool."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class MemoryAgent:
    """A NIXL agent with its memory registered. Belongs to one thread."""

    def __init__(self, name: str, memory: tuple[Memory, ...]) -> None:
        self._place = check_memory(memory)
        self._opened = [_open(region) for region in memory]
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_MICROSECONDS
        self._agent: Any = nixl.nixlAgent(name, config)
        options, _ = self._agent.getPluginParams("UCX")
        try:
            self._backends = [self._agent.createBackend("UCX", dict(options))]
        except _NIXL_ERRORS as error:
            given = [
                f"{n}={os.environ[n]}" for n in ("UCX_TLS", "UCX_NET_DEVICES") if n in os.environ
            ]
            raise UnavailableError(
                f"{error}; with {' '.join(given)} it finds only {' '.join(ucx_transports())}"
            ) from None
        self.addresses = tuple(opened.address for opened in self._opened)
        rows = [
            (address, region.length, _device(self._place), "")
            for address, region in zip(self.addresses, memory, strict=True)
        ]
        self._agent.registerMem(nixl.nixlRegDList(_kind(self._place), rows), self._backends)

    def facts(self) -> AgentFacts:
        return AgentFacts(min(self.addresses), ucx_transports(), self._agent.getLocalMD())

    def introduce(self, metadata: bytes) -> bytes:
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name

    def forget(self, name: bytes) -> None:
        with suppress(nixl.nixlNotFoundError):  # UCX drops those that went away
            self._agent.invalidateRemoteMD(name.decode())

    def post(self, move: Move) -> Any:
        """Begin a move; give its handle."""
        here, there = _device(self._place), _device(move.remote_place)
        local = [(r.local, r.length, here) for r in move.ranges]
        remote = [(r.remote, r.length, there) for r in move.ranges]
        handle = self._agent.createXferReq(
            nixl.NIXL_READ if move.direction is Direction.READ else nixl.NIXL_WRITE,
            nixl.nixlXferDList(_kind(self._place), local),
            nixl.nixlXferDList(_kind(move.remote_place), remote),
            move.remote_name.decode(),
            b"",
            self._backends,
        )
        try:
            self._agent.postXferReq(handle, b"")
        except BaseException:
            self._agent.releaseXferReq(handle)
            raise
        return handle

    def is_done(self, handle: Any) -> bool:
        """Raises what NIXL raises when the move has failed."""
        return bool(self._agent.getXferStatus(handle) == nixl.NIXL_SUCCESS)

    def release(self, handle: Any) -> None:
        with suppress(*_NIXL_ERRORS):  # of a move that failed or cannot be cancelled
            self._agent.releaseXferReq(handle)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A region in this process, and what keeps it there."""

    address: int
    keeps: object


def _open(region: Memory) -> _Opened:
    """Raises UnavailableError when there is less behind the name than it says, or nothing."""
    if isinstance(region, DeviceMemory):
        return _Opened(cuda_ipc.open_memory(region), None)
    size = os.fstat(region.descriptor).st_size
    if size < region.length:
        raise UnavailableError(f"a file of {size} bytes where {region.length} were announced")
    array = np.frombuffer(mmap.mmap(region.descriptor, region.length), np.uint8)
    return _Opened(int(array.ctypes.data), array)


def _kind(place: int) -> Any:
    return nixl.DRAM_SEG if place == HOST else nixl.VRAM_SEG


def _device(place: int) -> int:
    return max(0, place - 1)


def ucx_transports() -> tuple[str, ...]:
    """What UCX can use with the environment as it is, as "tcp/eth0"."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libucp" in line}
    if not paths:
        raise UnavailableError("NIXL has loaded no UCX")
    ucp, libc = ctypes.CDLL(paths.pop()), ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    configuration, context, text = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
    size, version = ctypes.c_size_t(), [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    if ucp.ucp_config_read(None, None, ctypes.byref(configuration)):
        raise UnavailableError("UCX cannot read its configuration")
    parameters = (ctypes.c_uint64 * 64)()  # ucp_params_t: field mask, features; nothing else asked
    parameters[0], parameters[1] = 1, _UCP_FEATURE_RMA
    failed = ucp.ucp_init_version(
        version[0], version[1], parameters, configuration, ctypes.byref(context)
    )
    ucp.ucp_config_release(configuration)
    if failed:
        raise UnavailableError("UCX finds no transport; see UCX_TLS and UCX_NET_DEVICES")
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    ucp.ucp_cleanup(context)
    lines = (text.value or b"").decode(errors="replace").splitlines()
    libc.free(text)
    return tuple(line.split()[-1] for line in lines if " resource " in line)


@dataclass(slots=True)
class _Lane:
    sock: socket.socket
    moves: deque[Any] = field(default_factory=deque)
    """Handles under way, oldest first."""
    is_open: bool = True


class AgentLoop:
    """Serves lanes until the daemon has closed them all."""

    def __init__(self, agent: MemoryAgent, lanes: list[socket.socket]) -> None:
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
        with _answering_errors(lane.sock.sendall):
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
            with _answering_errors(lane.sock.sendall):
                if not self._agent.is_done(lane.moves[0]):
                    return has_ended
                lane.sock.sendall(pack_frame(Reply.OK, b""))
            has_ended = True
            self._agent.release(lane.moves.popleft())
        return has_ended


@contextmanager
def _answering_errors(send: Callable[[bytes], None]) -> Iterator[None]:
    try:
        yield
    except nixl.nixlRemoteDisconnectError as error:
        send(pack_frame(Reply.LOST, str(error).encode()))
    except _FAILURES as error:
        send(pack_frame(Reply.FAILED, f"{type(error).__name__}: {error}".encode()))


def _receive(sock: socket.socket, length: int) -> bytes | None:
    """None when the daemon has closed the lane."""
    raw = b""
    while len(raw) < length:
        piece = sock.recv(length - len(raw))
        if not piece:
            return None
        raw += piece
    return raw


def main() -> None:
    parent, name, specs, *lane_fds = sys.argv[1:]
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which ends us
    lanes = [socket.socket(fileno=int(number)) for number in lane_fds]
    try:
        agent = MemoryAgent(name, tuple(map(parse_spec, specs.split(","))))
        lanes[0].sendall(pack_frame(Reply.OK, agent.facts().pack()))
        AgentLoop(agent, lanes).run()
    except OSError:
        os._exit(0)  # the daemon is gone
    except _FAILURES as error:
        with suppress(OSError):
            lanes[0].sendall(pack_frame(Reply.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    os._exit(0)  # at once, with everything UCX still has under way


if __name__ == "__main__":
    main()
