"""A daemon with a random history, a channel that misbehaves: the index follows exactly.

At every moment the visible rows are those that the daemon had at the (incarnation, seq) that the
index claims, whatever was dropped, repeated, reordered or delivered late; the incarnation never
goes back; and once the channel behaves, the index arrives at the daemon's truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from emberkv_proto.events import BucketRows, EventBatch, SnapshotNeeded, SnapshotPage
from emberkv_proto.types import BucketChoice, NodeReport, Tier
from global_index.directory import NodeDirectory, StreamStep
from global_index.index import BlockIndex
from global_index.ingest import Exactness
from global_index.membership import Liveness, Membership
from tests.helpers.model_daemon import TIERS, ModelDaemon, as_keys

ADDRESS = "127.0.0.1:1"
UNIVERSE = sorted(int(key) for key in np.random.default_rng(7).integers(1, 2**64, 40, np.uint64))
"""Keys as wide as hashes are: half of them are over 2^63."""
STEPS = {
    "store": 4,
    "remove": 3,
    "clear": 1,
    "restart": 1,
    "pump": 6,
    "deliver": 9,
    "deliver_out_of_order": 3,
    "drop": 3,
    "deliver_again_late": 4,
    "deliver_page_late": 2,
    "connection_breaks": 1,
    "silence": 1,
    "drift": 1,
    "operator_removes_node": 1,
}
"""What may happen next, and how often."""
WEIGHTED = [step for step, weight in STEPS.items() for _ in range(weight)]
LENGTHS = (50, 120)
Message = EventBatch | NodeReport | BucketRows | SnapshotNeeded
Rows = dict[Tier, frozenset[int]]


class UnreliableChannel:
    """A daemon, a stream that misbehaves, and the index that listens. Each step is a method."""

    def __init__(self, index: BlockIndex, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = index
        self.daemon = ModelDaemon("n1", ring_events=8)
        self.directory = NodeDirectory(index, Membership(3.0, 30.0))
        self.directory.add_source(ADDRESS)
        self.now = 0.0
        self.truth: dict[tuple[int, int], Rows] = {}
        self.sent: list[Message] = []
        self.flying: list[Message] = []
        self.old_pages: list[SnapshotPage] = []
        self.cursor = 1
        self.is_calm = False
        self.dram_lost_in: int | None = None
        self.bucket_repairs = self.seen_repairs = 0
        self.checks = 0
        self.has_drifted = False
        self.knows_buckets = self.random.random() < 0.8
        self.wants_xors = False
        self.wanted: tuple[BucketChoice, ...] = ()
        self.last_incarnation = 0
        self.note()
        self.open_stream()

    def note(self) -> None:
        self.truth[self.daemon.incarnation, self.daemon.seq] = {
            tier: frozenset(self.daemon.rows[tier]) for tier in TIERS
        }

    def run(self, script: Sequence[str]) -> None:
        for step in script:
            getattr(self, step)()
            self.visible_rows_are_what_the_index_claims()
        self.settle()
        self.mend()

    def blocks(self) -> set[int]:
        return set(self.random.sample(UNIVERSE, self.random.randint(1, 8)))

    def tier(self) -> Tier:
        return self.random.choice(TIERS)

    # The daemon

    def store(self) -> None:
        self.daemon.store(self.tier(), self.blocks())
        self.note()

    def remove(self) -> None:
        self.daemon.remove(self.tier(), self.blocks())
        self.note()

    def clear(self) -> None:
        self.daemon.clear(self.tier())
        self.note()

    def restart(self) -> None:
        loses = self.random.choice([(), (Tier.DRAM,), TIERS])
        survived = {
            tier: frozenset() if tier in loses else frozenset(self.daemon.rows[tier])
            for tier in TIERS
        }
        self.daemon.restart(loses=loses)
        life = self.daemon.incarnation
        # DRAM is announced first, then SSD: one event each, none for an empty tier.
        steps = [Tier.DRAM] * bool(survived[Tier.DRAM]) + [Tier.SSD] * bool(survived[Tier.SSD])
        shown: Rows = {tier: frozenset() for tier in TIERS}
        self.truth[life, 0] = dict(shown)
        for number, tier in enumerate(steps, start=1):
            shown[tier] = survived[tier]
            self.truth[life, number] = dict(shown)
        self.open_stream()

    # The channel

    def open_stream(self) -> None:
        self.flying.clear()
        position = self.directory.position(ADDRESS)
        self.directory.on_stream_started(ADDRESS)
        self.wants_xors = self.knows_buckets and position.wants_bucket_xors
        self.wanted = position.buckets if self.knows_buckets else ()
        if self.daemon.can_replay(position.incarnation, position.from_seq):
            self.cursor = position.from_seq
        else:
            self.cursor = self.daemon.seq + 1
            self.send(self.daemon.snapshot_needed())

    def send(self, message: Message) -> None:
        self.flying.append(message)
        self.sent.append(message)

    def pump(self) -> None:
        size = self.random.randint(1, 4)
        while self.cursor <= self.daemon.seq:
            last = min(self.daemon.seq, self.cursor + size - 1)
            self.send(self.daemon.batch(self.cursor, last))
            self.cursor = last + 1
        if self.is_calm or self.random.random() < 0.7:
            for rows in self.daemon.bucket_rows(self.wanted):
                self.send(rows)
            self.wanted = ()
        self.send(self.daemon.report(with_xors=self.wants_xors))
        self.wants_xors = False

    def deliver(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            if self.flying:
                self.give(self.flying.pop(0))

    def deliver_out_of_order(self) -> None:
        if self.flying:
            self.give(self.flying.pop(self.random.randrange(len(self.flying))))

    def drop(self) -> None:
        if self.flying:
            self.flying.pop(self.random.randrange(len(self.flying)))

    def deliver_again_late(self) -> None:
        if self.sent:
            self.give(self.random.choice(self.sent))

    def deliver_page_late(self) -> None:
        if self.old_pages:
            self.directory.on_page(ADDRESS, self.random.choice(self.old_pages), self.now)

    def connection_breaks(self) -> None:
        self.open_stream()

    def silence(self) -> None:
        self.now += self.random.choice([0.5, 4.0, 40.0])
        self.directory.tick(self.now)
        if self.liveness() is Liveness.GONE:
            self.dram_lost_in = self.generation()
        self.directory.sweep()

    def drift(self) -> None:
        """A row of the index changes by itself."""
        node = self.directory._nodes.get(self.daemon.node_id)
        if node is None or node.visible is None:
            return
        change = self.random.choice((self.index.apply_stored, self.index.apply_removed))
        change(node.visible.holder, self.tier(), as_keys(self.blocks()))
        self.has_drifted = True

    def operator_removes_node(self) -> None:
        self.directory.remove_node(self.daemon.node_id)
        assert self.directory.nodes(self.now) == []
        assert self.directory.query(as_keys(UNIVERSE)) == []
        self.last_incarnation, self.dram_lost_in, self.has_drifted = 0, None, False
        self.directory.add_source(ADDRESS)
        if self.random.random() < 0.5:
            self.directory.readmit(self.daemon.node_id)
        self.open_stream()

    def give(self, message: Message) -> None:
        self.now += 0.01
        match message:
            case EventBatch():
                step = self.directory.on_batch(ADDRESS, message, self.now, self.now)
            case NodeReport():
                step = self.directory.on_report(ADDRESS, message, self.now, self.now)
            case BucketRows():
                step = self.directory.on_bucket_rows(ADDRESS, message, self.now)
            case SnapshotNeeded():
                step = self.directory.on_snapshot_needed(ADDRESS, message, self.now)
        while step is StreamStep.COMPARE:
            if not self.is_calm and self.random.random() < 0.01:
                self.directory.on_batch(ADDRESS, self.some_batch(), self.now, self.now)
            step = self.directory.compare(ADDRESS, self.now)
        if step is StreamStep.SNAPSHOT:
            self.fetch_snapshot()
        if step is not StreamStep.CONTINUE:
            self.open_stream()

    def fetch_snapshot(self) -> None:
        """It may break off; events and late messages of other streams may come in between."""
        pages = self.daemon.pages(page_keys=5)
        arrived = len(pages)
        if not self.is_calm and self.random.random() < 0.3:
            arrived = self.random.randrange(len(pages))
        self.directory.on_snapshot_started(ADDRESS)
        for page in pages[:arrived]:
            self.directory.on_page(ADDRESS, page, self.now)
            if not self.is_calm and self.random.random() < 0.3:
                self.directory.on_batch(ADDRESS, self.some_batch(), self.now, self.now)
                self.visible_rows_are_what_the_index_claims()
        if not self.is_calm and self.random.random() < 0.5:
            self.store()
        if arrived:
            self.directory.on_snapshot_ended(ADDRESS, self.now)
        else:
            self.directory.on_snapshot_unanswered(ADDRESS, self.now)
        self.old_pages += pages

    def some_batch(self) -> EventBatch:
        batches = [message for message in self.sent if isinstance(message, EventBatch)]
        return self.random.choice(batches or [self.daemon.batch(1, 1)])

    # What must hold

    def generation(self) -> int | None:
        node = self.directory._nodes.get(self.daemon.node_id)
        return node.ingest.visible if node else None

    def liveness(self) -> Liveness | None:
        nodes = self.directory.nodes(self.now)
        return nodes[0].liveness if nodes else None

    def visible_rows(self) -> Rows:
        node = self.directory._nodes[self.daemon.node_id]
        if node.visible is None:
            return {tier: frozenset() for tier in TIERS}
        holder = node.visible.holder
        return {tier: frozenset(self.index.rows(holder, tier).tolist()) for tier in TIERS}

    def visible_rows_are_what_the_index_claims(self) -> None:
        self.checks += 1
        if self.checks % 4 == 0:
            self.directory.check_integrity()
        nodes = self.directory.nodes(self.now)
        if not nodes:
            return
        (node,) = nodes
        assert node.incarnation >= self.last_incarnation, "rows of a dead life came back"
        self.last_incarnation = node.incarnation
        if node.counts.bucket_repairs > self.seen_repairs:
            self.bucket_repairs += 1
        self.seen_repairs = node.counts.bucket_repairs
        if node.exactness is Exactness.SYNCING:
            assert not any(self.visible_rows().values())
            return
        if self.dram_lost_in != self.generation():
            self.dram_lost_in = None
        rows, truth = self.visible_rows(), self.truth[node.incarnation, node.seq]
        if self.has_drifted:
            self.has_drifted = rows != truth
            return
        assert rows[Tier.SSD] == truth[Tier.SSD]
        if node.exactness is Exactness.EXACT:
            self.dram_lost_in = None  # an audit agreed: there was nothing to lose
        if self.dram_lost_in is None:
            assert rows[Tier.DRAM] == truth[Tier.DRAM]

    def mend(self) -> None:
        """Rows drift on a calm channel while the node works on: only what differs is repaired."""
        for _ in range(2):
            (before,) = (node.counts.snapshots for node in self.directory.nodes(self.now))
            self.drift()
            for _ in range(6):
                self.now += 1.0
                self.random.choice((self.store, self.remove, lambda: None))()
                self.pump()
                while self.flying:
                    self.give(self.flying.pop(0))
                self.visible_rows_are_what_the_index_claims()
            assert not self.has_drifted
            (node,) = self.directory.nodes(self.now)
            assert node.exactness is Exactness.EXACT
            assert not self.knows_buckets or node.counts.snapshots == before

    def settle(self) -> None:
        self.is_calm = True
        self.directory.readmit(self.daemon.node_id)
        for turn in range(14):  # the channel behaves; time enough for every back-off
            self.now += 1.0 if turn < 4 else 301.0
            self.pump()
            while self.flying:
                self.give(self.flying.pop(0))
            self.visible_rows_are_what_the_index_claims()
        (node,) = self.directory.nodes(self.now)
        assert (node.incarnation, node.seq) == (self.daemon.incarnation, self.daemon.seq)
        assert node.exactness is Exactness.EXACT
        assert node.liveness is Liveness.OK
        assert self.visible_rows() == {t: frozenset(self.daemon.rows[t]) for t in TIERS}
        (trace,) = self.directory.explain(as_keys(UNIVERSE))
        for block, held in zip(UNIVERSE, trace.tiers, strict=True):
            assert held == tuple(tier for tier in TIERS if block in self.daemon.rows[tier])
        while self.directory.sweep():
            pass
        self.directory.check_integrity()
        expected = {block for tier in TIERS for block in self.daemon.rows[tier]}
        assert self.index.size().blocks == len(expected), "old rows were left behind"
