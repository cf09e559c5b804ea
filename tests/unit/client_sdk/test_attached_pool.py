"""Mapped views, and copies between paged tensors and slots against a naive loop."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from client_sdk import AttachedPool, attached_pool, gather_from_pages, scatter_into_pages
from emberkv_proto.errors import InvalidRequestError, LayoutMismatchError, UnavailableError

LAYERS, PAGES, PAGE_TOKENS, HEADS, DIM = 3, 10, 4, 2, 8


def make_pages(dtype: str = "float32", seed: int = 0) -> np.ndarray:
    shape = (LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, DIM)
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def slot_bytes(itemsize: int = 4, pages_per_slot: int = 1) -> int:
    return LAYERS * 2 * PAGE_TOKENS * HEADS * DIM * itemsize * pages_per_slot


def naive_slot(pages: np.ndarray, page_ids: list[int]) -> bytes:
    """[layer][k|v][token][head][dim], token by token."""
    rows = [
        pages[layer, kv, page, token].tobytes()
        for layer in range(LAYERS)
        for kv in range(2)
        for page in page_ids
        for token in range(PAGE_TOKENS)
    ]
    return b"".join(rows)


@pytest.mark.parametrize("pages_per_slot", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
def test_gather_writes_the_layout_of_the_contract(dtype: str, pages_per_slot: int) -> None:
    pages = make_pages(dtype)
    ids = [7, 0, 3, 9, 2, 5][: 2 * pages_per_slot]
    slots = [bytearray(slot_bytes(pages.itemsize, pages_per_slot)) for _ in range(2)]
    gather_from_pages(pages, ids, [memoryview(slot) for slot in slots])
    assert bytes(slots[0]) == naive_slot(pages, ids[:pages_per_slot])
    assert bytes(slots[1]) == naive_slot(pages, ids[pages_per_slot:])


def test_scatter_brings_back_what_gather_took_and_touches_no_other_page() -> None:
    pages = make_pages()
    slots = [memoryview(bytearray(slot_bytes())) for _ in range(3)]
    gather_from_pages(pages, [1, 4, 6], slots)
    target = np.zeros_like(pages)
    scatter_into_pages([slot.toreadonly() for slot in slots], target, [9, 0, 5])
    for source, copy in ((1, 9), (4, 0), (6, 5)):
        assert np.array_equal(target[:, :, copy], pages[:, :, source])
    rest = [page for page in range(PAGES) if page not in (9, 0, 5)]
    assert not target[:, :, rest].any()


@pytest.mark.parametrize("as_list", [False, True])
def test_layers_one_by_one_make_the_same_slot_as_all_at_once(as_list: bool) -> None:
    pages = make_pages()
    given = list(pages) if as_list else pages
    whole, parts = (memoryview(bytearray(slot_bytes())) for _ in range(2))
    gather_from_pages(given, [2], [whole])
    for layer in range(LAYERS):
        gather_from_pages(given, [2], [parts], layer=layer)
    assert bytes(parts) == bytes(whole)
    target = np.zeros_like(pages)
    for layer in range(LAYERS):
        scatter_into_pages([whole], list(target) if as_list else target, [3], layer=layer)
        assert np.array_equal(target[layer, :, 3], pages[layer, :, 2])
        assert not target[layer + 1 :].any()


def test_tensor_of_a_single_layer_needs_only_its_number() -> None:
    pages = make_pages()
    slot = memoryview(bytearray(slot_bytes()))
    for layer in range(LAYERS):
        gather_from_pages(pages[layer], [8], [slot], layer=layer)
    assert bytes(slot) == naive_slot(pages, [8])
    with pytest.raises(InvalidRequestError, match="which one"):
        gather_from_pages(pages[0], [8], [slot])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_tensors_are_used_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    pages = torch.randn(LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, DIM).to(dtype)
    slots = [memoryview(bytearray(slot_bytes(pages.itemsize))) for _ in range(2)]
    gather_from_pages(pages, [3, 1], slots)
    target = [torch.zeros_like(layer, requires_grad=False) for layer in pages]
    scatter_into_pages(slots, target, [0, 9])
    for layer in range(LAYERS):
        assert torch.equal(target[layer][:, 0], pages[layer][:, 3])
        assert torch.equal(target[layer][:, 9], pages[layer][:, 1])
        assert not target[layer][:, 1:9].any()


def test_strided_pages_work_and_a_strided_last_axis_is_refused() -> None:
    backing = make_pages()
    pages = backing[:, :, ::2]
    slot = memoryview(bytearray(slot_bytes()))
    gather_from_pages(pages, [4], [slot])
    assert bytes(slot) == naive_slot(backing, [8])
    with pytest.raises(LayoutMismatchError, match="contiguous"):
        gather_from_pages(backing[..., ::2], [4], [slot])
    with pytest.raises(LayoutMismatchError, match="contiguous"):
        gather_from_pages(torch.zeros(2, 3, 4, 2, 8).transpose(3, 4), [0], [slot], layer=0)


@pytest.mark.parametrize(
    ("page_ids", "count", "error"),
    [
        ([PAGES], 1, InvalidRequestError),
        ([-1], 1, InvalidRequestError),
        ([0, 1, 2], 2, LayoutMismatchError),
        ([], 1, LayoutMismatchError),
        ([0, 1], 1, LayoutMismatchError),
        ([0], 0, LayoutMismatchError),
    ],
)
def test_pages_that_do_not_fit_are_refused_before_a_byte_moves(
    page_ids: list[int], count: int, error: type[Exception]
) -> None:
    pages = make_pages()
    before = pages.copy()
    slots = [bytearray(b"\x55" * slot_bytes()) for _ in range(count)]
    views = [memoryview(slot) for slot in slots]
    with pytest.raises(error):
        gather_from_pages(pages, page_ids, views)
    with pytest.raises(error):
        scatter_into_pages(views, pages, page_ids)
    assert all(set(slot) == {0x55} for slot in slots)
    assert np.array_equal(pages, before)


def test_dtype_shape_and_size_mismatches_name_the_numbers() -> None:
    slot = memoryview(bytearray(slot_bytes()))
    with pytest.raises(LayoutMismatchError, match=str(slot_bytes())):
        gather_from_pages(make_pages("float64"), [0], [slot])
    with pytest.raises(LayoutMismatchError, match="dtype"):
        gather_from_pages([make_pages()[0], make_pages("int32")[1], make_pages()[2]], [0], [slot])
    with pytest.raises(LayoutMismatchError, match="shape"):
        gather_from_pages([make_pages()[0], make_pages()[1, :, :4]], [0], [slot])
    with pytest.raises(LayoutMismatchError):
        gather_from_pages(make_pages()[:2], [0], [slot])
    with pytest.raises(LayoutMismatchError, match="per layer"):
        gather_from_pages(make_pages()[0, 0], [0], [slot])
    with pytest.raises(LayoutMismatchError, match="size"):
        gather_from_pages(make_pages()[0], [0, 1], [slot, slot[: slot_bytes() // 3]], layer=0)
    with pytest.raises(LayoutMismatchError, match="not supported"):
        gather_from_pages(memoryview(bytearray(64)), [0], [slot])
    with pytest.raises(InvalidRequestError, match="layer 3"):
        gather_from_pages(make_pages(), [0], [slot], layer=3)


def test_read_only_sides_and_doubled_pages_are_refused() -> None:
    pages = make_pages()
    slots = [memoryview(bytearray(slot_bytes())) for _ in range(2)]
    with pytest.raises(InvalidRequestError, match="read-only"):
        gather_from_pages(pages, [0], [slots[0].toreadonly()])
    with pytest.raises(InvalidRequestError, match="twice"):
        scatter_into_pages(slots, pages, [3, 3])
    pages.flags.writeable = False
    with pytest.raises(InvalidRequestError, match="read-only"):
        scatter_into_pages(slots[:1], pages, [0])


def test_nothing_to_copy_is_nothing() -> None:
    pages, untouched = make_pages(), make_pages()
    gather_from_pages(pages, [], [])
    scatter_into_pages([], pages, [])
    assert np.array_equal(pages, untouched)


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def attach(path: Path, pool_bytes: int = 16384, part_bytes: int = 1000) -> AttachedPool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return AttachedPool(descriptor, pool_bytes, part_bytes)
    finally:
        os.close(descriptor)


def test_views_share_the_file_and_outlive_the_pool_object(pool_file: Path) -> None:
    pool = attach(pool_file)
    pool.writable(4096)[:3] = b"abc"
    assert pool_file.read_bytes()[4096:4099] == b"abc"
    view = pool.readable(4096)
    assert view.nbytes == 1000
    assert view.readonly
    del pool
    pool_file.unlink()
    assert bytes(view[:3]) == b"abc"


@pytest.mark.parametrize("offset", [-1, 16384, 16384 - 999, 1 << 63])
def test_view_outside_the_pool_is_refused(pool_file: Path, offset: int) -> None:
    pool = attach(pool_file)
    assert not pool.holds(offset)
    with pytest.raises(InvalidRequestError, match="outside"):
        pool.readable(offset)
    assert pool.holds(16384 - 1000)


def test_pool_file_shorter_than_announced_is_refused(pool_file: Path) -> None:
    with pytest.raises(UnavailableError, match="truncated"):
        attach(pool_file, pool_bytes=16385)
    with pytest.raises(UnavailableError):
        attach(pool_file, part_bytes=0)


def test_pinning_without_cuda_says_so(pool_file: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(UnavailableError, match="CUDA"):
        attach(pool_file).pin()


def test_prefault_maps_the_whole_pool_and_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_pool, "PREFAULT_CHUNK_BYTES", 1 << 20)
    path = tmp_path / "pool"
    content = os.urandom(5 << 19)
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        pool = AttachedPool(descriptor, len(content), 4096)
    finally:
        os.close(descriptor)
    assert pool.prefault(time.monotonic() - 1.0) == 0
    assert pool.prefault(time.monotonic() + 30.0) == len(content)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert bytes(pool.readable(0)) == content[:4096]
    assert sum(pool.readable(at)[0] for at in range(0, len(content), 4096)) == sum(content[::4096])
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < len(content) // 4096 // 2
