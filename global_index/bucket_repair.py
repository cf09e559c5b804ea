"""One attempt to repair only what differs: compare bucket by bucket, then bring those few. Pure.

    XORS_WANTED ──report with xors──► COMPARING ──few differ──► ROWS_WANTED ──last rows──► done
         ▲            new stream          │                          a new stream asks for the rest
         └────────────────────────────────┘

Whatever goes wrong on the way ends in a snapshot; `ingest` decides.
"""

from __future__ import annotations

from enum import Enum

from emberkv_proto.events import BucketRows
from emberkv_proto.types import BucketChoice, Tier

BUCKET_REPAIR_SECONDS = 30.0
"""From the audit that failed to the last rows; then a snapshot is fetched."""


class Stage(Enum):
    XORS_WANTED = "xors wanted"
    COMPARING = "comparing"
    ROWS_WANTED = "rows wanted"


class BucketRepair:
    """Which buckets are still to be brought."""

    def __init__(self, now: float) -> None:
        self.deadline = now + BUCKET_REPAIR_SECONDS
        self.stage = Stage.XORS_WANTED
        self.is_asked = False
        """A stream that was asked for the XORs has been subscribed to."""
        self._wanted: dict[Tier, set[int]] = {}

    @property
    def wants_xors(self) -> bool:
        """Whether the next stream's first report must say what each bucket adds up to."""
        return self.stage is not Stage.ROWS_WANTED

    @property
    def choices(self) -> tuple[BucketChoice, ...]:
        """The buckets that the next stream must bring."""
        return tuple(
            BucketChoice(tier, tuple(sorted(buckets)))
            for tier, buckets in sorted(self._wanted.items())
            if buckets
        )

    @property
    def is_done(self) -> bool:
        return self.stage is Stage.ROWS_WANTED and not self.choices

    def compare(self) -> None:
        self.stage = Stage.COMPARING

    def compare_again(self) -> None:
        """The rows changed under the comparison, or its stream broke off."""
        if self.stage is Stage.COMPARING:
            self.stage = Stage.XORS_WANTED

    def want(self, choices: tuple[BucketChoice, ...]) -> None:
        self.stage = Stage.ROWS_WANTED
        self._wanted = {choice.tier: {*choice.buckets} for choice in choices}

    def take(self, rows: BucketRows) -> bool:
        """Whether these rows were wanted; they are no longer."""
        wanted = self._wanted.get(rows.tier, set())
        if rows.bucket not in wanted:
            return False
        wanted.discard(rows.bucket)
        return True

    def check_integrity(self) -> None:
        assert not self._wanted or self.stage is Stage.ROWS_WANTED
