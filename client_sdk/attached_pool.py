"""The mapped pool, and batched copies between an engine's paged KV tensors and slots.

A slot holds one block as `[layer][k|v][token][head][dim]`, contiguous. Pages are an engine's own
blocks: one tensor `[layers, 2, num_pages, page_tokens, heads, dim]`, or a sequence with a tensor
`[2, num_pages, page_tokens, heads, dim]` for each layer. A slot may span several pages: with n
views and m page ids, pages `page_ids[i * m // n : (i + 1) * m // n]` belong to view i, in order.
Copies are of bytes, so every dtype goes; tensors of torch are used in place, on the CPU only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import InvalidRequestError, LayoutMismatchError, UnavailableError

Array = Any
"""A numpy array or a CPU tensor of torch."""
Pages = Any
"""One `Array` of all layers, one `Array` of a single layer, or a sequence of those."""

PREFAULT_CHUNK_BYTES = 64 << 20
"""How much is mapped by one system call, so that a deadline is kept."""
_MADV_POPULATE_WRITE = 23
PIN_CHUNK_BYTES = 64 << 30
"""The most that is registered with CUDA by one call."""
_Bytes = npt.NDArray[np.uint8]
_KV_AXIS, _PAGE_AXIS, _LAYER_NDIM = 2, 1, 5


class AttachedPool:
    """The daemon's pool file as this process maps it.

    The mapping lives until the last view of it is gone, so a view never dangles, not even after
    the daemon went away: what ends is the right to use it (see `Lease.is_valid`).
    """

    def __init__(self, descriptor: int, pool_bytes: int, part_bytes: int) -> None:
        """Map the file; the descriptor stays the caller's to close.

        Raises:
            UnavailableError: the file is shorter than announced, or cannot be mapped.
        """
        size = os.fstat(descriptor).st_size
        if not 0 < part_bytes <= pool_bytes <= size:
            raise UnavailableError(
                f"pool file has {size} bytes, the daemon announced {pool_bytes} with blocks of"
                f" {part_bytes}; was the file truncated? Restart the daemon"
            )
        try:
            mapped = mmap.mmap(descriptor, pool_bytes)
        except OSError as error:
            raise UnavailableError(
                f"pool of {pool_bytes} bytes cannot be mapped: {error}"
            ) from None
        self.pool_bytes = pool_bytes
        self.part_bytes = part_bytes
        self._bytes = memoryview(mapped)
        self._pinned: list[_PinnedChunk] = []

    def holds(self, offset: int) -> bool:
        """Whether one part at `offset` lies within the pool."""
        return 0 <= offset <= self.pool_bytes - self.part_bytes

    def holds_all(self, offsets: Sequence[int]) -> bool:
        """`holds` for each of many."""
        return not offsets or (min(offsets) >= 0 and self.holds(max(offsets)))

    def writable(self, offset: int) -> memoryview:
        """The part's bytes at `offset`. Raises InvalidRequestError outside the pool."""
        if not self.holds(offset):
            raise InvalidRequestError(f"offset {offset} is outside the pool of {self.pool_bytes}")
        return self._bytes[offset : offset + self.part_bytes]

    def readable(self, offset: int) -> memoryview:
        """As `writable`, but read-only."""
        return self.writable(offset).toreadonly()

    def prefault(self, deadline: float) -> int:
        """Enter the pool's pages into this process's page tables; return how many bytes.

        A first copy into a fresh mapping takes a page fault for each 4 KiB, about half a second a
        GiB. Call it from a thread that has the time; others may use the pool meanwhile. Ends at
        `deadline` (monotonic seconds), with 0 on a kernel before 5.14. A file that the daemon has
        not populated takes its memory by this.
        """
        base = int(np.frombuffer(self._bytes, np.uint8).ctypes.data)
        # mmap.madvise would keep the interpreter lock all the while; ctypes does not.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        done = 0
        while done < self.pool_bytes and time.monotonic() < deadline:
            length = min(PREFAULT_CHUNK_BYTES, self.pool_bytes - done)
            if madvise(base + done, length, _MADV_POPULATE_WRITE):
                break
            done += length
        return done

    def pin(self) -> None:
        """Register the pool with CUDA, so that copies to and from a GPU need no bounce buffer.

        Needs torch with CUDA, imported by the caller. Not yet verified on a GPU.

        Raises:
            UnavailableError: no CUDA here, or the driver refuses.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise UnavailableError("pinning needs torch with CUDA; none is loaded in this process")
        cudart = torch.cuda.cudart()
        base = int(np.frombuffer(self._bytes, np.uint8).ctypes.data)
        for start in range(0, self.pool_bytes, PIN_CHUNK_BYTES):
            chunk = _PinnedChunk(base + start, min(PIN_CHUNK_BYTES, self.pool_bytes - start))
            status = int(cudart.cudaHostRegister(chunk.address, chunk.length, 0))
            if status:
                self.unpin()
                raise UnavailableError(
                    f"cudaHostRegister of {chunk.length} bytes failed with status {status};"
                    " raise the memory lock limit (ulimit -l)"
                )
            self._pinned.append(chunk)

    def unpin(self) -> None:
        """Undo `pin`; to be called before the last view goes."""
        while self._pinned:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(self._pinned.pop().address)


@dataclass(frozen=True, slots=True)
class _PinnedChunk:
    address: int
    length: int


def scatter_into_pages(
    views: Sequence[memoryview], pages: Pages, page_ids: Sequence[int], layer: int | None = None
) -> None:
    """Copy slots into an engine's pages: all layers, or only `layer`.

    Everything is checked before the first byte moves.

    Raises:
        LayoutMismatchError: shapes or sizes of slots and pages do not fit each other.
        InvalidRequestError: a page id or layer out of range, or a page named twice.
    """
    if len(set(page_ids)) != len(page_ids):
        raise InvalidRequestError("a page is named twice; each can take one slot's bytes")
    plan = _plan(views, pages, page_ids, layer)
    for target in plan.layers:
        if not target.pages.flags.writeable:
            raise InvalidRequestError("pages are read-only")
    for move in plan.moves:
        for target in plan.layers:
            rows = move.slot[target.slot_layer]
            for position, page in enumerate(move.page_ids):
                target.pages[:, page] = rows[:, position]


def gather_from_pages(
    pages: Pages, page_ids: Sequence[int], views: Sequence[memoryview], layer: int | None = None
) -> None:
    """Copy an engine's pages into slots: all layers, or only `layer`.

    Everything is checked before the first byte moves. Raises as `scatter_into_pages` does.
    """
    if any(view.readonly for view in views):
        raise InvalidRequestError("a slot's view is read-only; only staged blocks can be written")
    plan = _plan(views, pages, page_ids, layer)
    for move in plan.moves:
        for source in plan.layers:
            rows = move.slot[source.slot_layer]
            for position, page in enumerate(move.page_ids):
                rows[:, position] = source.pages[:, page]


@dataclass(frozen=True, slots=True)
class _Layer:
    pages: _Bytes
    """[2, num_pages, ...]"""
    slot_layer: int


@dataclass(frozen=True, slots=True)
class _Move:
    slot: _Bytes
    """[layers, 2, pages of this slot, ...]"""
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    layers: tuple[_Layer, ...]
    moves: tuple[_Move, ...]


def _plan(
    views: Sequence[memoryview], pages: Pages, page_ids: Sequence[int], layer: int | None
) -> _Plan:
    arrays = _layer_arrays(pages)
    alone = not isinstance(pages, (list, tuple)) and _ndim(pages) == _LAYER_NDIM
    first = arrays[0]
    if any(other.shape != first.shape for other in arrays):
        raise LayoutMismatchError("layers differ in shape; their blocks cannot share a slot")
    if not views:
        if len(page_ids):
            raise LayoutMismatchError(f"{len(page_ids)} pages were named for no slots")
        return _Plan((), ())
    per_slot, rest = divmod(len(page_ids), len(views))
    if rest or not per_slot:
        raise LayoutMismatchError(f"{len(page_ids)} pages do not divide over {len(views)} slots")
    if min(page_ids) < 0 or max(page_ids) >= first.shape[_PAGE_AXIS]:
        raise InvalidRequestError(f"a page id is not in 0..{first.shape[_PAGE_AXIS] - 1}")
    layer_bytes = _KV_AXIS * per_slot * int(np.prod(first.shape[2:]))
    layers = _slot_layers(views, layer_bytes, None if alone else len(arrays))
    if alone and layer is None and layers != 1:
        raise InvalidRequestError("pages of a single layer need `layer` to say which one")
    if layer is not None and not 0 <= layer < layers:
        raise InvalidRequestError(f"layer {layer} is not in 0..{layers - 1}")
    shape = (layers, 2, per_slot, *first.shape[2:])
    numbers = range(layers) if layer is None else (layer,)
    chosen = tuple(_Layer(first if alone else arrays[number], number) for number in numbers)
    moves = tuple(
        _Move(
            np.frombuffer(view, np.uint8).reshape(shape),
            page_ids[i * per_slot : (i + 1) * per_slot],
        )
        for i, view in enumerate(views)
    )
    return _Plan(chosen, moves)


def _slot_layers(views: Sequence[memoryview], layer_bytes: int, known: int | None) -> int:
    """How many layers a slot holds, from its size."""
    for view in views:
        layers, rest = divmod(view.nbytes, layer_bytes)
        if rest or not layers or (known is not None and layers != known):
            wanted = f"{known} layers" if known is not None else "whole layers"
            raise LayoutMismatchError(
                f"slot of {view.nbytes} bytes does not hold {wanted} of {layer_bytes} bytes;"
                " dtype, heads, head_dim or tokens differ from the namespace's"
            )
    if len({view.nbytes for view in views}) > 1:
        raise LayoutMismatchError("slots differ in size")
    return views[0].nbytes // layer_bytes


def _layer_arrays(pages: Pages) -> tuple[_Bytes, ...]:
    if isinstance(pages, (list, tuple)):
        arrays = tuple(_as_bytes(array) for array in pages)
        dtypes = {str(array.dtype) for array in pages}
        if len(dtypes) > 1:
            raise LayoutMismatchError(f"layers differ in dtype: {', '.join(sorted(dtypes))}")
    elif _ndim(pages) == _LAYER_NDIM + 1:
        arrays = tuple(_as_bytes(pages))
    else:
        arrays = (_as_bytes(pages),)
    if not arrays or any(a.ndim != _LAYER_NDIM or a.shape[0] != _KV_AXIS for a in arrays):
        raise LayoutMismatchError("pages must be [2, num_pages, page_tokens, heads, dim] per layer")
    return arrays


def _ndim(array: Array) -> int:
    return int(array.ndim)


def _as_bytes(array: Array) -> _Bytes:
    """The same memory as bytes, the last axis widened. Refuses what would need a copy."""
    if array.ndim < 1 or array.shape[-1] == 0:
        raise LayoutMismatchError("pages have no elements")
    if isinstance(array, np.ndarray):
        if array.strides[-1] != array.itemsize and array.shape[-1] != 1:
            raise LayoutMismatchError("the last axis of the pages must be contiguous")
        return array.view(np.uint8)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise LayoutMismatchError(f"pages of type {type(array).__name__} are not supported")
    if array.device.type != "cpu":
        raise LayoutMismatchError(f"pages are on {array.device}; copy them to the CPU first")
    if array.stride(-1) != 1:
        raise LayoutMismatchError("the last axis of the pages must be contiguous")
    widened: _Bytes = array.detach().view(torch.uint8).numpy()
    return widened
