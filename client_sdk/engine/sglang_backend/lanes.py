"""A host pool's pages as memory: the lanes of each page, copied to and from the store's slots.

A lane is a run of bytes of one page. In a slot all lanes of a page follow each other, keys before
values, which is also what SGLang calls a flat page: both kinds of its calls meet the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from client_sdk.engine.weights import UnsupportedEngineError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Region:
    """One tensor of the pool."""

    base: int
    array: Bytes

    def holds(self, address: int, length: int) -> bool:
        return self.base <= address and address + length <= self.base + len(self.array)


class HostPages:
    """The pages of one host pool, which must outlive this."""

    def __init__(self, pool: Any, *, is_mla: bool) -> None:
        """Raises UnsupportedEngineError when the pool's memory is not what we can copy."""
        self._pool = pool
        self._page_tokens = int(pool.page_size)
        self._is_interleaved = pool.layout == "layer_first" and not is_mla
        """Whether the pool names keys and values in turn, layer by layer."""
        buffers = _buffers(pool)
        self._regions = [_Region(buffer.data_ptr(), bytes_of(buffer)) for buffer in buffers]
        self.page_bytes = 0
        first = next(self.lanes(_first_page(self._page_tokens), 1))
        self.page_bytes = sum(map(len, first))

    def lanes(self, indices: Any, pages: int) -> Iterator[list[Bytes]]:
        """For each page its lanes, in the order of a slot.

        Args:
            indices: SGLang's host indices, one for each token.

        Raises:
            UnsupportedEngineError: not so many pages, or they are not within the pool.
        """
        if len(indices) != pages * self._page_tokens:
            raise UnsupportedEngineError(f"{len(indices)} host indices for {pages} pages")
        addresses, lengths = self._pool.get_page_buffer_meta(indices)
        count, rest = divmod(len(addresses), pages)
        if rest or len(lengths) != len(addresses) or not count:
            raise UnsupportedEngineError(f"{len(addresses)} lanes for {pages} pages")
        for first in range(0, len(addresses), count):
            lanes = [
                self._lane(int(addresses[n]), int(lengths[n])) for n in range(first, first + count)
            ]
            if self.page_bytes and sum(map(len, lanes)) != self.page_bytes:
                raise UnsupportedEngineError("a page has another size than the first one")
            yield lanes[0::2] + lanes[1::2] if self._is_interleaved else lanes

    def _lane(self, address: int, length: int) -> Bytes:
        for region in self._regions:
            if region.holds(address, length):
                start = address - region.base
                return region.array[start : start + length]
        raise UnsupportedEngineError("a page lies outside the host pool")


def write_slot(lanes: Sequence[Bytes], slot: memoryview) -> None:
    """Copy a page into its slot."""
    target, start = np.frombuffer(slot, np.uint8), 0
    for lane in lanes:
        np.copyto(target[start : start + len(lane)], lane)
        start += len(lane)


def read_slot(slot: memoryview, lanes: Sequence[Bytes]) -> None:
    """Copy a slot into its page."""
    source, start = np.frombuffer(slot, np.uint8), 0
    for lane in lanes:
        np.copyto(lane, source[start : start + len(lane)])
        start += len(lane)


def bytes_of(tensor: Any) -> Bytes:
    """The memory of a tensor, of whatever dtype; it must outlive the array.

    Raises:
        UnsupportedEngineError: it is not on the host, or not in one run.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UnsupportedEngineError("the tensor is not contiguous memory of the host")
    length = tensor.numel() * tensor.element_size()
    if not length:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(tensor.data_ptr()))


def _buffers(pool: Any) -> list[Any]:
    buffer = getattr(pool, "kv_buffer", None)
    if buffer is None:
        raise UnsupportedEngineError("the host pool has no memory of its own")
    return list(buffer) if isinstance(buffer, list | tuple) else [buffer]


def _first_page(page_tokens: int) -> Any:
    import torch

    return torch.arange(page_tokens)
