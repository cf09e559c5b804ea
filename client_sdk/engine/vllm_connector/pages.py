"""The engine's pages as bytes, and copies between them and the store's slots.

Works on any device that torch copies to and from; on CUDA a copy is queued on the current stream,
and `finish` waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from client_sdk.engine.vllm_connector.identity import PageGroup
from client_sdk.engine.weights import UnsupportedEngineError

# A leased view is read-only, and torch has no read-only tensors: it is only ever copied from.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `[start, start + n)` of a layer's page: `[num_pages, n]`."""

    start: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in the device's work; None on the host, where work is over when a call returns."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Return once the device has got there."""
        if self.event is not None:
            self.event.synchronize()


class EnginePages:
    """All pages of a group's layers.

    `slot` is the payload of a block's part: layer after layer, its pages in order.
    """

    def __init__(self, caches: dict[str, torch.Tensor], group: PageGroup, num_pages: int) -> None:
        """Raises UnsupportedEngineError when a layer's tensor is not made of such pages."""
        self.group = group
        self._layers = [_runs(name, caches, group, num_pages) for name in group.layer_names]
        self.is_on_host = self._layers[0][0].pages.device.type == "cpu"

    def save(self, pages: Sequence[int], slot: memoryview) -> None:
        """Copy a block's pages of every layer into its slot."""
        rows = self._rows(slot)
        for layer, runs in enumerate(self._layers):
            for run in runs:
                width = run.pages.shape[1]
                for number, page in enumerate(pages):
                    target = rows[layer, number, run.start : run.start + width]
                    target.copy_(run.pages[page], non_blocking=True)

    def load(self, layer: int, slot: memoryview, first: int, pages: Sequence[int]) -> None:
        """Copy pages `first`, `first` + 1, ... of a slot into `pages` of one layer."""
        rows = self._rows(slot)
        for run in self._layers[layer]:
            width = run.pages.shape[1]
            for number, page in enumerate(pages, first):
                source = rows[layer, number, run.start : run.start + width]
                run.pages[page].copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        """The work queued so far: pages it reads may be written, those it writes read, after it."""
        if self.is_on_host:
            return Fence(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Fence(event)

    def finish(self) -> None:
        """Return once all copies begun by this thread are over."""
        if not self.is_on_host:
            torch.cuda.current_stream().synchronize()

    def _rows(self, slot: memoryview) -> torch.Tensor:
        shape = (len(self._layers), self.group.pages_per_block, self.group.page_bytes)
        return torch.from_numpy(np.frombuffer(slot, np.uint8)).view(shape)


def _runs(
    name: str, caches: dict[str, torch.Tensor], group: PageGroup, num_pages: int
) -> list[_Run]:
    tensor = caches.get(name)
    if tensor is None:
        raise UnsupportedEngineError(f"layer {name} has no cache of its own")
    if tensor.shape[0] == num_pages:
        parts = [tensor]
    elif tensor.shape[:2] == (2, num_pages):  # keys apart from values
        parts = [tensor[0], tensor[1]]
    else:
        raise UnsupportedEngineError(
            f"{name} has shape {tuple(tensor.shape)}, not one of {num_pages} pages"
        )
    runs, start = [], 0
    for part in parts:
        # Views may name axes in another order than memory has them; bytes are kept as they lie.
        axes = sorted(range(1, part.ndim), key=part.stride, reverse=True)
        part = part.permute(0, *axes)
        if not part[0].is_contiguous():
            raise UnsupportedEngineError(
                f"a page of {name} is not contiguous: shape {tuple(tensor.shape)},"
                f" strides {tensor.stride()}"
            )
        pages = part.view(torch.uint8).flatten(1)
        runs.append(_Run(start, pages))
        start += pages.shape[1]
    if start != group.page_bytes:
        raise UnsupportedEngineError(
            f"a page of {name} has {start} bytes, its cache spec says {group.page_bytes}"
        )
    return runs
