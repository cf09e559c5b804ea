"""What goes into one write of the open segment."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkv_proto.types import BlockHash, NamespaceId
from store_daemon.tiers.open_segment import OpenSegment, SsdRecord
from store_daemon.writeback import BATCH_BLOCKS, BATCH_BYTES

PAGE = 4096
SEGMENT_BYTES = BATCH_BYTES + (BATCH_BLOCKS + 64) * PAGE


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[OpenSegment]:
    opened = OpenSegment(tmp_path, 1, SEGMENT_BYTES, direct_io=False)
    yield opened
    opened.seal([])


def records(count: int, length: int) -> list[SsdRecord]:
    payload = memoryview(mmap.mmap(-1, length))
    return [
        SsdRecord(
            NamespaceId(bytes(16)), BlockHash(n.to_bytes(32, "big")), 0, None, length, 1, payload
        )
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("blocks", [1, 16, 64, BATCH_BLOCKS])
def test_a_batch_of_writeback_is_one_write(segment: OpenSegment, blocks: int) -> None:
    batch = records(blocks, BATCH_BYTES // blocks)
    assert segment.leading_run(batch) == batch


def test_a_run_ends_where_the_segment_does(segment: OpenSegment) -> None:
    batch = records(3, SEGMENT_BYTES // 2 - 3 * PAGE)
    assert segment.leading_run(batch) == batch[:1]
