"""Memory that an agent process works on: whole files that it maps, or another process's GPU memory.

Both are named so that a process which has neither allocated them nor inherited them can open them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from emberkv_proto.errors import FrameError, InvalidRequestError

HOST = 0
"""As a `place` of memory; n + 1 is CUDA device n."""
IPC_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A file of `length` bytes behind a descriptor, mapped whole."""

    descriptor: int
    length: int

    @property
    def place(self) -> int:
        return HOST

    def spec(self) -> str:
        return f"host:{self.descriptor}:{self.length}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`length` bytes from `offset` of an allocation on a GPU, by its CUDA IPC handle."""

    device: int
    handle: bytes
    offset: int
    length: int

    @property
    def place(self) -> int:
        return self.device + 1

    def spec(self) -> str:
        return f"cuda:{self.device}:{self.handle.hex()}:{self.offset}:{self.length}"


Memory: TypeAlias = HostMemory | DeviceMemory


def parse_spec(text: str) -> Memory:
    """What `spec` wrote. Raises FrameError."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "host":
            descriptor, length = map(int, rest.split(":"))
            return HostMemory(descriptor, length)
        if kind == "cuda":
            device, handle, offset, length_text = rest.split(":")
            return DeviceMemory(int(device), bytes.fromhex(handle), int(offset), int(length_text))
    except ValueError:
        pass  # told below, with the text
    raise FrameError(f"{text!r} names no memory")


def check_memory(memory: tuple[Memory, ...]) -> int:
    """The one place where all of it is. Raises InvalidRequestError when it is none or several."""
    places = {region.place for region in memory}
    if len(places) != 1 or not all(region.length > 0 for region in memory):
        raise InvalidRequestError(
            "memory for an agent is one region or more, none of them empty, all on the host or all"
            " on one GPU"
        )
    return places.pop()
