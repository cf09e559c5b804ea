"""What a table of block holders must do, whatever it is made of.

A *holder* is a number for one generation of one node's rows (a daemon's DRAM and SSD) or of one
engine's (its HBM). The table knows nothing of nodes, sequences or time: `ingest` decides what is
applied, `directory` maps holders to nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest

Holder = NewType("Holder", int)
MAX_HOLDERS = 8192
"""13 bits. Each node needs one, and a second one while a snapshot replaces its rows."""

EVERYTHING = 1 << 62
"""A removal budget that is never used up."""


class Applied(NamedTuple):
    """What a call changed. `unchanged`: stored twice, removed when absent, or the reserved key 0.

    `dropped`: a new block refused because the table holds `capacity_blocks` already.
    """

    changed: int
    unchanged: int
    dropped: int


class HolderHit(NamedTuple):
    """The leading run of a chain that one holder has in any tier, by fastest tier of each block.

    What its base has counts as its own.
    """

    holder: Holder
    hit_blocks: int
    hbm_blocks: int
    dram_blocks: int

    @property
    def ssd_blocks(self) -> int:
        return self.hit_blocks - self.hbm_blocks - self.dram_blocks


@dataclass(slots=True, eq=False)
class HolderHits:
    """What a query finds, each holder once and in no order: a list for each field of `HolderHit`.

    Who asks needs some numbers of many holders, and an object for each costs more than the walk.
    Not frozen: to make a frozen one takes 8 us when the caches are cold.
    """

    holders: list[Holder]
    hit_blocks: list[int]
    hbm_blocks: list[int]
    dram_blocks: list[int]

    def __len__(self) -> int:
        return len(self.holders)

    def __iter__(self) -> Iterator[HolderHit]:
        return map(HolderHit, self.holders, self.hit_blocks, self.hbm_blocks, self.dram_blocks)

    def rows(self) -> Iterator[tuple[Holder, int, int, int]]:
        """The same without an object for each: holder, and blocks of the hit, in HBM, in DRAM."""
        return zip(self.holders, self.hit_blocks, self.hbm_blocks, self.dram_blocks, strict=True)

    @classmethod
    def of(cls, hits: Iterable[HolderHit]) -> HolderHits:
        columns = cls([], [], [], [])
        for hit in hits:
            columns.holders.append(hit.holder)
            columns.hit_blocks.append(hit.hit_blocks)
            columns.hbm_blocks.append(hit.hbm_blocks)
            columns.dram_blocks.append(hit.dram_blocks)
        return columns


@dataclass(frozen=True, slots=True)
class Holding:
    """One holder of one block, and the tiers it has it in, fastest first."""

    holder: Holder
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Keys found in a piece of the table, in no order; where the next piece begins, if any."""

    keys: Keys
    next_slot: int | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """`blocks` distinct keys; `table_bytes` is 0 where the backend cannot tell."""

    blocks: int
    capacity_blocks: int
    table_bytes: int


class BlockIndex(Protocol):
    """Which holder has which block in which tier.

    One thread owns an index (the event loop's): no call waits, none is safe beside another.
    Keys are uint64; key 0 names no block. Applying is idempotent, in order within a call.
    """

    def apply_stored(self, holder: Holder, tier: Tier, keys: Keys) -> Applied:
        """Add rows. A new block over capacity is dropped and counted, never an error."""

    def apply_removed(self, holder: Holder, tier: Tier, keys: Keys) -> Applied: ...

    def clear_tier(self, holder: Holder, tier: Tier) -> int:
        """Remove all rows of `holder` in `tier`; return how many. O(table), early when empty."""

    def remove_holder(self, holder: Holder, budget_slots: int = EVERYTHING) -> bool:
        """Remove rows of `holder` in all tiers, looking at `budget_slots` slots at most.

        True when none is left; until then call again, other calls may come between. True also
        clears its links, from it and to it. The number may be given to another holder only then.
        """

    def set_base(self, holder: Holder, base: Holder | None) -> None:
        """From now on `holder` has, in queries, every block that it or `base` has.

        An engine's base is its node's holder: a run may alternate between its HBM and the node's
        DRAM and SSD. Replaces an earlier link. Raises IntegrityError when a base would have a base.
        """

    def query(self, keys: Keys) -> HolderHits:
        """Leading runs of a chain, one for each holder that has its first block.

        Exact with holes and with tiers alternating. O(len of the longest run).
        """

    def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        """Who has one block, by holder number. For explanations and tests, not the hot path."""

    def rows(self, holder: Holder, tier: Tier) -> Keys:
        """All keys of `holder` in `tier`, in no order. O(table): for repairs, not the hot path."""

    def collect(self, holder: Holder, tier: Tier, start_slot: int, budget_slots: int) -> Collected:
        """Keys of `holder` in `tier`, looking at `budget_slots` slots from `start_slot` on.

        Between two calls entries may move: a key may come twice, or not at all.
        """

    @property
    def buckets_at_once(self) -> int:
        """How many buckets `bucket_xors` had best be asked for in one turn of the loop."""

    def bucket_xors(self, holder: Holder, tier: Tier, first: int, count: int) -> Keys:
        """XOR of the rows of `holder` in `tier`, for each bucket from `first` on."""

    def bucket_keys(self, holder: Holder, tier: Tier, bucket: int) -> Keys:
        """The rows of `holder` in `tier` that are of this bucket, in no order."""

    def digest(self, holder: Holder, tier: Tier) -> TierDigest:
        """Count and XOR of the rows of `holder` in `tier`. O(1)."""

    def size(self) -> TableSize: ...

    def check_integrity(self) -> None:
        """Assert the backend's invariants. O(table)."""
