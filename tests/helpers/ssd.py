"""Records with known bytes for the SSD tier, and a tier with its index in one directory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.hashing import checksum
from emberkv_proto.shm_layout import align_up
from emberkv_proto.types import BlockHash, NamespaceId
from store_daemon.config import SsdSection
from store_daemon.local_index import LocalIndex
from store_daemon.tiers.open_segment import SsdRecord
from store_daemon.tiers.segment_file import aligned_memory
from store_daemon.tiers.segments import SsdRow
from store_daemon.tiers.ssd import SsdFailure, SsdTier

NAMESPACE = NamespaceId(b"ns" * 8)
SEGMENT_BYTES = 64 * 1024
NODE = "node-a"


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def payload_of(number: int, length: int) -> bytes:
    """The bytes that record `number` must have: a function of both, so a mix-up shows."""
    return random.Random((number << 32) | length).randbytes(length)


def record(number: int, length: int = 5000, part: int = 0) -> SsdRecord:
    content = payload_of(number, length)
    memory = aligned_memory(length)
    memory[:length] = content
    parent = block(number - 1) if number > 1 else None
    return SsdRecord(NAMESPACE, block(number), part, parent, length, checksum(content), memory)


def read(tier: SsdTier, row: SsdRow) -> bytes:
    target = aligned_memory(align_up(row.length))
    tier.read_into(row, target)
    return bytes(target[: row.length])


def stored(results: list[SsdRow | SsdFailure]) -> list[SsdRow]:
    rows = [result for result in results if isinstance(result, SsdRow)]
    failures = [result for result in results if isinstance(result, SsdFailure)]
    assert not failures, failures[0].reason
    return rows


def assert_reads_back(tier: SsdTier, rows: list[SsdRow]) -> None:
    for row in rows:
        number = int.from_bytes(row.block_hash, "big")
        assert read(tier, row) == payload_of(number, row.length), f"bytes of {row} differ"


@dataclass
class Store:
    tier: SsdTier
    index: LocalIndex


def section(directory: Path, segments: int = 64, segment_bytes: int = SEGMENT_BYTES) -> SsdSection:
    return SsdSection(
        path=directory / "ssd",
        capacity_bytes=segments * segment_bytes,
        segment_bytes=segment_bytes,
    )


@contextlib.contextmanager
def store(
    directory: Path, segments: int = 64, clock: Callable[[], float] | None = None
) -> Iterator[Store]:
    """Open index and tier; at the end check their integrity and close them."""
    index = LocalIndex.open(directory, NODE)
    try:
        config = section(directory, segments)
        tier = SsdTier.open(config, index) if clock is None else SsdTier.open(config, index, clock)
        try:
            yield Store(tier, index)
            tier.check_integrity()
            index.check_integrity()
        finally:
            tier.close()
    finally:
        index.close()
