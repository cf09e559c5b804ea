"""Records with known bytes for the SSD tier, and a tier with its index in one directory."""

from __future__ import annotations

import contextlib
import random
import shutil
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


def crash_copy(source: Path, target: Path) -> None:
    """The state that a kill would leave in `source`, whose tier is open: files as they are.

    RocksDB may tidy up in the background meanwhile; then the copy is no state it was ever in.
    """
    for _ in range(20):
        before = _database_files(source)
        with contextlib.suppress(shutil.Error):
            shutil.copytree(source, target)
            if _database_files(source) == before:
                return
        shutil.rmtree(target, ignore_errors=True)
    raise AssertionError(f"{source} does not come to rest")


def _database_files(directory: Path) -> set[tuple[str, int]]:
    found = set()
    for path in (directory / "rocksdb").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_size))
    return found


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


def drives(directory: Path, names: str = "ab", segments: int = 16) -> SsdSection:
    """Several drives, one for each letter."""
    return SsdSection(
        paths=tuple(directory / name for name in names),
        capacity_bytes=segments * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )


@contextlib.contextmanager
def store(
    directory: Path,
    segments: int = 64,
    clock: Callable[[], float] | None = None,
    config: SsdSection | None = None,
) -> Iterator[Store]:
    """Open index and tier; at the end check their integrity and close them."""
    index = LocalIndex.open(directory, NODE)
    try:
        config = config or section(directory, segments)
        tier = SsdTier.open(config, index) if clock is None else SsdTier.open(config, index, clock)
        try:
            yield Store(tier, index)
            tier.check_integrity()
            index.check_integrity()
        finally:
            tier.close()
    finally:
        index.close()
