"""The segment that is being filled: how much still fits, and one write of many records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emberkv_proto.shm_layout import align_up
from emberkv_proto.types import (
    BLOCK_HASH_BYTES,
    NAMESPACE_ID_BYTES,
    SALT_ID_BYTES,
    BlockHash,
    NamespaceId,
    SaltId,
)
from store_daemon.tiers import segments
from store_daemon.tiers.segment_file import (
    aligned_memory,
    allocated_bytes,
    create_segment,
    seal_segment,
    write_records,
)
from store_daemon.tiers.segments import PAGE_BYTES, RowKey, SsdRow

_RUN_RECORDS = 256  # two buffers each; a vectored write takes 1024
_RUN_BYTES = (64 << 20) + _RUN_RECORDS * PAGE_BYTES
"""With headers: payloads of 64 MiB, which is what writeback brings, are one write and one sync."""


@dataclass(frozen=True, slots=True)
class SsdRecord:
    """A part to be written."""

    namespace_id: NamespaceId
    block_hash: BlockHash
    part: int
    parent: BlockHash | None
    length: int
    checksum: int
    payload: memoryview
    """4 KiB aligned, exactly align_up(length) bytes; unchanged until `append` returns."""
    salt_id: SaltId | None = None
    """Whose quota it counts against."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.namespace_id, self.block_hash, self.part)

    @property
    def is_storable(self) -> bool:
        """Whether each field fits its place in a record header. Zeros there mean no
        parent, and nobody's."""
        return (
            len(self.namespace_id) == NAMESPACE_ID_BYTES
            and len(self.block_hash) == BLOCK_HASH_BYTES
            and (self.parent is None or (len(self.parent) == BLOCK_HASH_BYTES and any(self.parent)))
            and 0 <= self.part < 1 << 32
            and 0 <= self.checksum < 1 << 64
            and (self.salt_id is None or (len(self.salt_id) == SALT_ID_BYTES and any(self.salt_id)))
        )

    def placed(self, segment: int, offset: int) -> SsdRow:
        """The row of this record when it stands there."""
        return SsdRow(
            self.namespace_id,
            self.block_hash,
            self.part,
            self.parent,
            segment,
            offset,
            self.length,
            self.checksum,
            self.salt_id,
        )

    def refusal(self, largest_payload: int) -> str | None:
        """Why it cannot be stored in segments that take so much; None if it can."""
        payload = self.payload
        if not self.is_storable:
            return "a key, part, parent or checksum is not of its size"
        if self.length < 1 or not len(payload) == payload.nbytes == align_up(self.length):
            return f"payload of {payload.nbytes} bytes for a length of {self.length}"
        if np.frombuffer(payload, np.uint8).ctypes.data % PAGE_BYTES:
            return f"payload is not on a boundary of {PAGE_BYTES} bytes"
        if payload.nbytes > largest_payload:
            return (
                f"payload of {self.length} bytes does not fit in a segment, which takes"
                f" {largest_payload}; raise ssd.segment_bytes"
            )
        return None

    @staticmethod
    def of(row: SsdRow, payload: memoryview) -> SsdRecord:
        """The record that stands at `row`, to be written anew elsewhere."""
        return SsdRecord(
            row.namespace_id,
            row.block_hash,
            row.part,
            row.parent,
            row.length,
            row.checksum,
            payload,
            row.salt_id,
        )


@dataclass(eq=False, slots=True)
class Segment:
    """A segment file in use, as the tier knows it."""

    number: int
    path: Path
    records_end: int
    disk_bytes: int
    """What the file takes on the drive."""
    is_sealed: bool = False
    """Whether the index relies on its footer for its rows."""
    read: set[RowKey] = field(default_factory=set)
    """Parts that were read since they were written here; may name rows that are gone."""
    corrupt_records: int = 0
    """Records that did not match their checksum when they were read."""


class OpenSegment:
    """Used by the tier's one writer. The rows are the caller's to record."""

    def __init__(self, directory: Path, number: int, segment_bytes: int, direct_io: bool) -> None:
        """Create the file. Raises OSError and leaves nothing."""
        path = directory / segments.segment_name(number)
        self._headers = aligned_memory(_RUN_RECORDS * PAGE_BYTES)
        self._fd = create_segment(path, number, segment_bytes, direct_io)
        self._limit = segment_bytes
        self._records = 0
        self.segment = Segment(number, path, PAGE_BYTES, allocated_bytes(os.fstat(self._fd)))

    def leading_run(self, waiting: Iterable[SsdRecord]) -> list[SsdRecord]:
        """The records from the left that fit and go into one write; empty if the first does not."""
        run: list[SsdRecord] = []
        size = 0
        for record in waiting:
            size += segments.record_bytes(record.length)
            if run and (len(run) == _RUN_RECORDS or size > _RUN_BYTES):
                break
            if not self._takes(len(run) + 1, size):
                break
            run.append(record)
        return run

    def write(self, run: Sequence[SsdRecord], threads: Executor) -> list[SsdRow]:
        """Write a run behind the last record, durably; the caller then moves `records_end`.

        After an OSError the end of the file is not to be trusted: seal it and begin another.
        """
        rows: list[SsdRow] = []
        buffers: list[memoryview] = []
        offset = self.segment.records_end
        for slot, record in enumerate(run):
            row = record.placed(self.segment.number, offset)
            page = self._headers[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
            page[: segments.RECORD_HEADER_BYTES] = segments.pack_record_header(row)
            buffers += (page, record.payload)
            rows.append(row)
            offset = row.end
        write_records(self._fd, buffers, self.segment.records_end, threads)
        self._records += len(rows)
        return rows

    def seal(self, rows: Sequence[SsdRow]) -> int:
        """Write the footer of live `rows` and close the file; without any, remove it.

        Returns the footer's bytes. The file is closed also when this raises OSError; its footer is
        then missing or not durable.
        """
        segment = self.segment
        try:
            if not rows:
                segment.path.unlink(missing_ok=True)
                return 0
            return seal_segment(self._fd, segment.number, rows, segment.records_end)
        finally:
            segment.disk_bytes = allocated_bytes(os.fstat(self._fd))
            os.close(self._fd)

    def _takes(self, records: int, record_bytes: int) -> bool:
        """Whether so many more records of so many bytes in all leave room for the footer."""
        footer = segments.footer_bytes(self._records + records)
        return self.segment.records_end + record_bytes + footer <= self._limit
