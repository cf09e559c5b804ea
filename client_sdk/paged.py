"""Batched copies between an engine's paged KV tensors and slots.

A slot holds one block as `[layer][k|v][token][head][dim]`, contiguous. Pages are an engine's own
blocks: one tensor `[layers, 2, num_pages, page_tokens, heads, dim]`, or a sequence with a tensor
`[2, num_pages, page_tokens, heads, dim]` for each layer. A slot may span several pages: with n
views and m page ids, pages `page_ids[i * m // n : (i + 1) * m // n]` belong to view i, in order.
Copies are of bytes, so every dtype goes; tensors of torch are used in place, on the CPU only.

A page's layers are copied by one call when they lie evenly spaced in memory, as those of one tensor
do and mostly also tensors that were allocated one after the other; else by one call a layer. Each
call lets other threads run, so with an executor several slots are copied at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import InvalidRequestError, LayoutMismatchError

Array = Any
"""A numpy array or a CPU tensor of torch."""
Pages = Any
"""One `Array` of all layers, one `Array` of a single layer, or a sequence of those."""

SHARE_BYTES = 4 << 20
"""About what one task of an executor copies; less is not worth the hand-over."""
_Bytes = npt.NDArray[np.uint8]
_KV_AXIS, _PAGE_AXIS, _LAYER_NDIM = 2, 1, 5


def scatter_into_pages(
    views: Sequence[memoryview],
    pages: Pages,
    page_ids: Sequence[int],
    layer: int | None = None,
    *,
    executor: Executor | None = None,
) -> None:
    """Copy slots into an engine's pages: all layers, or only `layer`.

    Everything is checked before the first byte moves, and nothing moves after the return.

    Args:
        executor: threads to share the slots among, the caller's to own; None copies right here.

    Raises:
        LayoutMismatchError: shapes or sizes of slots and pages do not fit each other.
        InvalidRequestError: a page id or layer out of range, or a page named twice.
    """
    if len(set(page_ids)) != len(page_ids):
        raise InvalidRequestError("a page is named twice; each can take one slot's bytes")
    plan = _plan(views, pages, page_ids, layer)
    if not all(array.flags.writeable for array in plan.arrays):
        raise InvalidRequestError("pages are read-only")

    def copy(moves: Sequence[_Move]) -> None:
        for move in moves:
            for stripe in plan.stripes:
                rows = move.slot[stripe.slot_layers]
                for position, page in enumerate(move.page_ids):
                    stripe.pages[:, :, page] = rows[:, :, position]

    plan.carry_out(copy, executor)


def gather_from_pages(
    pages: Pages,
    page_ids: Sequence[int],
    views: Sequence[memoryview],
    layer: int | None = None,
    *,
    executor: Executor | None = None,
) -> None:
    """Copy an engine's pages into slots: all layers, or only `layer`.

    Checks, arguments and errors are those of `scatter_into_pages`.
    """
    if any(view.readonly for view in views):
        raise InvalidRequestError("a slot's view is read-only; only staged blocks can be written")
    plan = _plan(views, pages, page_ids, layer)

    def copy(moves: Sequence[_Move]) -> None:
        for move in moves:
            for stripe in plan.stripes:
                rows = move.slot[stripe.slot_layers]
                for position, page in enumerate(move.page_ids):
                    rows[:, :, position] = stripe.pages[:, :, page]

    plan.carry_out(copy, executor)


@dataclass(frozen=True, slots=True)
class _Stripe:
    """Layers that lie evenly spaced in memory."""

    pages: _Bytes
    """[layers, 2, num_pages, ...]"""
    slot_layers: slice


@dataclass(frozen=True, slots=True)
class _Move:
    slot: _Bytes
    """[layers, 2, pages of this slot, ...]"""
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    arrays: tuple[_Bytes, ...]
    """The layers' memory, which stripes do not keep alive."""
    stripes: tuple[_Stripe, ...]
    moves: tuple[_Move, ...]

    def carry_out(self, copy: Callable[[Sequence[_Move]], None], executor: Executor | None) -> None:
        if executor is None:
            copy(self.moves)
            return
        per_task = max(1, SHARE_BYTES // self.moves[0].slot.nbytes) if self.moves else 1
        tasks = [
            executor.submit(copy, self.moves[start : start + per_task])
            for start in range(0, len(self.moves), per_task)
        ]
        wait(tasks)  # all of them, also when one raised
        for task in tasks:
            task.result()


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
        return _Plan((), (), ())
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
    moves = tuple(
        _Move(
            np.frombuffer(view, np.uint8).reshape(shape),
            page_ids[i * per_slot : (i + 1) * per_slot],
        )
        for i, view in enumerate(views)
    )
    chosen = arrays if alone or layer is None else arrays[layer : layer + 1]
    return _Plan(chosen, _stripes(chosen, layer or 0), moves)


def _stripes(arrays: Sequence[_Bytes], first_layer: int) -> tuple[_Stripe, ...]:
    """One stripe over all layers where their addresses allow it, else one for each."""
    together = _as_one(arrays)
    if together is not None:
        return (_Stripe(together, slice(first_layer, first_layer + len(arrays))),)
    return tuple(
        _Stripe(array[np.newaxis], slice(first_layer + i, first_layer + i + 1))
        for i, array in enumerate(arrays)
    )


def _as_one(arrays: Sequence[_Bytes]) -> _Bytes | None:
    first = arrays[0]
    addresses = [array.ctypes.data for array in arrays]
    steps = {after - before for before, after in pairwise(addresses)}
    if len(steps) > 1 or any(array.strides != first.strides for array in arrays):
        return None
    # Every address this view can name is one of the arrays' own.
    return np.lib.stride_tricks.as_strided(
        first, (len(arrays), *first.shape), (steps.pop() if steps else 0, *first.strides)
    )


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
