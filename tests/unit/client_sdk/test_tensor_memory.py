"""KV tensors as memory that other processes open: what a piece is, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch

from client_sdk.engine.tensor_memory import TensorMemory
from client_sdk.remote_client import Piece
from client_sdk.transport import cuda_ipc
from client_sdk.transport.memory import DeviceMemory, HostMemory, check_memory, parse_spec
from emberkv_proto.errors import FrameError, InvalidRequestError, UnavailableError


def test_pages_of_two_tensors_are_pieces_of_one_memory() -> None:
    keys = torch.arange(3 * 5 * 8, dtype=torch.float32).reshape(3, 5, 8)
    values = torch.zeros(2, 16, dtype=torch.uint8)
    page = keys[1, 2]  # a view made before follows into shared memory
    memory = TensorMemory([keys, values, keys[2:]])
    assert [region.length for region in memory.regions] == [480, 32]
    assert memory.piece(page) == Piece((1 * 5 + 2) * 8 * 4, 32)
    assert memory.piece(values[1]) == Piece(480 + 16, 16)
    assert memory.view is None  # two storages are not one stretch of this process's memory


def test_what_another_process_writes_into_the_region_is_in_the_tensor() -> None:
    pages = torch.zeros(4, 8, dtype=torch.uint8)
    memory = TensorMemory([pages])
    (region,) = memory.regions
    assert isinstance(region, HostMemory)
    os.pwrite(region.descriptor, b"\x07" * 8, memory.piece(pages[2]).offset)
    assert pages.sum(1).tolist() == [0, 0, 56, 0]
    view = memory.view
    assert view is not None
    view[0:8] = b"\x01" * 8
    assert pages.sum(1).tolist() == [8, 0, 56, 0]


def test_pieces_that_are_not_one_stretch_of_the_memory_are_refused() -> None:
    pages = torch.zeros(4, 8)
    memory = TensorMemory([pages])
    for wrong in (pages[:, 1], torch.zeros(8), pages[4:]):
        with pytest.raises(InvalidRequestError):
            memory.piece(wrong)
    for tensors in ([], [pages, torch.zeros(2, device="meta")], [torch.zeros(2, device="meta")]):
        with pytest.raises(InvalidRequestError):
            TensorMemory(tensors)


def test_memory_is_named_so_that_another_process_opens_the_same() -> None:
    for memory in (HostMemory(7, 4096), DeviceMemory(3, bytes(range(64)), 512, 1 << 40)):
        assert parse_spec(memory.spec()) == memory
    for text in ("", "host:1", "host:a:b", "cuda:1:zz:0:1", "disk:1:2"):
        with pytest.raises(FrameError):
            parse_spec(text)
    assert check_memory((HostMemory(1, 1), HostMemory(2, 1))) == 0
    assert check_memory((DeviceMemory(3, b"", 0, 1),)) == 4
    for wrong in (
        (),
        (HostMemory(1, 0),),
        (HostMemory(1, 1), DeviceMemory(0, b"", 0, 1)),
        (DeviceMemory(0, b"", 0, 1), DeviceMemory(1, b"", 0, 1)),
    ):
        with pytest.raises(InvalidRequestError):
            check_memory(wrong)


def test_without_a_cuda_driver_device_memory_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_ipc, "_DRIVER", "libno-such-driver.so.1")
    with pytest.raises(UnavailableError, match="libno-such-driver"):
        cuda_ipc.export(4096, 64, 0)
    with pytest.raises(UnavailableError, match="libno-such-driver"):
        cuda_ipc.open_memory(DeviceMemory(0, bytes(64), 0, 64))
