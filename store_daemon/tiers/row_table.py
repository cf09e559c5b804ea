"""Many rows in one array: 132 bytes a row instead of a kilobyte of objects. Pure.

A table never changes; who owns one keeps beside it which of its rows still count. Rows become
`SsdRow` objects one by one, when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from emberkv_proto.types import BLOCK_HASH_BYTES, NAMESPACE_ID_BYTES, BlockHash
from store_daemon.tiers.segments import ROW_BYTES, ROW_DTYPE, RowKey, SsdRow, unpack_rows

Numbers = npt.NDArray[np.intp]
"""Row numbers of a table."""
Mask = npt.NDArray[np.bool_]
"""One truth for each row of a table."""
Words = npt.NDArray[np.uint64]

_FIRST_WORD = np.dtype(
    {
        "names": ["word"],
        "formats": ["<u8"],
        "offsets": [NAMESPACE_ID_BYTES],
        "itemsize": ROW_BYTES,
    }
)
_HASH_WORDS = BLOCK_HASH_BYTES // 8
_PART_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class RowTable:
    """Rows by number. Thread-safe."""

    def __init__(self, packed: npt.NDArray[np.void]) -> None:
        """`packed` is of ROW_DTYPE and is not changed any more."""
        self._packed = packed
        self._raw = packed.view(np.uint8).data if len(packed) else memoryview(b"")
        self._first_words: Words | None = None
        self._order: Numbers | None = None
        self._sorted: Words | None = None

    @staticmethod
    def of(rows: Iterable[SsdRow]) -> RowTable:
        return RowTable(np.frombuffer(b"".join(row.pack() for row in rows), ROW_DTYPE))

    @staticmethod
    def joined(tables: Sequence[RowTable]) -> RowTable:
        """The rows of all `tables`, one table behind the other."""
        # As bytes: numpy joins rows of several fields one by one, and needs five times as long.
        parts = [table._packed.view(np.uint8) for table in tables]
        return RowTable(np.concatenate([np.empty(0, np.uint8), *parts]).view(ROW_DTYPE))

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[SsdRow]:
        return iter(unpack_rows(bytes(self._raw)))

    def row(self, number: int) -> SsdRow:
        return unpack_rows(bytes(self._raw[number * ROW_BYTES : (number + 1) * ROW_BYTES]))[0]

    def rows(self, numbers: Numbers) -> list[SsdRow]:
        return unpack_rows(self._packed[numbers].tobytes())

    def take(self, mask: Mask) -> RowTable:
        """A table of the rows for which `mask` is true."""
        return self if mask.all() else RowTable(self._packed[mask])

    @property
    def packed(self) -> npt.NDArray[np.void]:
        """The rows as an array of ROW_DTYPE, to read from."""
        return self._packed

    @property
    def hash_words(self) -> Words:
        """Per row, the block hash as four numbers."""
        hashes = np.ascontiguousarray(self._packed["block_hash"])
        return hashes.view("<u8").reshape(-1, _HASH_WORDS)

    def words_of(self, numbers: Numbers) -> Words:
        """The block hashes of these rows as four numbers each."""
        hashes = np.ascontiguousarray(self._packed["block_hash"][numbers])
        return hashes.view("<u8").reshape(-1, _HASH_WORDS)

    @property
    def first_words(self) -> Words:
        """Per row, the first word of the block hash. O(rows) once."""
        if self._first_words is None:
            words = self._packed.view(_FIRST_WORD)["word"]
            self._first_words = np.ascontiguousarray(words)
        return self._first_words

    # -- by hash -------------------------------------------------------------------------------

    @property
    def order(self) -> Numbers:
        """Row numbers by the first word of their hash. O(rows log rows) once."""
        self.sorted_words  # noqa: B018
        assert self._order is not None
        return self._order

    @property
    def sorted_words(self) -> Words:
        """The first words of all hashes, rising."""
        if self._sorted is None:
            words = self.first_words
            order = np.argsort(words)
            self._order, self._sorted = order, words[order]
        return self._sorted

    def find(self, block_hash: BlockHash) -> list[int]:
        """Numbers of the rows of this hash. O(log rows)."""
        words = self.sorted_words
        word = np.uint64(int.from_bytes(block_hash[:8], "little"))
        first = int(words.searchsorted(word))
        found: list[int] = []
        for at in range(first, len(words)):
            if words[at] != word:
                break
            number = int(self.order[at])
            if self._raw[number * ROW_BYTES + 16 : number * ROW_BYTES + 48] == memoryview(
                block_hash
            ):
                found.append(number)
        return found

    # -- by place ------------------------------------------------------------------------------

    def number_at(self, first: int, end: int, offset: int) -> int | None:
        """Number of the row at `offset` among rows [first, end), which are of one segment."""
        offsets = self._packed["offset"][first:end]
        at = int(offsets.searchsorted(np.uint64(offset)))
        return first + at if at < end - first and offsets[at] == offset else None


def newest(table: RowTable) -> Mask:
    """Which rows stand: of several rows of one part, the one with the highest place.

    The rows must lie in order of their places.
    """
    stand = np.ones(len(table), np.bool_)
    parts = table.packed["part"].astype(np.uint64)
    if parts.any():
        words = table.first_words + parts * _PART_FACTOR
        words.sort()
    else:
        words = table.sorted_words
    twice = np.unique(words[1:][words[1:] == words[:-1]])
    if len(twice):
        mixed = table.first_words + parts * _PART_FACTOR
        latest: dict[RowKey, int] = {}
        for number in np.flatnonzero(np.isin(mixed, twice)).tolist():
            key = table.row(number).key
            earlier = latest.get(key)
            if earlier is not None:
                stand[earlier] = False
            latest[key] = number
    return stand
