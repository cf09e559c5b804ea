"""The engine's pages as bytes, and which of them lie evenly enough to be copied at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from client_sdk.engine.vllm_connector.device import CopyQueue, Stretch
from client_sdk.engine.vllm_connector.identity import PageGroup
from client_sdk.engine.weights import UnsupportedEngineError

LayerCache = torch.Tensor | Sequence[torch.Tensor]
"""What the engine has for a layer: one tensor of pages, or several that share each page."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Blocks' bytes, in the pool or on their way to it: each begins at one of `offsets`."""

    memory: npt.NDArray[np.uint8]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `[start, start + n)` of a layer's part of a slot: `[num_pages, n]`."""

    start: int
    pages: torch.Tensor


class EnginePages:
    """All pages of a group's layers.

    A slot is the payload of a block's part: layer after layer, its pages in order. Its end stays as
    it is where other stages of a pipeline have more layers.

    Copies are queued: see `CopyQueue`. What is evenly spaced on both sides goes as one, so that the
    thread that copies asks for the interpreter lock as rarely as can be.
    """

    def __init__(self, caches: Mapping[str, LayerCache], group: PageGroup, num_pages: int) -> None:
        """Raises UnsupportedEngineError when a layer's tensor is not made of such pages."""
        self.group = group
        self._layers = [_runs(name, caches, group, num_pages) for name in group.layer_names]
        blocks = _whole_blocks(self._layers) if group.pages_per_block == 1 else None
        self.are_whole_blocks = blocks is not None
        """Whether a block is one run of bytes over all layers."""
        size = group.pages_per_block * group.page_bytes
        self._of_layers = [
            [_Run(layer * size + run.start, run.pages) for run in runs]
            for layer, runs in enumerate(self._layers)
        ]
        self._of_all = [run for runs in self._of_layers for run in runs]
        if blocks is not None:
            self._of_all = [_Run(0, blocks)]

    @property
    def sample(self) -> torch.Tensor:
        """Some tensor of theirs: all are on one device."""
        return self._layers[0][0].pages

    def save(self, queue: CopyQueue, pages: Sequence[int], slots: Slots) -> None:
        """Copy the pages of blocks, block by block, of every layer into the blocks' slots."""
        for stretch in self._stretches(self._of_all, pages, 0, slots):
            queue.save(stretch)

    def load(self, queue: CopyQueue, pages: Sequence[int], skipped: int, slots: Slots) -> None:
        """Copy slots, but for the first `skipped` pages of the first one, into `pages` of all
        layers; what there are no pages for is left out."""
        for stretch in self._stretches(self._of_all, pages, skipped, slots):
            queue.load(stretch)

    def load_layer(
        self, queue: CopyQueue, layer: int, pages: Sequence[int], skipped: int, slots: Slots
    ) -> None:
        """As `load`, of one layer."""
        for stretch in self._stretches(self._of_layers[layer], pages, skipped, slots):
            queue.load(stretch)

    def _stretches(
        self, runs: Sequence[_Run], pages: Sequence[int], skipped: int, slots: Slots
    ) -> Iterator[Stretch]:
        for line in _lines(self.group, pages, skipped, slots.offsets):
            for even_pages, offsets in line.even():
                for run in runs:
                    places = range(
                        offsets.start + run.start, offsets.stop + run.start, offsets.step
                    )
                    yield Stretch(run.pages, even_pages, slots.memory, places)


@dataclass(frozen=True, slots=True)
class _Line:
    """Pages, and where their bytes of the first layer begin."""

    pages: Sequence[int]
    offsets: Sequence[int]

    def even(self) -> Iterator[tuple[range, range]]:
        """Cut where the steps from one to the next change."""
        pages, offsets, begin = self.pages, self.offsets, 0
        while begin < len(pages):
            end, step, stride = begin + 1, 1, 1
            if end < len(pages):
                step, stride = pages[end] - pages[begin], offsets[end] - offsets[begin]
                while (
                    step
                    and stride
                    and end < len(pages)
                    and pages[end] - pages[end - 1] == step
                    and offsets[end] - offsets[end - 1] == stride
                ):
                    end += 1
            count = end - begin
            yield (
                _progression(pages[begin], step, count),
                _progression(offsets[begin], stride, count),
            )
            begin = end


def _progression(first: int, step: int, count: int) -> range:
    step = step or 1  # of one alone
    return range(first, first + count * step, step)


def _lines(
    group: PageGroup, pages: Sequence[int], skipped: int, offsets: Sequence[int]
) -> Iterator[_Line]:
    """All pages, in lines that are likely to be even.

    Blocks one after the other are, and so the first pages of all of them, the second ones, ...;
    of few blocks with many pages rather the pages of each.
    """
    each, size = group.pages_per_block, group.page_bytes
    if each <= len(offsets):
        for number in range(each):
            chosen = pages[(number - skipped) % each :: each]
            begin = int(number < skipped)
            begins = offsets[begin : begin + len(chosen)]
            yield _Line(chosen, [offset + number * size for offset in begins])
        return
    for block, offset in enumerate(offsets):
        first = max(block * each - skipped, 0)
        chosen = pages[first : (block + 1) * each - skipped]
        begin = offset + (first - block * each + skipped) * size
        yield _Line(chosen, range(begin, begin + len(chosen) * size, size))


def _whole_blocks(layers: Sequence[Sequence[_Run]]) -> torch.Tensor | None:
    """`[num_pages, bytes of all layers]`, where each layer's page follows the one before it."""
    first = layers[0][0].pages
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    for runs in layers:
        pages = runs[0].pages
        if (
            len(runs) > 1
            or pages.data_ptr() != start
            or pages.untyped_storage().data_ptr() != storage
            or pages.stride() != first.stride()
        ):
            return None
        start += pages.shape[1]
    length = start - first.data_ptr()
    if first.stride(0) < length:
        return None  # one layer's pages, each as long as the next one's begin
    return first.as_strided((first.shape[0], length), (first.stride(0), 1))


def _runs(
    name: str, caches: Mapping[str, LayerCache], group: PageGroup, num_pages: int
) -> list[_Run]:
    cache = caches.get(name)
    if cache is None:
        raise UnsupportedEngineError(f"layer {name} has no cache of its own")
    tensors = [cache] if isinstance(cache, torch.Tensor) else cache
    runs, start = [], 0
    for part in (part for tensor in tensors for part in _parts(name, tensor, num_pages)):
        # Views may name axes in another order than memory has them; bytes are kept as they lie.
        axes = sorted(range(1, part.ndim), key=part.stride, reverse=True)
        pages = part.permute(0, *axes)
        if not pages[0].is_contiguous():
            raise UnsupportedEngineError(
                f"a page of {name} is not contiguous: shape {tuple(part.shape)},"
                f" strides {part.stride()}"
            )
        pages = pages.view(torch.uint8).flatten(1)
        runs.append(_Run(start, pages))
        start += pages.shape[1]
    if start != group.page_bytes:
        raise UnsupportedEngineError(
            f"a page of {name} has {start} bytes, its cache spec says {group.page_bytes}"
        )
    return runs


def _parts(name: str, tensor: torch.Tensor, num_pages: int) -> list[torch.Tensor]:
    """A tensor's views with a row for each page."""
    if tensor.shape[0] == num_pages:
        return [tensor]
    if tensor.shape[:2] == (2, num_pages):  # keys apart from values
        return [tensor[0], tensor[1]]
    if tensor.shape[0] % num_pages == 0:  # kernels that know smaller pages than the scheduler
        return [tensor.view(num_pages, -1, *tensor.shape[1:])]
    raise UnsupportedEngineError(
        f"{name} has shape {tuple(tensor.shape)}, not one of {num_pages} pages"
    )
