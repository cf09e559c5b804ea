"""A UCX agent, a process of its own: `python -m ...ucx_agent PARENT NAME MEMORY LANE...`.

UCX ends the process it lives in when it meets what it did not expect, and cannot take back bytes
that are under way. So it lives here and not in the daemon: that a transfer was given up becomes
certain by killing this process. It opens the regions of MEMORY, registers them with NIXL once and
answers commands (lane.py) on the sockets LANE..., all in one thread beside NIXL's own.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib import import_module
from typing import Any

from client_sdk.transport.agent_loop import open_region, run_agent
from client_sdk.transport.lane import (
    AgentFacts,
    Direction,
    Move,
)
from client_sdk.transport.memory import HOST, Memory, check_memory
from emberkv_proto.errors import UnavailableError

nixl: Any = import_module("nixl_cu12._bindings")  # its Python layer fixes the delay below at 0

PROGRESS_DELAY_MICROSECONDS = 100
"""Between two looks of NIXL's thread. Without it, it spins on a whole core."""
_UCP_FEATURE_RMA = 2
_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(nixl, name) for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error")
)


class MemoryAgent:
    """Implements `agent_loop.MovingAgent` with NIXL: its memory is registered once."""

    lost: tuple[type[Exception], ...] = (nixl.nixlRemoteDisconnectError,)
    failures = _NIXL_ERRORS

    def __init__(self, name: str, memory: tuple[Memory, ...]) -> None:
        self._place = check_memory(memory)
        self._opened = [open_region(region) for region in memory]
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


if __name__ == "__main__":
    run_agent(MemoryAgent)
