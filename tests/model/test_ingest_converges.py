"""A daemon with a random history, a channel that misbehaves: the index follows exactly.

At every moment the visible rows are those that the daemon had at the (incarnation, seq) that the
index claims, whatever was dropped, repeated, reordered or delivered late; the incarnation never
goes back; and once the channel behaves, the index arrives at the daemon's truth.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberkv_proto.events import EventBatch, SnapshotNeeded, SnapshotPage
from emberkv_proto.types import NodeReport, Tier
from global_index.dict_index import DictIndex
from global_index.directory import NodeDirectory, StreamStep
from global_index.index import BlockIndex
from global_index.ingest import Exactness
from global_index.membership import Liveness, Membership
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex
from tests.helpers.model_daemon import TIERS, ModelDaemon

ADDRESS = "127.0.0.1:1"
UNIVERSE = 40
BLOCKS = st.sets(st.integers(1, UNIVERSE), min_size=1, max_size=8)
Message = EventBatch | NodeReport | SnapshotNeeded
Rows = dict[Tier, frozenset[int]]


class UnreliableChannel(RuleBasedStateMachine):
    make_index: type[BlockIndex] = DictIndex

    def __init__(self) -> None:
        super().__init__()
        self.daemon = ModelDaemon("n1", ring_events=8)
        self.directory = NodeDirectory(self.make_index(1024), Membership(3.0, 30.0))
        self.directory.add_source(ADDRESS)
        self.now = 0.0
        self.truth: dict[tuple[int, int], Rows] = {}
        self.sent: list[Message] = []
        self.flying: list[Message] = []
        self.old_pages: list[SnapshotPage] = []
        self.cursor = 1
        self.dram_lost_in: int | None = None
        self.last_incarnation = 0
        self.note()
        self.open_stream()

    def note(self) -> None:
        for seq in (self.daemon.seq,):
            self.truth[self.daemon.incarnation, seq] = {
                tier: frozenset(self.daemon.rows[tier]) for tier in TIERS
            }

    # The daemon

    @rule(tier=st.sampled_from(TIERS), blocks=BLOCKS)
    def store(self, tier: Tier, blocks: set[int]) -> None:
        self.daemon.store(tier, blocks)
        self.note()

    @rule(tier=st.sampled_from(TIERS), blocks=BLOCKS)
    def remove(self, tier: Tier, blocks: set[int]) -> None:
        self.daemon.remove(tier, blocks)
        self.note()

    @rule(tier=st.sampled_from(TIERS))
    def clear(self, tier: Tier) -> None:
        self.daemon.clear(tier)
        self.note()

    @rule(loses=st.sampled_from([(), (Tier.DRAM,), TIERS]))
    def restart(self, loses: tuple[Tier, ...]) -> None:
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
        if self.daemon.can_replay(position.incarnation, position.from_seq):
            self.cursor = position.from_seq
        else:
            self.cursor = self.daemon.seq + 1
            self.send(self.daemon.snapshot_needed())

    def send(self, message: Message) -> None:
        self.flying.append(message)
        self.sent.append(message)

    @rule(size=st.integers(1, 4))
    def pump(self, size: int) -> None:
        while self.cursor <= self.daemon.seq:
            last = min(self.daemon.seq, self.cursor + size - 1)
            self.send(self.daemon.batch(self.cursor, last))
            self.cursor = last + 1
        self.send(self.daemon.report())

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), count=st.integers(1, 8))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if self.flying:
                self.give(self.flying.pop(0), data)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), number=st.integers(0, 20))
    def deliver_out_of_order(self, data: st.DataObject, number: int) -> None:
        self.give(self.flying.pop(number % len(self.flying)), data)

    @precondition(lambda self: self.flying)
    @rule(number=st.integers(0, 20))
    def drop(self, number: int) -> None:
        self.flying.pop(number % len(self.flying))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), number=st.integers(0, 500))
    def deliver_again_late(self, data: st.DataObject, number: int) -> None:
        self.give(self.sent[number % len(self.sent)], data)

    @precondition(lambda self: self.old_pages)
    @rule(number=st.integers(0, 500))
    def deliver_page_late(self, number: int) -> None:
        self.directory.on_page(ADDRESS, self.old_pages[number % len(self.old_pages)], self.now)

    @rule()
    def connection_breaks(self) -> None:
        self.open_stream()

    @rule(seconds=st.sampled_from([0.5, 4.0, 40.0]))
    def silence(self, seconds: float) -> None:
        self.now += seconds
        self.directory.tick(self.now)
        if self.liveness() is Liveness.GONE:
            self.dram_lost_in = self.generation()
        self.directory.sweep()

    def give(self, message: Message, data: st.DataObject | None) -> None:
        self.now += 0.01
        match message:
            case EventBatch():
                step = self.directory.on_batch(ADDRESS, message, self.now, self.now)
            case NodeReport():
                step = self.directory.on_report(ADDRESS, message, self.now, self.now)
            case SnapshotNeeded():
                step = self.directory.on_snapshot_needed(ADDRESS, message, self.now)
        if step is StreamStep.SNAPSHOT:
            self.fetch_snapshot(data)
        if step is not StreamStep.CONTINUE:
            self.open_stream()

    def fetch_snapshot(self, data: st.DataObject | None) -> None:
        pages = self.daemon.pages(page_keys=5)
        arrived = len(pages)
        if data and data.draw(st.booleans(), "snapshot breaks"):
            arrived = data.draw(st.integers(0, len(pages) - 1), "pages before the break")
        self.directory.on_snapshot_started(ADDRESS)
        for page in pages[:arrived]:
            self.directory.on_page(ADDRESS, page, self.now)
        if data and data.draw(st.booleans(), "events during the snapshot"):
            self.store(Tier.DRAM, {1, 2})
        self.directory.on_snapshot_ended(ADDRESS, self.now)
        self.old_pages += pages

    # What must hold

    def generation(self) -> int | None:
        node = self.directory._nodes.get(self.daemon.node_id)
        return node.ingest.visible if node else None

    def liveness(self) -> Liveness | None:
        nodes = self.directory.nodes(self.now)
        return nodes[0].liveness if nodes else None

    def visible_rows(self) -> Rows:
        universe = np.arange(1, UNIVERSE + 1, dtype=np.uint64)
        (trace,) = self.directory.explain(universe)
        return {
            tier: frozenset(b for b, held in enumerate(trace.tiers, start=1) if tier in held)
            for tier in TIERS
        }

    @invariant()
    def visible_rows_are_what_the_index_claims(self) -> None:
        self.directory.check_integrity()
        nodes = self.directory.nodes(self.now)
        if not nodes:
            return
        (node,) = nodes
        assert node.incarnation >= self.last_incarnation, "rows of a dead life came back"
        self.last_incarnation = node.incarnation
        if node.exactness is Exactness.SYNCING:
            assert not any(self.visible_rows().values())
            return
        if self.dram_lost_in != self.generation():
            self.dram_lost_in = None
        rows, truth = self.visible_rows(), self.truth[node.incarnation, node.seq]
        assert rows[Tier.SSD] == truth[Tier.SSD]
        if self.dram_lost_in is None:
            assert rows[Tier.DRAM] == truth[Tier.DRAM]
        else:
            assert node.exactness is Exactness.DEGRADED

    def teardown(self) -> None:
        for _ in range(12):  # the channel behaves; time enough for every back-off
            self.now += 301.0
            self.pump(3)
            while self.flying:
                self.give(self.flying.pop(0), None)
            self.visible_rows_are_what_the_index_claims()
        (node,) = self.directory.nodes(self.now)
        assert (node.incarnation, node.seq) == (self.daemon.incarnation, self.daemon.seq)
        assert node.exactness is Exactness.EXACT
        assert node.liveness is Liveness.OK
        assert self.visible_rows() == {t: frozenset(self.daemon.rows[t]) for t in TIERS}
        while self.directory.sweep():
            pass
        self.directory.check_integrity()
        oracle = Counter(block for tier in TIERS for block in self.daemon.rows[tier])
        assert self.directory._index.size().blocks == len(oracle), "old rows were left behind"


class UnreliableChannelNumba(UnreliableChannel):
    make_index = MemoryIndex


class UnreliableChannelNaive(UnreliableChannel):
    make_index = NaiveIndex


@pytest.mark.slow
class TestPythonIndex(UnreliableChannel.TestCase):
    settings = settings(max_examples=70, stateful_step_count=40)


@pytest.mark.slow
class TestNumbaIndex(UnreliableChannelNumba.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestNaiveIndex(UnreliableChannelNaive.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30)
