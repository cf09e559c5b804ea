"""Long runs of records are written by several threads, whole and in their places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from store_daemon.tiers import segment_file
from store_daemon.tiers.segment_file import write_records

PAGE = 4096


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def buffers(lengths: list[int]) -> list[memoryview]:
    return [memoryview(os.urandom(length)) for length in lengths]


@pytest.mark.parametrize("share_bytes", [1, PAGE + 1, 5 * PAGE, 1 << 30])
@pytest.mark.parametrize("lengths", [[PAGE], [PAGE, 3 * PAGE] * 7, [9 * PAGE, PAGE, PAGE]])
def test_a_run_lies_there_as_if_one_had_written_it(
    fd: int,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    share_bytes: int,
    lengths: list[int],
) -> None:
    monkeypatch.setattr(segment_file, "SHARE_BYTES", share_bytes)
    run = buffers(lengths)
    write_records(fd, run, 2 * PAGE, threads)
    assert os.pread(fd, 1 << 20, 2 * PAGE) == b"".join(run)
    assert os.pread(fd, 2 * PAGE, 0) == bytes(2 * PAGE)


@pytest.mark.parametrize("failing", [0, 2, 4])
def test_a_share_that_fails_fails_the_run_after_all_others_ended(
    fd: int, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(segment_file, "SHARE_BYTES", PAGE)
    written: list[int] = []

    def write(descriptor: int, share: list[memoryview], offset: int) -> None:
        if offset == failing * PAGE:
            raise OSError(28, "No space left on device")
        os.pwritev(descriptor, share, offset)
        written.append(offset)

    monkeypatch.setattr(segment_file, "write_fully", write)
    with pytest.raises(OSError, match="No space"):
        write_records(fd, buffers([PAGE] * 5), 0, threads)
    assert sorted(written) == [n * PAGE for n in range(5) if n != failing]
