"""KV tensors of an engine, on the host or a GPU, as memory that `RemotePool` registers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from client_sdk.remote_client import Piece
from client_sdk.transport import cuda_ipc
from client_sdk.transport.memory import HostMemory, Memory
from emberkv_proto.errors import InvalidRequestError, UnavailableError


@dataclass(frozen=True, slots=True)
class _Stored:
    """A storage behind one or more tensors, and where it begins among all regions."""

    storage: torch.UntypedStorage
    start: int

    @property
    def address(self) -> int:
        return self.storage.data_ptr()

    @property
    def length(self) -> int:
        return self.storage.nbytes()


class TensorMemory:
    """Whole storages of tensors. Register it with `RemotePool(memory.regions)`.

    A host tensor moves into shared memory by this, as by `Tensor.share_memory_`; all its views
    follow. A GPU tensor stays where it is; it must not come from expandable segments (unverified:
    docs/rdma.md). The tensors must live as long as the pool.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises InvalidRequestError: none, or on different devices; UnavailableError: not shared.

        Args:
            tensors: what blocks' pieces may lie in; several on one storage count once.
        """
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise InvalidRequestError(f"tensors on one device are wanted, not on {devices}")
        self.device = devices.pop()
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidRequestError(f"tensors on {self.device} cannot be registered")
        self._stored: list[_Stored] = []
        regions: list[Memory] = []
        start = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if any(known.address == storage.data_ptr() for known in self._stored):
                continue
            regions.append(_share(storage, self.device))
            stored = _Stored(storage, start)
            self._stored.append(stored)
            start += stored.length
        self.regions = tuple(regions)

    @property
    def view(self) -> memoryview | None:
        """The memory as this process sees it: of one storage on the host, else None."""
        if self.device.type != "cpu" or len(self._stored) != 1:
            return None
        stored = self._stored[0]
        array = (ctypes.c_uint8 * stored.length).from_address(stored.address)
        return memoryview(array).cast("B")

    def piece(self, tensor: torch.Tensor) -> Piece:
        """Where a contiguous view of one of the tensors lies.

        Raises InvalidRequestError: it is not contiguous, empty, or of another memory.
        """
        length = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or not length:
            raise InvalidRequestError("a piece is a contiguous view of some bytes")
        address = tensor.data_ptr()
        for stored in self._stored:
            if stored.address <= address and address + length <= stored.address + stored.length:
                return Piece(stored.start + address - stored.address, length)
        raise InvalidRequestError("the tensor lies in no registered memory")

    def settle(self) -> None:
        """Wait for what the device still writes. Before `put`, and before pieces are reused."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _share(storage: torch.UntypedStorage, device: torch.device) -> Memory:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return cuda_ipc.export(storage.data_ptr(), storage.nbytes(), index)
    try:
        descriptor, length = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise UnavailableError(f"the tensor cannot be moved into shared memory: {error}") from None
    return HostMemory(descriptor, length)
