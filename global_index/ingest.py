"""What to do with a node's events: order, duplicates, gaps, incarnations, snapshots.

Pure: messages and the time go in, actions come out; nothing is read, sent or stored here. Rows
belong to a *generation*. The visible one answers queries; a hidden one is filled from a snapshot
and takes its place when it has caught up:

    batch ──► next for visible? ── yes ──► Apply
                 │ older: dropped, counted        hidden: OpenGeneration, Apply (pages),
                 │ gap: Resume(from next)                  Resume(seq + 1), Apply (suffix), Swap
                 ▼
    SnapshotNeeded, new incarnation, gap that replay cannot fill ──► snapshot
    digest differs ──► CompareBuckets ── few differ ──► ReplaceBucket, else ──► snapshot

Fence: nothing of an incarnation below the newest one heard of is ever applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from emberkv_proto.buckets import MOST_REPAIRED
from emberkv_proto.events import (
    BlocksStored,
    BucketRows,
    EventBatch,
    SnapshotNeeded,
    SnapshotPage,
)
from emberkv_proto.types import (
    BucketChoice,
    Incarnation,
    NodeId,
    NodeReport,
    Seq,
    Tier,
    TierDigest,
)
from global_index.actions import (
    Action,
    Apply,
    CompareBuckets,
    DropGeneration,
    FetchSnapshot,
    GenerationId,
    OpenGeneration,
    ReplaceBucket,
    Resume,
    Swap,
)
from global_index.bucket_repair import BucketRepair, Stage

AUDITED_TIERS = (Tier.DRAM, Tier.SSD)
REPLAYS_BEFORE_SNAPSHOT = 3
"""Asking as often for the same event and not getting it ends in a snapshot."""

REPAIR_FIRST_SECONDS = 5.0
REPAIR_MAX_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Position:
    """Where to subscribe, and what for: incarnation 0 means none seen yet."""

    incarnation: Incarnation
    from_seq: Seq
    wants_bucket_xors: bool = False
    buckets: tuple[BucketChoice, ...] = ()


class Exactness(str, Enum):
    """How far a node's rows can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Events are missing or the audit failed; the rows serve on while they are repaired."""
    SYNCING = "syncing"
    """Nothing to serve yet: the first events or the first snapshot are under way."""


@dataclass(slots=True)
class Counts:
    """What one node's stream went through; never goes down."""

    events: int = 0
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    snapshots: int = 0
    failed_snapshots: int = 0
    digest_mismatches: int = 0
    bucket_repairs: int = 0
    """Mismatches that were mended without a snapshot."""
    repaired_buckets: int = 0
    stale: int = 0
    """Messages of a dead incarnation, and pages of an abandoned snapshot: refused."""


@dataclass(slots=True)
class _Generation:
    id: GenerationId
    incarnation: Incarnation
    cursor: Seq
    """Last event applied."""


@dataclass(slots=True)
class _Hidden(_Generation):
    seq: Seq
    """What the snapshot's pages describe."""
    complete: bool = False


class Ingest:
    """The stream of one node, from however many connections it comes."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.counts = Counts()
        self._visible: _Generation | None = None
        self._hidden: _Hidden | None = None
        self._next_generation = 1
        self._fence = Incarnation(0)
        self._heard = Seq(0)
        """Newest event of incarnation `_fence` known to exist."""
        self._fetching = False
        self._needs_snapshot = False
        self._not_before = 0.0
        self._repair_delay = 0.0
        self._asked = Seq(0)
        self._asked_times = 0
        self._buckets: BucketRepair | None = None
        self._tried_buckets = False
        """Since the last audit that agreed: the next mismatch takes a snapshot."""
        self._waiting = False
        """A Resume was asked for; what the old stream still brings asks no second time."""
        self.agrees = False
        """The last report's digests were those of the visible rows."""

    @property
    def incarnation(self) -> Incarnation:
        """Of the rows that queries see; 0 when there are none."""
        return self._visible.incarnation if self._visible else Incarnation(0)

    @property
    def seq(self) -> Seq:
        """Last event in the rows that queries see."""
        return self._visible.cursor if self._visible else Seq(0)

    @property
    def fence(self) -> Incarnation:
        """Newest incarnation heard of."""
        return self._fence

    @property
    def visible(self) -> GenerationId | None:
        return self._visible.id if self._visible else None

    @property
    def exactness(self) -> Exactness:
        if self._visible is None:
            return Exactness.SYNCING
        is_exact = (
            self._visible.incarnation == self._fence
            and self._visible.cursor >= self._heard
            and not (self._needs_snapshot or self._fetching or self._hidden or self._waiting)
            and self._buckets is None
        )
        return Exactness.EXACT if is_exact else Exactness.DEGRADED

    def position(self) -> Position:
        """The first event still wanted. A complete snapshot's suffix comes first."""
        if self._hidden and self._hidden.complete:
            return Position(self._hidden.incarnation, Seq(self._hidden.cursor + 1))
        if self._visible:
            from_seq, repair = Seq(self._visible.cursor + 1), self._buckets
            if repair is None:
                return Position(self._visible.incarnation, from_seq)
            return Position(self._visible.incarnation, from_seq, repair.wants_xors, repair.choices)
        return Position(Incarnation(0), Seq(1))

    def wants_snapshot(self, now: float) -> bool:
        return self._needs_snapshot and not self._fetching and now >= self._not_before

    def on_stream_started(self) -> None:
        """A new stream runs from `position()`; a gap in it may ask again."""
        self._waiting = False
        if self._buckets:
            self._buckets.compare_again()

    def on_batch(self, batch: EventBatch, now: float) -> list[Action]:
        if not batch.events:
            return []
        if batch.seq_first < 1 or not self._admit(batch.incarnation, batch.seq_last):
            return []
        actions = self._drop_dead_hidden()
        if self._visible is None and self._hidden is None and batch.seq_first == 1:
            # Before event 1 a node's life holds nothing: the log is the whole state.
            actions += self._begin_empty(batch.incarnation)
        has_gap = False
        for generation in self._followers(batch.incarnation):
            if batch.seq_first > generation.cursor + 1:
                # The stream's own position decides; the other generation is about to go.
                has_gap = has_gap or self.position().from_seq == generation.cursor + 1
                continue
            fresh = batch.events[generation.cursor + 1 - batch.seq_first :]
            if not fresh:
                self.counts.duplicates += 1
                continue
            actions.append(Apply(generation.id, fresh))
            generation.cursor = batch.seq_last
            self.counts.events += len(fresh)
        actions += self._swap_if_caught_up()
        self._leave_dead_rows()
        return actions + self._ask(has_gap or self._has_nothing(), now)

    def on_snapshot_needed(self, message: SnapshotNeeded, now: float) -> list[Action]:
        """The node cannot replay what was asked for."""
        if not self._admit(message.incarnation, message.seq):
            return []
        actions = self._drop_hidden()
        self._repair(now)
        return actions + self._ask(False, now)

    def on_report(
        self, report: NodeReport, own: Mapping[Tier, TierDigest], now: float
    ) -> list[Action]:
        """Compare the node's digests with `own` (of the visible generation) where both stand."""
        self.agrees = False
        if not self._admit(report.incarnation, report.seq):
            return []
        actions = self._drop_dead_hidden()
        if self._has_nothing() and report.seq == 0:
            return actions + self._begin_empty(report.incarnation)
        actions += self._swap_if_caught_up()
        if any(isinstance(action, Swap) for action in actions):
            return actions  # `own` is of the generation that has just gone
        self._leave_dead_rows()
        if self._buckets and now >= self._buckets.deadline:
            self._repair(now)
        if (self.incarnation, self.seq) == (report.incarnation, report.seq):
            self._audit(report, own, now)
            actions += self._go_on_with_buckets(report, now)
        # All events up to report.seq were sent before it, so what is missing now is lost.
        position = self.position()
        is_missing = position.incarnation == report.incarnation and position.from_seq <= report.seq
        return actions + self._ask(is_missing or self._has_nothing(), now)

    def on_compared(
        self,
        generation: GenerationId,
        seq: Seq,
        choices: tuple[BucketChoice, ...],
        now: float,
    ) -> list[Action]:
        """Rows of `generation`, which stood at `seq` when it began, differ in these buckets."""
        repair, visible = self._buckets, self._visible
        if repair is None or visible is None or repair.stage is not Stage.COMPARING:
            return self._ask(False, now)
        if (visible.id, visible.cursor) != (generation, seq):
            repair.compare_again()  # another stream of the node went on meanwhile
            return self._resume()
        if not choices or any(len(choice.buckets) > MOST_REPAIRED for choice in choices):
            self._repair(now)
            return self._ask(False, now)
        repair.want(choices)
        return self._resume()

    def on_bucket_rows(self, rows: BucketRows, now: float) -> list[Action]:
        """What a bucket that differed must hold, in stream order."""
        if not self._admit(rows.incarnation, rows.seq):
            return []
        actions = self._drop_dead_hidden()
        self._leave_dead_rows()
        repair, visible = self._buckets, self._visible
        if repair is None or visible is None or visible.cursor > rows.seq:
            self.counts.stale += 1
            return actions + self._ask(False, now)
        if visible.cursor < rows.seq:
            return actions + self._ask(True, now)
        if not repair.take(rows):
            self.counts.stale += 1
            return actions
        self.counts.repaired_buckets += 1
        if repair.is_done:
            self.counts.bucket_repairs += 1
            self._buckets = None
        return [*actions, ReplaceBucket(visible.id, rows.tier, rows.bucket, rows.keys)]

    def on_snapshot_started(self) -> list[Action]:
        actions = self._drop_hidden()
        self._fetching, self._needs_snapshot = True, False
        self._buckets = None
        return actions

    def on_page(self, page: SnapshotPage, now: float) -> list[Action]:
        """Pages of one fetch come in order and without loss, or the fetch fails."""
        if not self._fetching:
            self.counts.stale += 1
            return []
        if not self._admit(page.incarnation, page.seq):
            return []
        hidden = self._hidden
        if hidden and (hidden.incarnation, hidden.seq) != (page.incarnation, page.seq):
            return self.on_snapshot_failed(now)  # two snapshots in one: neither can be trusted
        actions: list[Action] = []
        if hidden is None:
            base = self._open(page.incarnation, page.seq)
            hidden = _Hidden(base.id, base.incarnation, base.cursor, page.seq)
            self._hidden = hidden
            actions.append(OpenGeneration(hidden.id))
        if page.keys.size:
            actions.append(Apply(hidden.id, (BlocksStored(page.tier, page.keys),)))
        if page.is_last:
            hidden.complete = True
            self._fetching = self._needs_snapshot = False
            self.counts.snapshots += 1
            actions += self._swap_if_caught_up()
        return actions

    def on_snapshot_failed(self, now: float) -> list[Action]:
        """The fetch ended before its last page; it is wanted again, soon and then later."""
        if not self._fetching:
            return []
        self.counts.failed_snapshots += 1
        actions = self._drop_hidden()
        self._fetching = False
        self._repair(now)
        return actions

    def on_snapshot_unanswered(self, now: float) -> list[Action]:
        """The fetch ended before it began: the node is away. It is wanted as soon as it answers.

        The connection's own back-off spaces the attempts.
        """
        if not self._fetching:
            return []
        if self._hidden:
            return self.on_snapshot_failed(now)
        self.counts.failed_snapshots += 1
        self._fetching, self._needs_snapshot, self._not_before = False, True, now
        return []

    def on_rows_lost(self, now: float) -> list[Action]:
        """Visible rows were dropped or refused by the table; only a snapshot brings them back."""
        actions = self._drop_hidden()
        self._repair(now)
        return actions

    def check_integrity(self) -> None:
        if self._visible:
            assert self._visible.incarnation <= self._fence, "rows are ahead of the fence"
        if self._hidden:
            assert self._hidden.incarnation == self._fence, "a hidden generation is of a dead life"
            assert self._hidden.cursor >= self._hidden.seq, "the suffix began before the snapshot"
            assert self._visible is None or self._visible.id < self._hidden.id
        if self._buckets:
            self._buckets.check_integrity()
            assert self.incarnation == self._fence, "buckets of a dead life are repaired"
            assert not self._needs_snapshot, "two repairs at once"
            assert not self._fetching, "two repairs at once"
        assert not (self._fetching and self._hidden and self._hidden.complete)

    def _admit(self, incarnation: Incarnation, newest: Seq) -> bool:
        """Refuse a dead life's message; note a new life and the newest event known."""
        if incarnation < self._fence or incarnation < 1:
            self.counts.stale += 1
            return False
        if incarnation > self._fence:
            self._fence, self._heard = incarnation, newest
            self._asked_times, self._waiting = 0, False
            self._buckets, self._tried_buckets = None, False
            self._not_before = self._repair_delay = 0.0
        self._heard = max(self._heard, newest)
        return True

    def _has_nothing(self) -> bool:
        return self._visible is None and self._hidden is None

    def _open(self, incarnation: Incarnation, cursor: Seq) -> _Generation:
        self._next_generation += 1
        return _Generation(GenerationId(self._next_generation - 1), incarnation, cursor)

    def _begin_empty(self, incarnation: Incarnation) -> list[Action]:
        self._visible = self._open(incarnation, Seq(0))
        return [OpenGeneration(self._visible.id), Swap(self._visible.id, None)]

    def _followers(self, incarnation: Incarnation) -> list[_Generation]:
        """Generations that live events of `incarnation` are for."""
        found: list[_Generation] = []
        if self._visible and self._visible.incarnation == incarnation:
            found.append(self._visible)
        if self._hidden and self._hidden.complete:
            found.append(self._hidden)
        return found

    def _drop_hidden(self) -> list[Action]:
        """Also ends a fetch: what is left of its pages would be half a snapshot."""
        dropped, self._hidden = self._hidden, None
        if dropped is None:
            return []
        self._fetching = False
        return [DropGeneration(dropped.id)]

    def _drop_dead_hidden(self) -> list[Action]:
        if self._hidden and self._hidden.incarnation < self._fence:
            self._needs_snapshot = True
            return self._drop_hidden()
        return []

    def _leave_dead_rows(self) -> None:
        """Rows of an earlier life serve on, until a snapshot of the present one is there."""
        is_dead = self._visible is not None and self._visible.incarnation < self._fence
        if is_dead and not (self._hidden or self._fetching):
            self._needs_snapshot = True

    def _swap_if_caught_up(self) -> list[Action]:
        hidden, visible = self._hidden, self._visible
        if hidden is None or not hidden.complete or hidden.cursor < self._heard:
            return []
        self._visible = _Generation(hidden.id, hidden.incarnation, hidden.cursor)
        self._hidden, self._asked_times = None, 0
        self._buckets = None
        return [Swap(hidden.id, visible.id if visible else None)]

    def _audit(self, report: NodeReport, own: Mapping[Tier, TierDigest], now: float) -> None:
        if not report.tiers or self._hidden or self._fetching:
            return
        theirs = {digest.tier: (digest.blocks, digest.xor) for digest in report.tiers}
        ours = {tier: (digest.blocks, digest.xor) for tier, digest in own.items()}
        if all(theirs.get(tier, (0, 0)) == ours.get(tier, (0, 0)) for tier in AUDITED_TIERS):
            self._needs_snapshot = self._tried_buckets = False
            self._buckets, self.agrees = None, True
            self._repair_delay = self._not_before = 0.0
        elif not (self._needs_snapshot or self._buckets):
            self.counts.digest_mismatches += 1
            if self._tried_buckets:
                self._repair(now)
            else:
                self._buckets, self._tried_buckets = BucketRepair(now), True

    def _go_on_with_buckets(self, report: NodeReport, now: float) -> list[Action]:
        """After an audit: ask what each bucket adds up to, or compare with what came."""
        repair, visible = self._buckets, self._visible
        if repair is None or visible is None or self._waiting:
            return []
        if report.bucket_xors and repair.wants_xors:
            repair.compare()
            return [CompareBuckets(visible.id, report.bucket_xors)]
        if repair.stage is Stage.XORS_WANTED:
            if repair.is_asked:  # its first report says nothing of buckets: an older daemon
                self._repair(now)
                return []
            repair.is_asked = True
            return self._resume()
        return []

    def _resume(self) -> list[Action]:
        self._waiting = True
        return [Resume()]

    def _repair(self, now: float) -> None:
        """Want a snapshot: at once the first time, later and later until an audit agrees."""
        self._buckets = None
        if self._needs_snapshot:
            return
        self._needs_snapshot = True
        self._not_before = now + self._repair_delay
        self._repair_delay = min(
            max(2 * self._repair_delay, REPAIR_FIRST_SECONDS), REPAIR_MAX_SECONDS
        )

    def _ask(self, has_gap: bool, now: float) -> list[Action]:
        """What the stream must do next; at most one action."""
        if self._fetching:
            return []
        if has_gap and not self._waiting and not self._needs_snapshot:
            self.counts.gaps += 1
            wanted = self.position().from_seq
            if wanted != self._asked:
                self._asked, self._asked_times = wanted, 0
            self._asked_times += 1
            if self._asked_times <= REPLAYS_BEFORE_SNAPSHOT:
                self.counts.replays += 1
                return self._resume()
            self._asked_times = 0
            self._repair(now)
        return [FetchSnapshot()] if self.wants_snapshot(now) else []
