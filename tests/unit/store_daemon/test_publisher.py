"""The event log: order, replay, snapshots, and digests that are exact at their seq."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.aio import timeout
from emberkv_proto.buckets import bucket_numbers
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    EventBatch,
    SnapshotNeeded,
    SnapshotPage,
    TierCleared,
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
from store_daemon import publisher as publisher_module
from store_daemon.publisher import (
    MAX_KEYS_PER_BATCH,
    MAX_KEYS_PER_PAGE,
    MAX_SCANS,
    MAX_SNAPSHOTS,
    BucketWish,
    NodeFacts,
    Published,
    Publisher,
)
from tests.helpers.peer_doubles import MemoryResidency, as_keys, xor_of

LIFE = Incarnation(5)


@dataclass
class Follower:
    """A subscriber's copy of the node: applies events and audits every report."""

    next_seq: int = 1
    tiers: dict[Tier, set[int]] = field(default_factory=lambda: {Tier.DRAM: set(), Tier.SSD: set()})
    reports: list[NodeReport] = field(default_factory=list)
    needed: SnapshotNeeded | None = None

    def take(self, published: Published) -> None:
        match published:
            case EventBatch():
                assert published.seq_first == self.next_seq, "gap or repetition"
                for event in published.events:
                    self._apply(event)
                self.next_seq = published.seq_last + 1
            case NodeReport():
                assert published.seq == self.next_seq - 1, "report out of place"
                for digest in published.tiers:
                    held = self.tiers[digest.tier]
                    assert (digest.blocks, digest.xor) == (len(held), xor_of(held))
                self.reports.append(published)
            case SnapshotNeeded():
                self.needed = published

    def take_pages(self, pages: list[SnapshotPage]) -> None:
        assert [page.is_last for page in pages] == [False] * (len(pages) - 1) + [True]
        assert len({page.seq for page in pages}) == 1
        self.tiers = {Tier.DRAM: set(), Tier.SSD: set()}
        for page in pages:
            self.tiers[page.tier] |= set(page.keys.tolist())
        self.next_seq = pages[0].seq + 1

    def _apply(self, event: BlocksStored | BlocksRemoved | TierCleared) -> None:
        held = self.tiers[event.tier]
        match event:
            case BlocksStored(keys=keys):
                assert held.isdisjoint(keys.tolist())
                held |= set(keys.tolist())
            case BlocksRemoved(keys=keys):
                assert held.issuperset(keys.tolist())
                held -= set(keys.tolist())
            case TierCleared():
                held.clear()


def random_keys(count: int) -> list[int]:
    found: list[int] = np.random.default_rng(1).integers(1, 2**64, count, np.uint64).tolist()
    return found


def bucket_number(key: int) -> int:
    return int(bucket_numbers(as_keys({key}))[0])


def make(ring_events: int = 64, **options: float) -> tuple[Publisher, MemoryResidency]:
    residency = MemoryResidency()
    publisher = Publisher(
        NodeId("n"),
        LIFE,
        residency,
        ring_events=ring_events,
        batch_seconds=options.get("batch_seconds", 0.0),
        heartbeat_seconds=options.get("heartbeat_seconds", 30.0),
        unix_clock=lambda: 1000.0,
    )
    residency.sink = publisher
    return publisher, residency


async def follow(
    publisher: Publisher, follower: Follower, until_seq: int, reports: int = 0
) -> None:
    """Take from a subscription until both the seq and the number of reports are reached."""
    stream = publisher.subscribe(LIFE, Seq(follower.next_seq))
    async with timeout(30), aclosing(stream):
        async for published in stream:
            follower.take(published)
            if follower.needed or (
                follower.next_seq > until_seq and len(follower.reports) >= reports
            ):
                return


async def pages_of(publisher: Publisher) -> list[SnapshotPage]:
    stream = publisher.snapshot_pages()
    async with aclosing(stream):
        return [page async for page in stream]


async def test_first_event_is_1_and_replay_goes_over_into_live_without_a_gap() -> None:
    publisher, residency = make()
    residency.store(Tier.DRAM, {1, 2, 3})
    residency.remove(Tier.DRAM, {2})
    follower = Follower()
    following = asyncio.create_task(follow(publisher, follower, until_seq=4))
    await asyncio.sleep(0.02)
    assert follower.next_seq == 3
    residency.store(Tier.SSD, {9})
    residency.clear(Tier.DRAM)
    await following
    assert follower.tiers == {Tier.DRAM: set(), Tier.SSD: {9}}
    publisher.check_integrity()


async def test_from_seq_0_counts_as_1_and_the_next_seq_replays_nothing() -> None:
    publisher, residency = make()
    residency.store(Tier.DRAM, {1})
    stream = publisher.subscribe(LIFE, Seq(0))
    async with timeout(30), aclosing(stream):
        report_or_batch = await stream.__anext__()
        assert isinstance(report_or_batch, EventBatch)
        assert report_or_batch.seq_first == 1
    stream = publisher.subscribe(LIFE, Seq(2))
    async with timeout(30), aclosing(stream):
        assert isinstance(await stream.__anext__(), NodeReport)


@pytest.mark.parametrize(
    ("incarnation", "from_seq"), [(0, 0), (4, 1), (6, 3), (5, 5), (5, 1 << 60)]
)
async def test_other_incarnation_or_a_seq_of_the_future_needs_a_snapshot(
    incarnation: int, from_seq: int
) -> None:
    publisher, residency = make()
    for key in (1, 2, 3):
        residency.store(Tier.DRAM, {key})
    stream = publisher.subscribe(Incarnation(incarnation), Seq(from_seq))
    assert [p async for p in stream] == [SnapshotNeeded(LIFE, Seq(3), NodeId("n"))]
    assert publisher.subscribers == 0


async def test_ring_keeps_exactly_its_newest_events() -> None:
    publisher, residency = make(ring_events=16)
    for key in range(1, 21):
        residency.store(Tier.DRAM, {key})
    assert (publisher.oldest_seq, publisher.seq) == (5, 20)
    late = Follower(next_seq=4)
    await follow(publisher, late, until_seq=20)
    assert late.needed == SnapshotNeeded(LIFE, Seq(20), NodeId("n"))
    in_time = Follower(next_seq=5, tiers={Tier.DRAM: {1, 2, 3, 4}, Tier.SSD: set()})
    await follow(publisher, in_time, until_seq=20)
    assert in_time.needed is None
    assert in_time.tiers[Tier.DRAM] == set(range(1, 21))
    publisher.check_integrity()


async def test_slow_subscriber_never_holds_emit_and_is_sent_to_a_snapshot_when_passed() -> None:
    publisher, residency = make(ring_events=16)
    residency.store(Tier.DRAM, {1})
    slow = Follower()
    stream = publisher.subscribe(LIFE, Seq(1))
    async with timeout(30), aclosing(stream):
        slow.take(await stream.__anext__())
        for key in range(2, 200):  # nobody takes these
            residency.store(Tier.DRAM, {key})
        async for published in stream:
            slow.take(published)
        assert slow.needed == SnapshotNeeded(LIFE, Seq(199), NodeId("n"))
    slow.take_pages(await pages_of(publisher))
    slow.needed = None
    residency.remove(Tier.DRAM, {7, 8})
    await follow(publisher, slow, until_seq=200, reports=1)
    assert slow.tiers[Tier.DRAM] == set(range(1, 200)) - {7, 8}


async def test_reports_come_by_heartbeat_and_at_once_when_facts_change() -> None:
    publisher, _ = make(heartbeat_seconds=0.05)
    follower = Follower()
    await follow(publisher, follower, until_seq=0, reports=3)
    assert follower.reports[0].state == "recovering"

    publisher, _ = make(heartbeat_seconds=30.0)
    follower = Follower()
    following = asyncio.create_task(follow(publisher, follower, until_seq=0, reports=2))
    await asyncio.sleep(0.02)
    publisher.announce(NodeFacts("serving", (), "10.0.0.1:7100"))
    await following
    assert (follower.reports[1].state, follower.reports[1].grpc_address) == (
        "serving",
        "10.0.0.1:7100",
    )
    assert follower.reports[1].sent_unix_seconds == 1000.0


async def test_heartbeats_go_on_under_a_steady_flow_of_events() -> None:
    publisher, residency = make(ring_events=4096, heartbeat_seconds=0.02)
    follower = Follower()
    following = asyncio.create_task(follow(publisher, follower, until_seq=300, reports=5))
    for key in range(1, 301):
        residency.store(Tier.DRAM, {key})
        await asyncio.sleep(0.0005)
    await following


async def test_event_with_too_many_keys_becomes_several_and_batches_stay_bounded() -> None:
    publisher, residency = make(ring_events=64)
    residency.store(Tier.DRAM, set(range(1, 200_001)))
    assert publisher.seq == 4
    follower = Follower()
    stream = publisher.subscribe(LIFE, Seq(1))
    async with timeout(30), aclosing(stream):
        while follower.next_seq <= 4:
            published = await stream.__anext__()
            if isinstance(published, EventBatch):
                keys = [len(e.keys) for e in published.events if not isinstance(e, TierCleared)]
                assert sum(keys) <= MAX_KEYS_PER_BATCH
            follower.take(published)
    assert len(follower.tiers[Tier.DRAM]) == 200_000


async def test_snapshot_is_the_state_at_one_seq_whatever_happens_while_it_is_read() -> None:
    publisher, residency = make(ring_events=4096)
    residency.store(Tier.DRAM, set(range(1, MAX_KEYS_PER_PAGE * 2)))
    residency.store(Tier.SSD, {5})
    follower = Follower()
    pages = []
    stream = publisher.snapshot_pages()
    async with aclosing(stream):
        async for page in stream:
            pages.append(page)
            residency.remove(Tier.DRAM, {len(pages)})
            residency.store(Tier.SSD, {1000 + len(pages)})
    follower.take_pages(pages)
    assert follower.tiers == {Tier.DRAM: set(range(1, MAX_KEYS_PER_PAGE * 2)), Tier.SSD: {5}}
    await follow(publisher, follower, until_seq=publisher.seq, reports=1)
    assert follower.tiers == residency.resident
    publisher.check_integrity()


async def test_snapshot_of_an_empty_node_is_one_last_page() -> None:
    publisher, _ = make()
    pages = await pages_of(publisher)
    assert [(page.seq, len(page.keys), page.is_last) for page in pages] == [(0, 0, True)]


async def test_more_snapshots_than_allowed_wait_their_turn() -> None:
    publisher, residency = make()
    residency.store(Tier.DRAM, {1})
    residency.store(Tier.SSD, {2})
    held = [publisher.snapshot_pages() for _ in range(MAX_SNAPSHOTS)]
    for stream in held:
        await stream.__anext__()
    waiting = asyncio.create_task(pages_of(publisher))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await held[0].aclose()
    async with timeout(30):
        assert len(await waiting) == 2
    for stream in held[1:]:
        await stream.aclose()


class LateTeller(MemoryResidency):
    """Tells of what has happened when it is asked for digests, as the store does."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: set[int] = set()

    def digests(self) -> tuple[TierDigest, ...]:
        untold, self.untold = self.untold, set()
        if untold:
            self.store(Tier.DRAM, untold)
        return super().digests()


async def test_what_is_told_for_a_snapshot_or_a_report_is_within_its_seq() -> None:
    residency = LateTeller()
    publisher = residency.sink = Publisher(
        NodeId("n"), LIFE, residency, ring_events=64, batch_seconds=0.0, heartbeat_seconds=30.0
    )
    residency.store(Tier.DRAM, {1})
    residency.untold = {2}
    pages, follower = await pages_of(publisher), Follower()
    assert {page.seq for page in pages} == {2}
    follower.take_pages(pages)
    residency.untold = {3}
    await follow(publisher, follower, until_seq=3, reports=1)
    assert follower.tiers[Tier.DRAM] == {1, 2, 3}


async def test_rows_of_wished_buckets_come_in_stream_order_exact_at_their_seq() -> None:
    publisher, residency = make(ring_events=4096)
    universe = random_keys(600)
    bucket_of = {key: bucket_number(key) for key in universe}
    choose = random.Random(1)
    residency.store(Tier.DRAM, set(universe[:400]))
    residency.store(Tier.SSD, set(universe[200:]))
    buckets = tuple(range(0, 256, 5))
    wish = BucketWish(
        xors=True, rows=(BucketChoice(Tier.DRAM, buckets), BucketChoice(Tier.SSD, buckets))
    )
    follower, rows = Follower(), []
    stream = publisher.subscribe(LIFE, Seq(1), wish)
    async with timeout(50), aclosing(stream):
        async for published in stream:
            if isinstance(published, BucketRows):
                assert published.seq == follower.next_seq - 1, "rows out of place"
                held = follower.tiers[published.tier]
                of_bucket = {k for k in held if bucket_of[k] == published.bucket}
                assert published.keys.tolist() == sorted(of_bucket)
                rows.append((published.tier, published.bucket))
                if len(rows) == 2 * len(buckets):
                    break
                continue
            follower.take(published)
            some = set(choose.sample(universe, 20))
            change = choose.choice((residency.store, residency.remove))
            change(choose.choice((Tier.DRAM, Tier.SSD)), some)
            await asyncio.sleep(0)  # as one who writes it to a socket: the rows are gathered then
    assert rows == [(tier, b) for tier in (Tier.DRAM, Tier.SSD) for b in buckets]
    first, *others = follower.reports
    assert [digest.tier for digest in first.bucket_xors] == [Tier.DRAM, Tier.SSD]
    assert not any(report.bucket_xors for report in others)
    assert publisher.repairs == 1
    publisher.check_integrity()


async def test_bucket_xors_of_the_first_report_are_those_of_its_seq() -> None:
    publisher, residency = make()
    keys = random_keys(50)
    residency.store(Tier.DRAM, set(keys))
    residency.remove(Tier.DRAM, set(keys[:20]))
    stream = publisher.subscribe(LIFE, Seq(1), BucketWish(xors=True))
    async with timeout(30), aclosing(stream):
        report = next(
            p
            for p in [await stream.__anext__(), await stream.__anext__()]
            if isinstance(p, NodeReport)
        )
    expected = [0] * 256
    for key in keys[20:]:
        expected[bucket_number(key)] ^= key
    assert report.seq == 2
    assert report.bucket_xors[0] == BucketXors(Tier.DRAM, tuple(expected))


async def test_many_subscribers_that_repair_at_once_take_turns_and_events_flow_on() -> None:
    publisher, residency = make(ring_events=4096)
    residency.store(Tier.DRAM, set(random_keys(2000)))
    wish = BucketWish(rows=(BucketChoice(Tier.DRAM, (0, 1, 2)),))
    most = 0

    async def repair() -> None:
        nonlocal most
        rows = 0
        stream = publisher.subscribe(LIFE, Seq(2), wish)
        async with timeout(30), aclosing(stream):
            async for published in stream:
                most = max(most, len(publisher._scans))
                rows += isinstance(published, BucketRows)
                if rows == 3:
                    return

    repairs = [asyncio.create_task(repair()) for _ in range(20)]
    while not all(task.done() for task in repairs):
        residency.store(Tier.DRAM, {random.getrandbits(63)})
        await asyncio.sleep(0)
    await asyncio.gather(*repairs)
    assert 1 <= most <= MAX_SCANS
    assert publisher.repairs == 20
    assert not publisher._scans


async def test_bucket_too_large_for_a_message_needs_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "MAX_KEYS_PER_BUCKET", 2)
    publisher, residency = make()
    residency.store(Tier.DRAM, set(random_keys(2000)))
    wish = BucketWish(rows=(BucketChoice(Tier.DRAM, (0, 1, 2)),))
    stream = publisher.subscribe(LIFE, Seq(2), wish)
    async with timeout(30), aclosing(stream):
        *_, last = [published async for published in stream]
    assert last == SnapshotNeeded(LIFE, Seq(1), NodeId("n"))
    assert not publisher._scans


async def test_subscriber_that_leaves_in_mid_scan_leaves_nothing_behind() -> None:
    publisher, residency = make()
    residency.store(Tier.DRAM, set(random_keys(2000)))
    wish = BucketWish(rows=(BucketChoice(Tier.DRAM, (0, 1, 2)),))
    stream = publisher.subscribe(LIFE, Seq(1), wish)
    await stream.__anext__()
    await asyncio.sleep(0)
    await stream.aclose()
    assert not publisher._scans
    assert publisher.subscribers == 0


async def test_close_ends_subscriptions() -> None:
    publisher, _ = make()
    follower = Follower()
    following = asyncio.create_task(follow(publisher, follower, until_seq=99))
    await asyncio.sleep(0.02)
    assert publisher.subscribers == 1
    publisher.close()
    async with timeout(30):
        await following
    assert publisher.subscribers == 0


async def test_check_integrity_finds_a_change_that_was_not_emitted() -> None:
    publisher, residency = make()
    residency.store(Tier.DRAM, {1, 2})
    publisher.check_integrity()
    residency.resident[Tier.DRAM].discard(2)
    with pytest.raises(AssertionError, match="DRAM"):
        publisher.check_integrity()
    residency.resident[Tier.DRAM].add(3)  # same count, another key
    with pytest.raises(AssertionError, match="xor"):
        publisher.check_integrity()


KEYS = st.sets(st.integers(1, 30), min_size=1, max_size=6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from([Tier.DRAM, Tier.SSD]), KEYS),
        st.tuples(st.just("remove"), st.sampled_from([Tier.DRAM, Tier.SSD]), KEYS),
        st.tuples(st.just("clear"), st.sampled_from([Tier.DRAM, Tier.SSD]), KEYS),
        st.tuples(st.just("take"), st.just(Tier.DRAM), KEYS),
        st.tuples(st.just("reconnect"), st.just(Tier.DRAM), KEYS),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(CHANGES)
def test_any_interleaving_leaves_a_follower_equal_to_the_node(
    changes: list[tuple[str, Tier, set[int]]],
) -> None:
    """A follower that applies events and snapshots equals the node's state at every report."""

    async def play() -> None:
        publisher, residency = make(ring_events=16, heartbeat_seconds=1e-6)
        follower = Follower()
        stream = publisher.subscribe(LIFE, Seq(1))
        for what, tier, keys in changes:
            match what:
                case "store" if keys - residency.resident[tier]:
                    residency.store(tier, keys)
                case "remove" if keys & residency.resident[tier]:
                    residency.remove(tier, keys)
                case "clear":
                    residency.clear(tier)
                case "take":
                    follower.take(await stream.__anext__())
                case "reconnect":
                    await stream.aclose()
                    stream = publisher.subscribe(LIFE, Seq(follower.next_seq))
            if follower.needed is not None:
                await stream.aclose()
                follower.take_pages(await pages_of(publisher))
                follower.needed = None
                stream = publisher.subscribe(LIFE, Seq(follower.next_seq))
        await stream.aclose()
        await follow(publisher, follower, publisher.seq, len(follower.reports) + 1)
        if follower.needed is not None:
            follower.take_pages(await pages_of(publisher))
        assert follower.tiers == residency.resident
        publisher.check_integrity()

    asyncio.run(play())


def test_as_keys_of_an_empty_set_emits_no_event() -> None:
    publisher, _ = make()
    publisher.emit(BlocksStored(Tier.DRAM, as_keys(set())))
    assert publisher.seq == 0
