"""The engine's pages as bytes, however the engine has laid them out; and copies beside its work."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from client_sdk.engine.vllm_connector.device import (
    CopyQueue,
    CudaDevice,
    HostDevice,
    Stretch,
    device_of,
)
from client_sdk.engine.vllm_connector.identity import PageGroup
from client_sdk.engine.vllm_connector.pages import EnginePages, Slots
from client_sdk.engine.weights import UnsupportedEngineError
from emberkv_proto.errors import UnavailableError
from emberkv_proto.layout import Group, GroupKind
from tests.helpers.recorded_cuda import RecordedCuda

LAYERS, PAGES, HEADS, TOKENS, WIDTH = 3, 40, 2, 4, 8
PAGE_BYTES = HEADS * TOKENS * WIDTH * 2
AXES = "LBHNC"
QUEUE = HostDevice().queue()


def caches(order: str) -> dict[str, torch.Tensor]:
    """A tensor `[pages, heads, tokens, width]` for each layer, with `order` in memory."""
    sizes = dict(zip(AXES, (LAYERS, PAGES, HEADS, TOKENS, WIDTH), strict=True))
    raw = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16)
    whole = raw.permute([order.index(axis) for axis in AXES])
    return {f"layer{n}": whole[n] for n in range(LAYERS)}


def split_caches() -> dict[str, torch.Tensor]:
    """Keys apart from values, as older engines have them."""
    shape = (2, PAGES, HEADS, TOKENS, WIDTH // 2)
    return {f"layer{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(LAYERS)}


def group(pages_per_block: int) -> PageGroup:
    names = tuple(f"layer{n}" for n in range(LAYERS))
    stored = Group(GroupKind.FULL, LAYERS, pages_per_block * LAYERS * PAGE_BYTES, 0)
    return PageGroup(stored, names, TOKENS, PAGE_BYTES, pages_per_block)


def fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=made))


def wipe(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.zero_()


LAYOUTS = {
    "layers, heads first": lambda: caches("LBHNC"),
    "layers, tokens first": lambda: caches("LBNHC"),
    "blocks, heads first": lambda: caches("BLHNC"),
    "blocks, tokens first": lambda: caches("BLNHC"),
    "keys apart": split_caches,
}


BLOCKS = 5
GAP = b"\xee"
DEVICES = {"host": HostDevice, "gpu": lambda: CudaDevice(0, RecordedCuda())}


def places(part_bytes: int, order: Sequence[int]) -> Slots:
    """Slots with gaps between them, in a memory that ends with the last one."""
    memory = np.frombuffer(bytearray(GAP) * (BLOCKS * (part_bytes + 64)), np.uint8)
    return Slots(memory, [64 + number * (part_bytes + 64) for number in order])


def pages_in(arrangement: str, count: int) -> list[int]:
    """Of the engine; those of a freed request come back the other way round."""
    pages = {
        "in order": range(3, 3 + count),
        "from the last one down": range(count - 1, -1, -1),
        "every other": range(0, 2 * count, 2),
        "scattered": random.Random(5).sample(range(PAGES), count),
    }
    return list(pages[arrangement])


ARRANGEMENTS = ["in order", "from the last one down", "every other", "scattered"]
SLOT_ORDERS = [range(BLOCKS), range(BLOCKS - 1, -1, -1), (0, 1, 4, 2, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pages_per_block", [1, 2, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_what_was_saved_is_what_is_loaded_and_no_other_page_changes(
    arrangement: str, layout: str, pages_per_block: int, device: str
) -> None:
    queue = DEVICES[device]().queue()
    tensors = LAYOUTS[layout]()
    pages = EnginePages(tensors, group(pages_per_block), PAGES)
    assert pages.are_whole_blocks == (layout.startswith("blocks") and pages_per_block == 1)
    fill(tensors, 1)
    source = {name: tensor.clone() for name, tensor in tensors.items()}
    part_bytes = pages_per_block * LAYERS * PAGE_BYTES
    count = min(BLOCKS, PAGES // pages_per_block // 2)
    saved = pages_in(arrangement, count * pages_per_block)
    for order in SLOT_ORDERS:
        slots = places(part_bytes, order[:count])
        with queue.open():
            pages.save(queue, saved, slots)
        assert all(torch.equal(tensor, source[name]) for name, tensor in tensors.items())
        outside = np.ones(len(slots.memory), bool)
        for offset in slots.offsets:
            outside[offset : offset + part_bytes] = False
        assert (slots.memory[outside] == GAP[0]).all()

        for by_layer in (False, True):
            wipe(tensors)
            into = random.Random(6).sample(range(PAGES), len(saved))
            with queue.open():
                if by_layer:
                    for layer in range(LAYERS):
                        pages.load_layer(queue, layer, into, 0, slots)
                else:
                    pages.load(queue, into, 0, slots)
            for name, tensor in tensors.items():
                axis = 0 if tensor.shape[0] == PAGES else 1
                moved = source[name].index_select(axis, torch.tensor(saved))
                wanted = torch.zeros_like(tensor).index_copy_(axis, torch.tensor(into), moved)
                assert torch.equal(tensor, wanted)
        for name, tensor in tensors.items():
            tensor.copy_(source[name])


def test_a_slot_has_its_pages_layer_after_layer() -> None:
    tensors = caches("LBNHC")
    fill(tensors, 4)
    slots = places(2 * LAYERS * PAGE_BYTES, [2])
    EnginePages(tensors, group(2), PAGES).save(QUEUE, [9, 4], slots)
    lying = [tensor[page].transpose(0, 1) for tensor in tensors.values() for page in (9, 4)]
    wanted = b"".join(page.contiguous().view(torch.uint8).numpy().tobytes() for page in lying)
    (offset,) = slots.offsets
    assert slots.memory[offset : offset + len(wanted)].tobytes() == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize(("pages_per_block", "blocks"), [(3, 4), (3, 2), (7, 2)])
def test_pages_at_the_begin_and_at_the_end_can_be_left_out(
    pages_per_block: int, blocks: int, order: str, device: str
) -> None:
    queue = DEVICES[device]().queue()
    tensors = caches(order)
    pages = EnginePages(tensors, group(pages_per_block), PAGES)
    fill(tensors, 2)
    source = {name: tensor.clone() for name, tensor in tensors.items()}
    slots = places(pages_per_block * LAYERS * PAGE_BYTES, range(blocks))
    saved = list(range(blocks * pages_per_block))
    pages.save(queue, saved, slots)
    for skipped in range(pages_per_block):
        for left in range(pages_per_block):
            wanted = saved[skipped : len(saved) - left]
            into = [page + 20 for page in wanted]
            wipe(tensors)
            pages.load(queue, into, skipped, slots)
            for name, tensor in tensors.items():
                assert torch.equal(tensor[into], source[name][wanted])
                others = [page for page in range(PAGES) if page not in into]
                assert not tensor[others].any()


def test_layouts_that_differ_in_the_order_of_layers_and_blocks_alone_save_the_same_bytes() -> None:
    saved = []
    for order in ("LBNHC", "BLNHC", "BLHNC"):
        tensors = caches(order)
        fill(tensors, 3)
        slots = places(LAYERS * PAGE_BYTES, [1])
        EnginePages(tensors, group(1), PAGES).save(QUEUE, [3], slots)
        saved.append(slots.memory.tobytes())
    assert saved[0] == saved[1]
    assert saved[0] != saved[2], "heads and tokens lie in another order"


class CountingQueue:
    """Begins no copy."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []

    def save(self, stretch: Stretch) -> None:
        self.stretches.append(stretch)

    load = save

    def open(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


@pytest.mark.parametrize(
    ("arrangement", "pages_per_block", "copies"),
    [
        ("in order", 1, LAYERS),
        ("from the last one down", 1, LAYERS),
        ("every other", 2, 2 * LAYERS),
        ("in order", 4, 4 * LAYERS),
        ("in order", 7, BLOCKS * LAYERS),  # the pages of each block: they are more than blocks
        ("scattered", 1, BLOCKS * LAYERS),
    ],
)
def test_what_lies_evenly_is_one_copy(arrangement: str, pages_per_block: int, copies: int) -> None:
    pages = EnginePages(caches("LBNHC"), group(pages_per_block), PAGES)
    slots = places(pages_per_block * LAYERS * PAGE_BYTES, range(BLOCKS))
    queue = CountingQueue()
    pages.save(queue, pages_in(arrangement, BLOCKS * pages_per_block), slots)
    assert len(queue.stretches) <= copies
    assert sum(len(stretch.pages) for stretch in queue.stretches) == (
        BLOCKS * pages_per_block * LAYERS
    )


@pytest.mark.parametrize("device", DEVICES)
def test_pages_and_places_that_are_not_there_are_no_copy(device: str) -> None:
    queue = DEVICES[device]().queue()
    tensors = caches("LBNHC")
    pages = EnginePages(tensors, group(1), PAGES)
    slots = places(LAYERS * PAGE_BYTES, range(2))
    for wrong in ([PAGES - 1, PAGES], [PAGES, PAGES + 1], [PAGES]):
        with pytest.raises((ValueError, IndexError)):
            pages.save(queue, wrong, slots)
        with pytest.raises((ValueError, IndexError)):
            pages.load(queue, wrong, 0, slots)
    beyond = Slots(slots.memory, [len(slots.memory) - LAYERS * PAGE_BYTES + 1])
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        pages.save(queue, [1], beyond)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        pages.load(queue, [1], 0, beyond)


def test_pages_of_other_sizes_or_not_in_one_run_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="contiguous"):
        EnginePages(caches("LHBNC"), group(1), PAGES)
    with pytest.raises(UnsupportedEngineError, match="not one of"):
        EnginePages(caches("LBHNC"), group(1), PAGES + 1)
    with pytest.raises(UnsupportedEngineError, match="no cache"):
        EnginePages({"layer0": caches("LBHNC")["layer0"]}, group(1), PAGES)


def test_pages_on_the_host_have_nothing_to_wait_for_and_other_devices_are_refused() -> None:
    device = device_of(torch.zeros(1))
    assert isinstance(device, HostDevice)
    assert device.registry is None
    device.fence().wait()
    queue = device.queue()
    with queue.open():
        queue.finish()
    with pytest.raises(UnsupportedEngineError, match="meta"):
        device_of(torch.zeros(1, device="meta"))


def test_copies_to_a_gpu_have_streams_of_their_own_and_are_over_when_the_queue_is_left() -> None:
    cuda = RecordedCuda()
    device = CudaDevice(0, cuda)
    fence = device.fence()
    assert cuda.calls == [("record", None)], "a fence is in the engine's own stream"
    loads, saves = device.queue(), device.queue()
    seen: list[int] = []

    def copy(queue: CopyQueue) -> None:
        fence.wait()
        with queue.open():
            assert cuda.current is not None
            seen.append(cuda.current.number)

    threads = [threading.Thread(target=copy, args=(queue,)) for queue in (loads, saves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == [1, 2]
    assert cuda.current is None
    waits = [getattr(about, "number", None) for what, about in cuda.calls if what == "wait"]
    assert sorted(waits, key=str) == [1, 2, None, None], "each waited for the fence and its copies"

    cuda.calls.clear()
    with pytest.raises(KeyError), loads.open():
        raise KeyError
    assert [what for what, _ in cuda.calls] == ["record", "wait"], "copies were begun before it"


def test_a_driver_that_refuses_is_an_error_that_names_the_fix() -> None:
    cuda = RecordedCuda(refused={0})
    registry = CudaDevice(0, cuda).registry
    assert registry is not None
    with pytest.raises(UnavailableError, match="ulimit -l"):
        registry.register(4096, 4096)
    registry.register(8192, 4096)
    cuda.keeps = {8192}
    with pytest.raises(UnavailableError, match="status 1"):
        registry.unregister(8192)
