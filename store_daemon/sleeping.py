"""Blocks on SSD that nobody asked for since the daemon started: kept packed, by hash. Pure.

A daemon may find millions of rows at start. An object for each would cost seconds and gigabytes,
so they stay in their table; the catalog wakes a block when its hash is named for the first time.
Only a block whose rows are all as they should be sleeps; the others are handed out at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from emberkv_proto.events import Keys
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash, NamespaceId, SaltId
from store_daemon.block import StoredNamespace
from store_daemon.tiers.row_table import Mask, Numbers, RowTable, Words
from store_daemon.tiers.segments import SsdRow, record_sizes

MOST_PARTS = 63
"""A block of more parts does not sleep: a bit each in one word."""
FEW_HASHES = 24
"""Up to so many hashes are looked up one by one, more in one go."""
_FILTER_BITS = 24


class WokenBlock(NamedTuple):
    """A block as it lay on SSD: at least all required parts."""

    namespace: StoredNamespace
    rows: list[SsdRow]


class SleepingBlocks:
    """Part of the catalog: a hash is here or among its blocks, never both.

    A hash that is not here is told so in a quarter of a microsecond; 128 of them in ten.
    """

    def __init__(self, table: RowTable, namespaces: Mapping[NamespaceId, StoredNamespace]) -> None:
        """Rows of namespaces that are not known stay out."""
        self._table = table
        self._namespaces = dict(namespaces)
        words = table.sorted_words
        is_first = np.ones(len(words), np.bool_)
        np.not_equal(words[1:], words[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        is_whole = _whole_groups(table, starts, namespaces)
        counts = np.diff(np.append(starts, len(table)))
        self._asleep = np.empty(len(table), np.bool_)
        self._asleep[table.order] = np.repeat(is_whole, counts)
        self._outside = ~self._asleep
        self._firsts = table.order[starts[is_whole]]
        """Of each block that slept at the start, one row."""
        self._count = len(self._firsts)
        bits = min(_FILTER_BITS, max(8, (16 * self._count).bit_length()))
        self._filter_mask = (1 << bits) - 1
        seen = np.zeros(1 << bits, np.uint8)
        seen[words[starts[is_whole]] & np.uint64(self._filter_mask)] = 1
        self._filter = seen.data
        """A byte for each low end of a hash: 0 when no block that slept has it."""

    def __len__(self) -> int:
        """How many blocks sleep."""
        return self._count

    def __contains__(self, block_hash: BlockHash) -> bool:
        return bool(self._numbers(block_hash))

    def __iter__(self) -> Iterator[BlockHash]:
        """Hashes of the blocks that sleep. O(blocks at the start)."""
        for number in self._firsts[self._asleep[self._firsts]].tolist():
            yield self._table.row(number).block_hash

    def keys(self) -> Keys:
        """Index keys of the blocks that sleep. O(blocks at the start), in C."""
        firsts = self._firsts[self._asleep[self._firsts]]
        keys: Keys = self._table.first_words[firsts]
        keys[keys == 0] = 1
        return keys

    def keys_by_namespace(self) -> list[tuple[StoredNamespace, Keys]]:
        """`keys`, for each namespace by itself."""
        firsts = self._firsts[self._asleep[self._firsts]]
        ids = np.ascontiguousarray(self._table.packed["namespace_id"][firsts])
        words = ids.view("<u8").reshape(-1, 2)
        found: list[tuple[StoredNamespace, Keys]] = []
        for namespace in self._namespaces.values():
            own = firsts[(words == np.frombuffer(namespace.id, "<u8")).all(axis=1)]
            keys: Keys = self._table.first_words[own]
            keys[keys == 0] = 1
            if len(keys):
                found.append((namespace, keys))
        return found

    def scan_keys(self, most: int) -> Iterator[Keys]:
        """`keys`, at most so many at a time, without those that woke before they are yielded."""
        firsts = self._firsts[self._asleep[self._firsts]]
        for start in range(0, len(firsts), most):
            some = firsts[start : start + most]
            keys: Keys = self._table.first_words[some[self._asleep[some]]]
            keys[keys == 0] = 1
            yield keys

    def bytes_by_salt(self) -> dict[SaltId, int]:
        """What the records of the blocks that sleep take, for each tenant. O(rows), in C."""
        packed = self._table.packed
        salts = np.ascontiguousarray(packed["salt_id"]).view("<u8").reshape(-1, 2)
        salted = np.flatnonzero((salts[:, 0] | salts[:, 1]) != 0)
        salted = salted[self._asleep[salted]]
        if not len(salted):
            return {}
        salts = salts[salted]
        sizes = record_sizes(packed["length"][salted])
        # By the first half of the id; where two tenants share that, row by row.
        words, firsts, inverse = np.unique(salts[:, 0], return_index=True, return_inverse=True)
        if (salts[firsts, 1][inverse] == salts[:, 1]).all():
            sums = np.zeros(len(words), np.int64)
            np.add.at(sums, inverse, sizes)
            ids = [SaltId(salts[first].tobytes()) for first in firsts.tolist()]
            return dict(zip(ids, sums.tolist(), strict=True))
        sums_of: dict[SaltId, int] = defaultdict(int)
        for salt, size in zip(salts, sizes.tolist(), strict=True):
            sums_of[SaltId(salt.tobytes())] += size
        return dict(sums_of)

    def of_salt(self, salt_id: SaltId, most: int) -> list[BlockHash]:
        """Hashes of up to `most` of a tenant's blocks that sleep. O(blocks at the start), in C."""
        firsts = self._firsts[self._asleep[self._firsts]]
        salts = np.ascontiguousarray(self._table.packed["salt_id"][firsts])
        words = salts.view("<u8").reshape(-1, 2)
        own = (words == np.frombuffer(salt_id, "<u8")).all(axis=1)
        return [self._table.row(number).block_hash for number in firsts[own][:most].tolist()]

    def rows(self) -> list[SsdRow]:
        """The rows of the blocks that sleep. O(them) objects."""
        return self._table.rows(np.flatnonzero(self._asleep))

    def outsiders(self) -> list[SsdRow]:
        """The rows that cannot sleep. O(them) objects."""
        return self._table.rows(np.flatnonzero(self._outside))

    def wake(self, hashes: Sequence[BlockHash]) -> list[WokenBlock]:
        """Take out those of `hashes` that sleep, in the order of `hashes`."""
        if len(hashes) <= FEW_HASHES:
            return [found for h in hashes if (found := self._take(h)) is not None]
        if not self._count:
            return []
        words, order = self._table.sorted_words, self._table.order
        asked = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, BLOCK_HASH_BYTES // 8)
        by_word = asked[:, 0].argsort()  # in order they are found in a third of the time
        rising = asked[by_word, 0]
        starts = np.empty(len(rising), np.intp)
        starts[by_word] = words.searchsorted(rising)
        starts[starts == len(words)] = 0
        hits = np.flatnonzero(words[starts] == asked[:, 0])
        firsts = order[starts[hits]]
        hits = hits[self._asleep[firsts]]
        if len(hits) <= FEW_HASHES or (rising[1:] == rising[:-1]).any():
            taken = (self._take(hashes[n]) for n in hits.tolist())
            return [found for found in taken if found is not None]
        firsts = order[starts[hits]]
        # All rows of a group that sleeps are of one block, so its first row speaks for it.
        same = (self._table.words_of(firsts) == asked[hits]).all(axis=1)
        starts = starts[hits[same]]
        counts = _run_lengths(words, starts)
        ends = np.cumsum(counts)
        numbers = order[np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())]
        self._asleep[numbers] = False
        self._count -= len(starts)
        rows = self._table.rows(numbers)
        namespaces = self._namespaces
        if len(rows) == len(starts):
            return [WokenBlock(namespaces[row.namespace_id], [row]) for row in rows]
        groups = (rows[e - c : e] for e, c in zip(ends.tolist(), counts.tolist(), strict=True))
        return [WokenBlock(namespaces[group[0].namespace_id], group) for group in groups]

    def check_integrity(self) -> None:
        assert self._count == np.count_nonzero(self._asleep[self._firsts])
        assert not (self._asleep & self._outside).any()
        for block_hash in self:
            assert block_hash in self
            rows = self._table.rows(np.array(self._numbers(block_hash)))
            namespace = self._namespaces[rows[0].namespace_id]
            places: list[SsdRow | None] = [None] * namespace.parts
            for row in rows:
                assert (row.block_hash, row.namespace_id) == (block_hash, namespace.id)
                assert places[row.part] is None
                places[row.part] = row
            assert namespace.has_required(places)

    def _numbers(self, block_hash: BlockHash) -> list[int]:
        """Row numbers of a block that sleeps; none for any other hash."""
        if not self._filter[int.from_bytes(block_hash[:4], "little") & self._filter_mask]:
            return []
        numbers = self._table.find(block_hash)
        return numbers if numbers and self._asleep[numbers[0]] else []

    def _take(self, block_hash: BlockHash) -> WokenBlock | None:
        numbers = self._numbers(block_hash)
        if not numbers:
            return None
        rows = self._table.rows(np.array(numbers))
        self._asleep[numbers] = False
        self._count -= 1
        return WokenBlock(self._namespaces[rows[0].namespace_id], rows)


def _run_lengths(words: Words, starts: Numbers) -> Numbers:
    """How many equal words there are from each start on, most of them one."""
    lengths = np.ones(len(starts), np.intp)
    followed = np.flatnonzero(words[np.minimum(starts + 1, len(words) - 1)] == words[starts])
    first = starts[followed]
    lengths[followed] = words.searchsorted(words[first], side="right") - first
    return lengths


def _whole_groups(
    table: RowTable, starts: Numbers, namespaces: Mapping[NamespaceId, StoredNamespace]
) -> Mask:
    """Of each group of rows whose hashes begin alike, whether they are one block, fit to sleep:
    one hash, one known namespace, one tenant, no part twice, no required part missing."""
    if not len(table) or not namespaces:
        return np.zeros(len(starts), np.bool_)
    known = sorted(namespaces.values(), key=lambda n: int.from_bytes(n.id[:8], "little"))
    known_ids = np.frombuffer(b"".join(n.id for n in known), "<u8").reshape(-1, 2)
    limits = np.array([min(n.parts, MOST_PARTS) for n in known], np.uint64)
    fits = np.array([n.parts <= MOST_PARTS for n in known])
    required = np.array(
        [sum(1 << part for part in n.required if part < MOST_PARTS) for n in known], np.uint64
    )
    order = table.order
    ids = np.ascontiguousarray(table.packed["namespace_id"]).view("<u8").reshape(-1, 2)
    owner = np.minimum(known_ids[:, 0].searchsorted(ids[:, 0]), len(known) - 1)
    parts = table.packed["part"].astype(np.uint64)
    is_good = (known_ids[owner, 0] == ids[:, 0]) & (known_ids[owner, 1] == ids[:, 1])
    is_good &= fits[owner] & (parts < limits[owner])
    if len(starts) == len(table) and not parts.any():
        alone: Mask = (is_good & ((required[owner] & ~np.uint64(1)) == 0))[order]
        return alone
    bits = np.left_shift(np.uint64(1), np.minimum(parts, np.uint64(MOST_PARTS)))[order]
    first = np.repeat(order[starts], np.diff(np.append(starts, len(table))))
    words = table.hash_words
    is_good = is_good[order] & (owner[order] == owner[first])
    for word in range(1, BLOCK_HASH_BYTES // 8):
        is_good &= words[order, word] == words[first, word]
    salts = np.ascontiguousarray(table.packed["salt_id"]).view("<u8").reshape(-1, 2)
    is_good &= (salts[order] == salts[first]).all(axis=1)
    held = np.bitwise_or.reduceat(bits, starts)
    wanted = required[owner[order[starts]]]
    result: Mask = (
        np.logical_and.reduceat(is_good, starts)
        & (held == np.add.reduceat(bits, starts))
        & (held & wanted == wanted)
    )
    return result
