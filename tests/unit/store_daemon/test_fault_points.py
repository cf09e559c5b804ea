"""Each point of the SSD tier and the index stands where its sentence says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from client_sdk import faults
from emberkv_proto.errors import CorruptionError
from emberkv_proto.events import BlocksStored
from emberkv_proto.types import Incarnation, NodeId, Tier
from store_daemon.publisher import Publisher
from store_daemon.tiers.ssd import OK, SsdFailure
from tests.helpers.faults import making
from tests.helpers.peer_doubles import MemoryResidency
from tests.helpers.ssd import assert_reads_back, read, record, store, stored


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "point", ["segment_create", "segment_write", "mid_segment_write", "segment_sync", "rocks_write"]
)
def test_a_full_disk_anywhere_in_a_write_fails_these_records_and_no_others(
    tmp_path: Path, point: str
) -> None:
    clock = Clock()
    with store(tmp_path, clock=clock) as s:
        rows = [] if point == "segment_create" else stored(s.tier.append([record(1), record(2)]))
        with making(f"{point}=fail:ENOSPC@1"):
            failures = s.tier.append([record(3), record(4)])
            assert faults.acted() == {point: 1}
        assert all(isinstance(failure, SsdFailure) for failure in failures)
        assert s.tier.state.startswith("degraded: ")
        assert os.strerror(errno.ENOSPC) in s.tier.state
        assert_reads_back(s.tier, rows)
        clock.now += 60.0
        rows += stored(s.tier.append([record(3), record(4)]))
        assert s.tier.state == OK
        assert_reads_back(s.tier, rows)
    with store(tmp_path) as s:
        assert {row.key: row for row in s.tier.recovered_rows()} == {row.key: row for row in rows}
        assert_reads_back(s.tier, rows)


@pytest.mark.parametrize("point", ["segment_write", "mid_segment_write"])
def test_a_drive_that_lies_about_a_write_is_found_out_by_the_checksum(
    tmp_path: Path, point: str
) -> None:
    with store(tmp_path) as s:
        with making(f"{point}=drop"):
            rows = stored(s.tier.append([record(1), record(2)]))
        first_is_lost = point == "segment_write"
        if first_is_lost:
            with pytest.raises(CorruptionError):
                read(s.tier, rows[0])
        else:
            assert_reads_back(s.tier, rows[:1])
        with pytest.raises(CorruptionError):
            read(s.tier, rows[1])


def test_a_read_fails_as_the_fault_says_and_then_works_again(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        rows = stored(s.tier.append([record(1), record(2)]))
        with making("segment_read=fail:EIO@1,segment_read=drop@2"):
            with pytest.raises(OSError, match="fault segment_read") as failed:
                read(s.tier, rows[0])
            assert failed.value.errno == errno.EIO
            with pytest.raises(CorruptionError):
                read(s.tier, rows[0])
            assert_reads_back(s.tier, rows)


def test_rows_that_the_index_only_said_it_took_are_missed_by_the_check(tmp_path: Path) -> None:
    with store(tmp_path) as s:
        kept = stored(s.tier.append([record(1)]))
        with making("rocks_write=drop"):
            lost = stored(s.tier.append([record(2)]))
        assert [row.key for row in s.index.rows()] == [row.key for row in kept]
        with pytest.raises(AssertionError, match="local index differs"):
            s.tier.check_integrity()
        s.index.put_rows(lost)


def test_an_event_that_is_dropped_leaves_no_gap_in_the_numbers_but_counts_in_the_ledger() -> None:
    residency = MemoryResidency()
    publisher = Publisher(NodeId("n"), Incarnation(1), residency)
    residency.sink = publisher
    with making("event_publish=drop@2"):
        for key in range(3):
            publisher.emit(BlocksStored(Tier.DRAM, np.array([key + 1], np.uint64)))
    assert publisher.seq == 2
    assert publisher.ledger(Tier.DRAM).blocks == 3
