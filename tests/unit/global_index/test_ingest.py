"""One node's stream, case by case; the random histories are in tests/model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from emberkv_proto.buckets import BUCKETS, MOST_REPAIRED
from emberkv_proto.events import (
    BlocksStored,
    BucketRows,
    EventBatch,
    SnapshotNeeded,
    SnapshotPage,
)
from emberkv_proto.types import (
    BucketChoice,
    BucketXors,
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
from global_index.bucket_repair import BUCKET_REPAIR_SECONDS
from global_index.ingest import REPAIR_FIRST_SECONDS, Exactness, Ingest, Position
from tests.helpers.model_daemon import as_keys, bucket_of

NODE = NodeId("n1")
FIRST, SECOND = GenerationId(1), GenerationId(2)
EMPTY = {Tier.DRAM: TierDigest(Tier.DRAM, 0, 0), Tier.SSD: TierDigest(Tier.SSD, 0, 0)}


@pytest.fixture
def ingest() -> Iterator[Ingest]:
    ingest = Ingest(NODE)
    yield ingest
    ingest.check_integrity()


def batch(first: int, last: int, life: int = 1) -> EventBatch:
    events = tuple(BlocksStored(Tier.DRAM, as_keys([seq])) for seq in range(first, last + 1))
    return EventBatch(NODE, Incarnation(life), Seq(first), events, 0.0)


def report(seq: int, life: int = 1, blocks: int = 0, xor: int = 0) -> NodeReport:
    tiers = (TierDigest(Tier.DRAM, blocks, xor), TierDigest(Tier.SSD, 0, 0))
    return NodeReport(NODE, Incarnation(life), Seq(seq), "serving", tiers, (), "", 0.0)


def page(seq: int, life: int = 1, *, is_last: bool = True) -> SnapshotPage:
    return SnapshotPage(NODE, Incarnation(life), Seq(seq), Tier.DRAM, as_keys([seq + 1]), is_last)


def applied(actions: list[Action]) -> list[int]:
    """Sequence numbers applied, one event having its number as its only key."""
    return [
        int(event.keys[0])
        for action in actions
        if isinstance(action, Apply)
        for event in action.events
        if isinstance(event, BlocksStored)
    ]


def test_log_from_event_one_is_the_whole_state(ingest: Ingest) -> None:
    assert ingest.exactness is Exactness.SYNCING
    actions = ingest.on_batch(batch(1, 3), 0.0)
    assert actions[:2] == [OpenGeneration(FIRST), Swap(FIRST, None)]
    assert applied(actions) == [1, 2, 3]
    assert (ingest.seq, ingest.exactness) == (3, Exactness.EXACT)


def test_replay_that_overlaps_live_events_applies_each_once(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 5), 0.0)
    assert ingest.on_batch(batch(2, 4), 0.0) == []
    assert applied(ingest.on_batch(batch(3, 8), 0.0)) == [6, 7, 8]
    assert ingest.counts.duplicates == 1
    assert ingest.counts.events == 8


def test_first_event_seen_above_one_is_a_gap(ingest: Ingest) -> None:
    assert ingest.on_batch(batch(57, 60), 0.0) == [Resume()]
    assert ingest.position() == Position(Incarnation(0), Seq(1))
    assert ingest.exactness is Exactness.SYNCING


def test_gap_keeps_rows_and_asks_once_for_just_what_is_missing(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 10), 0.0)
    assert ingest.on_batch(batch(12, 13), 0.0) == [Resume()]
    assert ingest.exactness is Exactness.DEGRADED
    assert ingest.on_batch(batch(14, 20), 0.0) == []
    assert ingest.position() == Position(Incarnation(1), Seq(11))
    ingest.on_stream_started()
    assert applied(ingest.on_batch(batch(11, 20), 0.0)) == list(range(11, 21))
    assert ingest.exactness is Exactness.EXACT
    assert (ingest.counts.gaps, ingest.counts.snapshots) == (1, 0)


def test_report_ahead_of_the_events_is_a_gap(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    assert ingest.on_report(report(3), EMPTY, 0.0) == [Resume()]


def test_replay_that_never_brings_the_event_ends_in_a_snapshot(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    asked: list[Action] = []
    for _ in range(4):
        ingest.on_stream_started()
        asked += ingest.on_batch(batch(4, 5), 0.0)
    assert asked == [Resume(), Resume(), Resume(), FetchSnapshot()]


def test_new_life_is_taken_over_by_a_hidden_snapshot_and_its_suffix(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 4), 0.0)
    assert ingest.on_batch(batch(1, 2, life=2), 0.0) == [FetchSnapshot()]
    assert (ingest.incarnation, ingest.exactness) == (1, Exactness.DEGRADED)
    ingest.on_snapshot_started()
    assert ingest.on_page(page(2, life=2, is_last=False), 0.0)[0] == OpenGeneration(SECOND)
    ingest.on_report(report(5, life=2), EMPTY, 0.0)
    assert not [a for a in ingest.on_page(page(2, life=2), 0.0) if isinstance(a, Swap)]
    assert ingest.position() == Position(Incarnation(2), Seq(3))
    ingest.on_stream_started()
    actions = ingest.on_batch(batch(3, 5, life=2), 0.0)
    assert actions[-1] == Swap(SECOND, FIRST)
    assert [a.generation for a in actions if isinstance(a, Apply)] == [SECOND]
    assert (ingest.incarnation, ingest.seq, ingest.exactness) == (2, 5, Exactness.EXACT)


def test_late_messages_of_a_dead_life_are_refused(ingest: Ingest) -> None:
    ingest.on_snapshot_needed(SnapshotNeeded(Incarnation(2), Seq(3)), 0.0)
    ingest.on_snapshot_started()
    assert ingest.on_page(page(9, life=1), 0.0) == []
    ingest.on_page(page(3, life=2), 0.0)
    assert ingest.on_batch(batch(1, 9, life=1), 0.0) == []
    assert ingest.on_report(report(9, life=1), EMPTY, 0.0) == []
    assert ingest.on_snapshot_needed(SnapshotNeeded(Incarnation(1), Seq(9)), 0.0) == []
    assert ingest.counts.stale == 4
    assert (ingest.incarnation, ingest.seq) == (2, 3)


def test_after_one_recovery_a_thousand_events_need_no_other(ingest: Ingest) -> None:
    assert ingest.on_snapshot_needed(SnapshotNeeded(Incarnation(1), Seq(50)), 0.0) == [
        FetchSnapshot()
    ]
    ingest.on_snapshot_started()
    ingest.on_page(page(50), 0.0)
    assert ingest.seq == 50
    for seq in range(51, 1051):
        assert applied(ingest.on_batch(batch(seq, seq), 0.0)) == [seq]
    assert (ingest.counts.snapshots, ingest.counts.gaps, ingest.seq) == (1, 0, 1050)


def test_swallowed_event_is_found_by_the_digest_and_repaired_without_a_loop(
    ingest: Ingest,
) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    now, fetches, resumes = 0.0, [], 0
    while now < 3600.0:  # the daemon's digest never agrees: a fault that no snapshot mends
        now += 1.0
        actions = ingest.on_report(report(2, blocks=9), EMPTY, now)
        if Resume() in actions:  # the buckets are compared once, and cannot be had
            resumes += 1
            ingest.on_stream_started()
        if FetchSnapshot() in actions:
            fetches.append(now)
            ingest.on_snapshot_started()
            ingest.on_page(page(2), now)
    assert (resumes, fetches[0]) == (1, 2.0)
    assert fetches[1] - fetches[0] >= REPAIR_FIRST_SECONDS
    assert 10 <= len(fetches) <= 20
    assert ingest.counts.digest_mismatches == len(fetches) or ingest.counts.digest_mismatches == (
        len(fetches) + 1
    )
    ingest.on_report(report(2), EMPTY, now)
    assert ingest.exactness is Exactness.EXACT


def test_broken_snapshot_leaves_no_hidden_rows_and_is_tried_later(ingest: Ingest) -> None:
    ingest.on_snapshot_needed(SnapshotNeeded(Incarnation(1), Seq(9)), 0.0)
    ingest.on_snapshot_started()
    ingest.on_page(page(9, is_last=False), 0.0)
    assert ingest.on_snapshot_failed(0.0) == [DropGeneration(FIRST)]
    assert not ingest.wants_snapshot(1.0)
    assert ingest.on_page(page(9), 1.0) == []
    assert ingest.wants_snapshot(REPAIR_FIRST_SECONDS)


def test_pages_of_two_snapshots_are_never_mixed(ingest: Ingest) -> None:
    ingest.on_snapshot_started()
    ingest.on_page(page(9, is_last=False), 0.0)
    assert ingest.on_page(page(10), 0.0) == [DropGeneration(FIRST)]
    assert ingest.on_page(page(9), 0.0) == []
    assert ingest.visible is None


def test_snapshot_overtaken_in_mid_fetch_is_not_taken_up_again_from_the_middle(
    ingest: Ingest,
) -> None:
    ingest.on_snapshot_started()
    ingest.on_page(page(9, is_last=False), 0.0)
    assert ingest.on_snapshot_needed(SnapshotNeeded(Incarnation(1), Seq(30)), 0.0) == [
        DropGeneration(FIRST),
        FetchSnapshot(),
    ]
    assert ingest.on_page(page(9), 0.0) == []
    assert ingest.visible is None
    assert ingest.wants_snapshot(0.0)


def test_new_life_heard_of_in_mid_fetch_drops_the_half_snapshot(ingest: Ingest) -> None:
    ingest.on_snapshot_started()
    ingest.on_page(page(9, is_last=False), 0.0)
    actions = ingest.on_batch(batch(4, 5, life=2), 0.0)
    assert actions == [DropGeneration(FIRST), FetchSnapshot()]
    assert ingest.on_page(page(9), 0.0) == []


def test_empty_node_is_exact_at_once(ingest: Ingest) -> None:
    ingest.on_report(report(0), EMPTY, 0.0)
    assert ingest.exactness is Exactness.EXACT
    assert applied(ingest.on_batch(batch(1, 1), 0.0)) == [1]


@pytest.mark.parametrize("life", [0, -1])
def test_incarnation_below_one_is_refused(ingest: Ingest, life: int) -> None:
    assert ingest.on_batch(batch(1, 1, life=life), 0.0) == []
    assert ingest.counts.stale == 1


def xors(*keys: int) -> tuple[BucketXors, ...]:
    """What buckets add up to on a node that has these blocks in DRAM."""
    sums = [0] * BUCKETS
    for key in keys:
        sums[bucket_of(key)] ^= key
    return (BucketXors(Tier.DRAM, tuple(sums)), BucketXors(Tier.SSD, (0,) * BUCKETS))


def rows(seq: int, *keys: int, life: int = 1) -> BucketRows:
    """One bucket's, of a node that has these blocks there."""
    return BucketRows(
        NODE, Incarnation(life), Seq(seq), Tier.DRAM, bucket_of(keys[0]), as_keys(keys)
    )


def differ(ingest: Ingest, *buckets: int) -> list[Action]:
    """Take it to where these buckets are known to differ, at event 2."""
    ingest.on_batch(batch(1, 2), 0.0)
    assert ingest.on_report(report(2, blocks=9), EMPTY, 1.0) == [Resume()]
    assert ingest.position() == Position(Incarnation(1), Seq(3), wants_bucket_xors=True)
    ingest.on_stream_started()
    told = replace(report(2, blocks=9), bucket_xors=xors(1, 2, 3))
    assert ingest.on_report(told, EMPTY, 1.0) == [CompareBuckets(FIRST, told.bucket_xors)]
    choices = (BucketChoice(Tier.DRAM, tuple(sorted(buckets))),) if buckets else ()
    return ingest.on_compared(FIRST, Seq(2), choices, 1.0)


def test_mismatch_asks_for_bucket_sums_and_then_for_the_rows_of_those_that_differ(
    ingest: Ingest,
) -> None:
    wanted = (bucket_of(3), bucket_of(4))
    assert differ(ingest, *wanted) == [Resume()]
    assert ingest.exactness is Exactness.DEGRADED
    assert ingest.position() == Position(
        Incarnation(1), Seq(3), buckets=(BucketChoice(Tier.DRAM, tuple(sorted(wanted))),)
    )
    ingest.on_stream_started()
    assert applied(ingest.on_batch(batch(3, 5), 2.0)) == [3, 4, 5]
    (first,) = ingest.on_bucket_rows(rows(5, 3), 2.0)
    assert isinstance(first, ReplaceBucket)
    assert (first.generation, first.bucket, first.keys.tolist()) == (FIRST, bucket_of(3), [3])
    assert ingest.position().buckets == (BucketChoice(Tier.DRAM, (bucket_of(4),)),)
    ingest.on_bucket_rows(rows(5, 4), 2.0)
    assert ingest.exactness is Exactness.EXACT
    assert ingest.position() == Position(Incarnation(1), Seq(6))
    assert (ingest.counts.bucket_repairs, ingest.counts.repaired_buckets) == (1, 2)
    assert ingest.counts.snapshots == 0


def test_buckets_that_did_not_mend_it_are_followed_by_a_snapshot(ingest: Ingest) -> None:
    differ(ingest, bucket_of(3))
    ingest.on_stream_started()
    ingest.on_bucket_rows(rows(2, 3), 2.0)
    assert ingest.on_report(report(2, blocks=9), EMPTY, 3.0) == [FetchSnapshot()]
    assert ingest.counts.digest_mismatches == 2


@pytest.mark.parametrize("differing", [(), tuple(range(MOST_REPAIRED + 1))])
def test_too_many_or_no_buckets_that_differ_take_a_snapshot(
    ingest: Ingest, differing: tuple[int, ...]
) -> None:
    assert differ(ingest, *differing) == [FetchSnapshot()]


def test_older_daemon_that_says_nothing_of_buckets_is_asked_for_a_snapshot(
    ingest: Ingest,
) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    ingest.on_report(report(2, blocks=9), EMPTY, 1.0)
    assert ingest.on_report(report(2, blocks=9), EMPTY, 1.0) == [], "the old stream's"
    ingest.on_stream_started()
    assert ingest.on_report(report(2, blocks=9), EMPTY, 1.0) == [FetchSnapshot()]


def test_rows_that_changed_under_the_comparison_are_compared_again(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    ingest.on_report(report(2, blocks=9), EMPTY, 1.0)
    ingest.on_stream_started()
    ingest.on_report(replace(report(2, blocks=9), bucket_xors=xors(1)), EMPTY, 1.0)
    ingest.on_batch(batch(3, 3), 1.0)  # another stream of the same node
    assert ingest.on_compared(FIRST, Seq(2), (BucketChoice(Tier.DRAM, (1,)),), 1.0) == [Resume()]
    assert ingest.position() == Position(Incarnation(1), Seq(4), wants_bucket_xors=True)


def test_comparison_whose_stream_broke_off_is_asked_for_again(ingest: Ingest) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    ingest.on_report(report(2, blocks=9), EMPTY, 1.0)
    told = replace(report(2, blocks=9), bucket_xors=xors(1))
    for _ in range(3):
        assert ingest.position().wants_bucket_xors
        ingest.on_stream_started()
        assert ingest.on_report(told, EMPTY, 1.0) == [CompareBuckets(FIRST, told.bucket_xors)]


def test_rows_out_of_stream_order_are_refused(ingest: Ingest) -> None:
    differ(ingest, bucket_of(3))
    ingest.on_stream_started()
    assert ingest.on_bucket_rows(rows(4, 3), 2.0) == [Resume()], "events 3 and 4 are missing"
    ingest.on_stream_started()
    ingest.on_batch(batch(3, 5), 2.0)
    assert ingest.on_bucket_rows(rows(4, 3), 2.0) == [], "event 5 is in the rows already"
    assert ingest.on_bucket_rows(rows(5, 77), 2.0) == [], "nobody asked for that bucket"
    assert ingest.counts.stale == 2
    assert len(ingest.on_bucket_rows(rows(5, 3), 2.0)) == 1


def test_rows_that_never_come_end_in_a_snapshot(ingest: Ingest) -> None:
    differ(ingest, bucket_of(3))
    ingest.on_stream_started()
    late = 1.0 + BUCKET_REPAIR_SECONDS
    assert ingest.on_report(report(2, blocks=9), EMPTY, late - 1) == []
    assert ingest.on_report(report(2, blocks=9), EMPTY, late) == [FetchSnapshot()]


def test_new_life_ends_the_repair_of_the_old_one(ingest: Ingest) -> None:
    differ(ingest, bucket_of(3))
    ingest.on_stream_started()
    assert ingest.on_bucket_rows(rows(2, 3, life=2), 2.0) == [FetchSnapshot()]
    assert ingest.position() == Position(Incarnation(1), Seq(3))
    assert ingest.on_bucket_rows(rows(2, 3), 2.0) == []


def test_audit_that_agrees_ends_the_repair(ingest: Ingest) -> None:
    differ(ingest, bucket_of(3))
    ingest.on_stream_started()
    ingest.on_report(report(2), EMPTY, 2.0)
    assert ingest.exactness is Exactness.EXACT
    assert ingest.position() == Position(Incarnation(1), Seq(3))
    assert ingest.on_report(report(2, blocks=9), EMPTY, 3.0) == [Resume()], "tried anew"


def test_node_that_was_away_for_long_is_asked_for_its_snapshot_as_soon_as_it_answers(
    ingest: Ingest,
) -> None:
    ingest.on_batch(batch(1, 2), 0.0)
    ingest.on_rows_lost(30.0)
    for attempt in range(40):  # nobody answers
        now = 30.0 + 8 * attempt
        assert ingest.wants_snapshot(now)
        ingest.on_snapshot_started()
        assert ingest.on_snapshot_unanswered(now) == []
    assert ingest.on_report(report(2, blocks=9), EMPTY, 400.0) == [FetchSnapshot()]
    ingest.on_snapshot_started()
    ingest.on_page(page(2, is_last=False), 400.0)
    assert ingest.on_snapshot_unanswered(400.0) == [DropGeneration(SECOND)]
    assert ingest.counts.failed_snapshots == 41
