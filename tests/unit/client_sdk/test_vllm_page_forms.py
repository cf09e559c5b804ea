"""Pages of every form that engines give their layers go to slots and back, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from client_sdk.engine.vllm_connector.device import HostDevice
from client_sdk.engine.vllm_connector.identity import PageGroup
from client_sdk.engine.vllm_connector.pages import EnginePages, Slots
from client_sdk.engine.weights import UnsupportedEngineError
from emberkv_proto.layout import Group, GroupKind

PAGES, PAGE_BYTES = 6, 96
STRIDE = 128
"""Pages are padded to the length of other groups' pages."""
QUEUE = HostDevice().queue()


def slot_of(content: bytearray) -> Slots:
    return Slots(np.frombuffer(content, np.uint8), [0])


def page_group(kind: GroupKind = GroupKind.FULL, layers: int = 1, each: int = 1) -> PageGroup:
    names = tuple(f"layer.{n}" for n in range(layers))
    stored = Group(kind, layers, each * layers * PAGE_BYTES)
    return PageGroup(stored, names, 16, PAGE_BYTES, each)


def memory(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (PAGES * STRIDE,), generator=generator, dtype=torch.uint8)


def view(
    raw: torch.Tensor, shape: Sequence[int], strides: Sequence[int], begin: int = 0
) -> torch.Tensor:
    """32-bit numbers in `raw`; all in units of 4 bytes."""
    return torch.as_strided(raw.view(torch.float32), tuple(shape), tuple(strides), begin)


def forms(raw: torch.Tensor) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """24 numbers a page, 32 from one page to the next."""
    return {
        "padded": view(raw, (PAGES, 2, 3, 4), (32, 12, 4, 1)),
        "other order of axes": view(raw, (PAGES, 3, 2, 4), (32, 4, 12, 1)),
        "a state of two tensors": [
            view(raw, (PAGES, 2, 4), (32, 4, 1)),
            view(raw, (PAGES, 4, 4), (32, 4, 1), 8),
        ],
    }


@pytest.mark.parametrize("form", forms(memory()))
def test_a_page_goes_into_its_slot_and_into_another_page(form: str) -> None:
    raw = memory()
    pages = EnginePages({"layer.0": forms(raw)[form]}, page_group(), PAGES)
    slot = bytearray(PAGE_BYTES)
    pages.save(QUEUE, [2], slot_of(slot))
    assert bytes(slot) == raw[2 * STRIDE : 2 * STRIDE + PAGE_BYTES].numpy().tobytes()
    before = raw.clone()
    pages.load(QUEUE, [4], 0, slot_of(slot))
    assert raw[4 * STRIDE : 4 * STRIDE + PAGE_BYTES].tolist() == list(slot)
    raw[4 * STRIDE : 4 * STRIDE + PAGE_BYTES] = before[4 * STRIDE : 4 * STRIDE + PAGE_BYTES]
    assert torch.equal(raw, before)


def test_kernels_may_know_smaller_pages_than_the_scheduler() -> None:
    numbers = torch.arange(3 * PAGES * 8, dtype=torch.float32).view(3 * PAGES, 8)
    pages = EnginePages({"layer.0": numbers}, page_group(), PAGES)
    slot = bytearray(PAGE_BYTES)
    pages.save(QUEUE, [1], slot_of(slot))
    assert bytes(slot) == numbers[3:6].numpy().tobytes()


def test_a_stage_with_fewer_layers_leaves_the_end_of_a_slot_alone() -> None:
    tensors = {f"layer.{n}": torch.full((PAGES, 24), float(n + 1)) for n in range(2)}
    pages = EnginePages(tensors, page_group(layers=2, each=2), PAGES)
    slot = bytearray(b"\xee" * (3 * 2 * PAGE_BYTES))
    pages.save(QUEUE, [3, 5], slot_of(slot))
    assert torch.frombuffer(slot, dtype=torch.float32)[:96].tolist() == [1.0] * 48 + [2.0] * 48
    assert slot[4 * PAGE_BYTES :] == b"\xee" * (2 * PAGE_BYTES)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(PAGES + 1, 24), f"not one of {PAGES} pages"),
        (torch.zeros(PAGES, 25), "has 100 bytes, its cache spec says 96"),
        (torch.zeros(PAGES, 48)[:, ::2], "is not contiguous"),
        ([torch.zeros(PAGES, 8)], "has 32 bytes, its cache spec says 96"),
    ],
    ids=["pages", "bytes", "gaps", "half a state"],
)
def test_what_is_not_made_of_such_pages_is_refused(
    tensor: torch.Tensor | list[torch.Tensor], reason: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        EnginePages({"layer.0": tensor}, page_group(), PAGES)
