"""Pages that a file holds are entered ahead of use, and no others."""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from client_sdk import page_entries
from client_sdk.page_entries import Extent, enter_beside, held_extents
from client_sdk.transport.agent_loop import prefault
from client_sdk.transport.memory import HostMemory

MIB = 1 << 20
LENGTH = 8 * MIB


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A file in memory that holds its second and its last two MiB."""
    number = os.memfd_create("emberkv-test")
    os.truncate(number, LENGTH)
    os.pwrite(number, b"\x01" * MIB, MIB)
    os.pwrite(number, b"\x02" * (2 * MIB), LENGTH - 2 * MIB)
    yield number
    os.close(number)


def test_extents_are_where_the_file_holds_memory(descriptor: int) -> None:
    assert [*held_extents(descriptor, LENGTH)] == [
        Extent(MIB, MIB),
        Extent(LENGTH - 2 * MIB, 2 * MIB),
    ]
    assert [*held_extents(descriptor, LENGTH - MIB)][-1] == Extent(LENGTH - 2 * MIB, MIB)
    os.truncate(descriptor, 0)
    assert [*held_extents(descriptor, LENGTH)] == []


def test_an_agent_takes_no_page_fault_where_the_file_held_memory(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_entries, "STEP_BYTES", MIB)
    held = os.fstat(descriptor).st_blocks
    array = np.frombuffer(mmap.mmap(descriptor, LENGTH), np.uint8)
    region = HostMemory(descriptor, LENGTH)
    prefault(int(array.ctypes.data), region)
    assert os.fstat(descriptor).st_blocks == held, "a hole took memory"
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[MIB : 2 * MIB : 4096] += 1
    array[-2 * MIB :: 4096] += 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 3 * MIB // 4096 // 2
    assert array[MIB] == 2
    assert array[-2 * MIB] == 3


def test_entering_ends_when_it_is_told_to(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_entries, "STEP_BYTES", MIB)
    entered: list[int] = []
    is_over = threading.Event()

    def enter(address: int, length: int) -> bool:
        entered.append(address)
        if len(entered) == 3:
            is_over.set()
        return True

    monkeypatch.setattr(page_entries, "enter_pages", enter)
    enter_beside(10 * MIB, [Extent(0, 2 * MIB), Extent(4 * MIB, 4 * MIB)], is_over)
    assert entered == [10 * MIB, 11 * MIB, 14 * MIB]
