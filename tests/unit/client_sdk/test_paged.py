"""Copies between paged tensors and slots against a naive loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from client_sdk import gather_from_pages, paged, scatter_into_pages
from emberkv_proto.errors import InvalidRequestError, LayoutMismatchError

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


def in_one_array(pages: np.ndarray) -> list[np.ndarray]:
    return list(pages)


def evenly_spaced_backwards(pages: np.ndarray) -> list[np.ndarray]:
    return list(pages[::-1].copy()[::-1])


def unevenly_spaced(pages: np.ndarray) -> list[np.ndarray]:
    room = np.empty((5, *pages.shape[1:]), pages.dtype)
    room[[0, 1, 4]] = pages
    return [room[0], room[1], room[4]]


def of_other_strides(pages: np.ndarray) -> list[np.ndarray]:
    wide = np.repeat(pages[1], 2, axis=1)
    return [pages[0], wide[:, ::2], pages[2]]


@pytest.mark.parametrize(
    "lay_out", [in_one_array, evenly_spaced_backwards, unevenly_spaced, of_other_strides]
)
def test_layers_may_lie_anywhere_in_memory(
    lay_out: Callable[[np.ndarray], list[np.ndarray]],
) -> None:
    pages = make_pages()
    slot = memoryview(bytearray(slot_bytes()))
    gather_from_pages(lay_out(pages), [6], [slot])
    assert bytes(slot) == naive_slot(pages, [6])
    target = lay_out(np.zeros_like(pages))
    scatter_into_pages([slot], target, [2])
    for layer in range(LAYERS):
        assert np.array_equal(target[layer][:, 2], pages[layer][:, 6])
        assert not np.delete(target[layer], 2, axis=1).any()


@pytest.mark.parametrize("share_bytes", [1, 2 * 3072, 1 << 30])
def test_threads_copy_what_one_does(monkeypatch: pytest.MonkeyPatch, share_bytes: int) -> None:
    monkeypatch.setattr(paged, "SHARE_BYTES", share_bytes)
    pages, ids = make_pages(), [4, 1, 9, 0, 7]
    alone, shared = ([memoryview(bytearray(slot_bytes())) for _ in ids] for _ in range(2))
    gather_from_pages(pages, ids, alone)
    target = np.zeros_like(pages)
    with ThreadPoolExecutor(3) as threads:
        gather_from_pages(pages, ids, shared, executor=threads)
        assert [bytes(slot) for slot in shared] == [bytes(slot) for slot in alone]
        scatter_into_pages(shared, target, ids[::-1], executor=threads)
        gather_from_pages(pages, [], [], executor=threads)
    assert np.array_equal(target[:, :, ids[::-1]], pages[:, :, ids])


class FailingFirst:
    """Threads of which the first task fails."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.submitted: list[Future[None]] = []
        self._threads = threads

    def submit(self, work: Callable[..., None], *args: object) -> Future[None]:
        self.submitted.append(
            self._threads.submit(work if self.submitted else lambda *_: 1 / 0, *args)
        )
        return self.submitted[-1]


def test_an_error_in_one_thread_is_raised_after_the_others_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged, "SHARE_BYTES", 1)
    pages = make_pages()
    slots = [memoryview(bytearray(slot_bytes())) for _ in range(4)]
    with ThreadPoolExecutor(2) as threads:
        failing = FailingFirst(threads)
        with pytest.raises(ZeroDivisionError):
            gather_from_pages(pages, [0, 1, 2, 3], slots, executor=failing)  # type: ignore[arg-type]
        assert all(task.done() for task in failing.submitted)
    assert bytes(slots[3]) == naive_slot(pages, [3])
