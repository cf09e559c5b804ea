"""The device that an engine's pages are on: points in its work, and copies beside that work.

On the host a copy is over when its call returns, and nothing is to be waited for. On CUDA copies
run on streams of their own, so that they wait for no kernel of the engine's but those that a fence
names, and no kernel waits for them. What of torch.cuda is used comes in from outside: tests record
it, and nothing else of the path for GPUs is left out on a CPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from client_sdk.engine.weights import UnsupportedEngineError
from client_sdk.pinning import HostRegistry
from emberkv_proto.errors import UnavailableError

# A leased view is read-only, and torch has no read-only tensors: it is only ever copied from.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the device's work. `wait` returns once the device has got there."""

    wait: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pages of the engine, evenly spaced, and evenly spaced places in the host's memory for them.

    All within their memory: what is not, a copy refuses with a ValueError or RuntimeError.
    """

    rows: torch.Tensor
    """`[num_pages, bytes of a page]`."""
    pages: range
    memory: npt.NDArray[np.uint8]
    offsets: range


class CopyQueue(Protocol):
    """Copies of one thread."""

    def save(self, stretch: Stretch) -> None:
        """Within `open`: begin to copy pages to their places."""
        ...

    def load(self, stretch: Stretch) -> None:
        """Within `open`: begin to copy pages from their places."""
        ...

    def open(self) -> AbstractContextManager[None]:
        """Copies begun within it are over when it is left, however it is left."""
        ...

    def finish(self) -> None:
        """Within `open`: return once the copies begun so far are over."""
        ...


class Device(Protocol):
    """Where the engine's pages are."""

    @property
    def registry(self) -> HostRegistry | None:
        """Pins the pool for its copies; None where there is nothing to gain."""
        ...

    def fence(self) -> Fence:
        """The work queued so far: pages it reads may be written, those it writes read, after it.

        For the thread that queues the engine's work.
        """
        ...

    def queue(self) -> CopyQueue:
        """A new one, for one thread."""
        ...


class HostDevice:
    """Pages in the host's memory."""

    registry: HostRegistry | None = None

    def fence(self) -> Fence:
        return Fence()

    def queue(self) -> CopyQueue:
        return _HostQueue()


class _HostQueue:
    """Copies by numpy: without the interpreter lock, and by this thread alone.

    For copies of this size torch would take a team of OpenMP threads, beside the team that computes
    the model.
    """

    def open(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def save(self, stretch: Stretch) -> None:
        np.copyto(self._places(stretch), self._pages(stretch))

    def load(self, stretch: Stretch) -> None:
        np.copyto(self._pages(stretch), self._places(stretch))

    def _pages(self, stretch: Stretch) -> npt.NDArray[np.uint8]:
        pages = stretch.pages
        every: npt.NDArray[np.uint8] = stretch.rows.numpy()
        rows = every[pages.start : pages.stop if pages.stop >= 0 else None : pages.step]
        if len(rows) != len(pages):  # a single row would be copied into all places
            raise ValueError(f"of the pages {pages} the engine has {len(rows)}")
        return rows

    def _places(self, stretch: Stretch) -> npt.NDArray[np.uint8]:
        shape = (len(stretch.offsets), stretch.rows.shape[1])
        strides = (stretch.offsets.step, 1)
        return np.ndarray(shape, np.uint8, stretch.memory, stretch.offsets.start, strides)

    def finish(self) -> None:
        pass


class CudaDevice:
    """Pages in a GPU's memory. `cuda` is torch.cuda. Not yet verified on a GPU."""

    def __init__(self, index: int, cuda: Any) -> None:
        self.registry: HostRegistry | None = CudaRegistry(index, cuda)
        self._index = index
        self._cuda = cuda

    def fence(self) -> Fence:
        event = self._cuda.Event(blocking=True)  # a waiting thread sleeps, and spins on no core
        event.record()
        return Fence(event.synchronize)

    def queue(self) -> CopyQueue:
        return _CudaQueue(self._index, self._cuda)


class _CudaQueue:
    def __init__(self, index: int, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream(device=index)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self._cuda.stream(self._stream):
            try:
                yield
            finally:
                self.finish()

    def save(self, stretch: Stretch) -> None:
        for page, place in self._pairs(stretch):
            place.copy_(page, non_blocking=True)

    def load(self, stretch: Stretch) -> None:
        for page, place in self._pairs(stretch):
            page.copy_(place, non_blocking=True)

    def _pairs(self, stretch: Stretch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # One by one: torch sends what has gaps through memory of its own, and waits for it.
        memory, width = torch.from_numpy(stretch.memory), stretch.rows.shape[1]
        for page, offset in zip(stretch.pages, stretch.offsets, strict=True):
            yield stretch.rows[page], memory[offset : offset + width]

    def finish(self) -> None:
        event = self._cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


class CudaRegistry:
    """cudaHostRegister, in the context of one device."""

    def __init__(self, index: int, cuda: Any) -> None:
        self._index = index
        self._cuda = cuda

    def register(self, address: int, length: int) -> None:
        """Raises UnavailableError when the driver refuses."""
        with self._cuda.device(self._index):  # else a thread's first call is for device 0
            status = int(self._cuda.cudart().cudaHostRegister(address, length, 0))
        if status:
            raise UnavailableError(
                f"cudaHostRegister of {length} bytes failed with status {status};"
                " raise the memory lock limit (ulimit -l)"
            )

    def unregister(self, address: int) -> None:
        """Raises UnavailableError when the driver refuses."""
        with self._cuda.device(self._index):
            status = int(self._cuda.cudart().cudaHostUnregister(address))
        if status:
            raise UnavailableError(f"cudaHostUnregister failed with status {status}")


def device_of(tensor: torch.Tensor) -> Device:
    """Where a tensor is. Raises UnsupportedEngineError for a kind of device that we do not know."""
    device = tensor.device
    if device.type == "cpu":
        return HostDevice()
    if device.type != "cuda":
        raise UnsupportedEngineError(f"pages on {device.type} devices are not cached yet")
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(index, torch.cuda)
