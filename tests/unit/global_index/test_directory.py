"""Nodes, sources and their rows, without sockets; every test ends in check_integrity()."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import BucketChoice, IndexKey, NodeHit, NodeId, Tier
from global_index.directory import NodeDirectory, StreamStep
from global_index.index import BlockIndex, Holder
from global_index.ingest import Exactness
from global_index.membership import Liveness, Membership
from global_index.memory_index import MemoryIndex
from tests.helpers.model_daemon import ModelDaemon, as_keys, bucket_of

CHAIN = as_keys(range(1, 21))


@pytest.fixture
def index() -> BlockIndex:
    return MemoryIndex(10_000)


@pytest.fixture
def directory(index: BlockIndex) -> Iterator[NodeDirectory]:
    directory = NodeDirectory(index, Membership(3.0, 30.0))
    for address in ("a:1", "b:1"):
        directory.add_source(address)
    yield directory
    directory.check_integrity()


def feed(directory: NodeDirectory, address: str, daemon: ModelDaemon, now: float = 0.0) -> None:
    """All events from 1, then a report."""
    directory.on_stream_started(address)
    if daemon.seq:
        directory.on_batch(address, daemon.batch(1, daemon.seq), now, now)
    directory.on_report(address, daemon.report(), now, now)


def snapshot(directory: NodeDirectory, address: str, daemon: ModelDaemon, now: float) -> None:
    directory.on_snapshot_started(address)
    for page in daemon.pages():
        directory.on_page(address, page, now)
    directory.on_snapshot_ended(address, now)


def daemon(node_id: str, dram: range, ssd: range = range(0)) -> ModelDaemon:
    model = ModelDaemon(node_id)
    model.store(Tier.DRAM, dram)
    model.store(Tier.SSD, ssd)
    return model


def test_query_names_nodes_longest_run_first(directory: NodeDirectory) -> None:
    feed(directory, "a:1", daemon("a", range(1, 6)))
    feed(directory, "b:1", daemon("b", range(1, 4), range(2, 11)))
    assert directory.query(CHAIN) == [
        NodeHit(NodeId("b"), 10, 3, 7),
        NodeHit(NodeId("a"), 5, 5, 0),
    ]
    trace = directory.explain(CHAIN)[0]
    assert (trace.node_id, trace.hit_blocks) == ("b", 10)
    assert trace.tiers[:4] == (
        (Tier.DRAM,),
        (Tier.DRAM, Tier.SSD),
        (Tier.DRAM, Tier.SSD),
        (Tier.SSD,),
    )
    assert trace.tiers[10:] == ((),) * 10


def test_suspect_node_is_left_out_of_answers_and_keeps_its_rows(directory: NodeDirectory) -> None:
    feed(directory, "a:1", daemon("a", range(1, 6)))
    directory.tick(4.0)
    assert directory.query(CHAIN) == []
    (trace,) = directory.explain(CHAIN)
    assert (trace.liveness, trace.hit_blocks) == (Liveness.SUSPECT, 5)
    feed(directory, "a:1", daemon("a", range(1, 6)), now=5.0)
    assert [hit.hit_blocks for hit in directory.query(CHAIN)] == [5]


def test_gone_node_loses_dram_rows_and_gets_them_back_by_snapshot(
    directory: NodeDirectory,
) -> None:
    model = daemon("a", range(1, 6), range(1, 4))
    feed(directory, "a:1", model)
    directory.tick(31.0)
    view = directory.nodes(31.0)[0]
    assert view.liveness is Liveness.GONE
    assert [digest.blocks for digest in view.tiers] == [0, 3]
    assert directory.query(CHAIN) == []
    directory.on_stream_started("a:1")
    step = directory.on_report("a:1", model.report(), 40.0, 40.0)
    assert step is StreamStep.SNAPSHOT
    assert directory.nodes(40.0)[0].exactness is Exactness.DEGRADED
    snapshot(directory, "a:1", model, 40.0)
    assert directory.query(CHAIN) == [NodeHit(NodeId("a"), 5, 5, 0)]
    assert directory.nodes(40.0)[0].exactness is Exactness.EXACT


def test_removed_node_is_in_no_answer_and_its_rows_go(
    directory: NodeDirectory, index: BlockIndex
) -> None:
    model = daemon("a", range(1, 6))
    feed(directory, "a:1", model)
    assert directory.remove_node(NodeId("a")) == ("a:1",)
    assert directory.query(CHAIN) == []
    assert directory.nodes(0.0) == []
    feed(directory, "a:1", model)  # late: the source is gone
    directory.add_source("a:1")
    feed(directory, "a:1", model)  # the same life: still out
    assert directory.query(CHAIN) == []
    while directory.sweep():
        pass
    assert index.size().blocks == 0
    directory.readmit(NodeId("a"))
    feed(directory, "a:1", model)
    assert len(directory.query(CHAIN)) == 1


def test_churn_of_a_thousand_nodes_returns_to_the_baseline(
    directory: NodeDirectory, index: BlockIndex
) -> None:
    for number in range(1000):
        directory.add_source(f"c:{number}")
        feed(directory, f"c:{number}", daemon(f"n{number}", range(1, 6)), now=float(number))
        directory.remove_source(f"c:{number}", float(number))
        directory.tick(float(number))
        directory.sweep()
    directory.tick(2000.0)
    while directory.sweep():
        pass
    assert index.size().blocks == 0
    assert directory.nodes(2000.0) == []
    assert directory._holders.numbers < 100, "holder numbers are not used again"


def test_silent_drift_is_found_by_digest_and_repaired(
    directory: NodeDirectory, index: BlockIndex
) -> None:
    model = daemon("a", range(1, 6))
    feed(directory, "a:1", model)
    index.apply_removed(Holder(0), Tier.DRAM, as_keys([3]))
    index.apply_stored(Holder(0), Tier.SSD, as_keys([8]))
    assert directory.on_report("a:1", model.report(), 1.0, 1.0) is StreamStep.RESUBSCRIBE
    assert directory.query(CHAIN)[0].hit_blocks == 2, "queries are answered meanwhile"
    assert directory.position("a:1").wants_bucket_xors
    directory.on_stream_started("a:1")
    step = directory.on_report("a:1", model.report(with_xors=True), 1.0, 1.0)
    while step is StreamStep.COMPARE:
        step = directory.compare("a:1", 1.0)
    assert step is StreamStep.RESUBSCRIBE
    choices = directory.position("a:1").buckets
    assert choices == (
        BucketChoice(Tier.DRAM, (bucket_of(3),)),
        BucketChoice(Tier.SSD, (bucket_of(8),)),
    )
    directory.on_stream_started("a:1")
    for rows in model.bucket_rows(choices):
        directory.on_bucket_rows("a:1", rows, 1.0)
    assert directory.query(CHAIN)[0].hit_blocks == 5
    assert index.digest(Holder(0), Tier.SSD).blocks == 0
    (view,) = directory.nodes(1.0)
    assert view.exactness is Exactness.EXACT
    assert (view.counts.digest_mismatches, view.counts.bucket_repairs) == (1, 1)
    assert view.counts.snapshots == 0


def test_rows_of_a_dead_life_are_gone_after_the_swap(
    directory: NodeDirectory, index: BlockIndex
) -> None:
    model = daemon("a", range(1, 11), range(1, 4))
    feed(directory, "a:1", model)
    model.restart(loses=(Tier.DRAM,))
    assert directory.on_report("a:1", model.report(), 1.0, 1.0) is StreamStep.SNAPSHOT
    assert directory.query(CHAIN)[0].hit_blocks == 10
    snapshot(directory, "a:1", model, 1.0)
    assert directory.query(CHAIN) == [NodeHit(NodeId("a"), 3, 0, 3)]
    while directory.sweep():
        pass
    assert index.holdings(IndexKey(5)) == ()


def test_full_index_marks_the_node_degraded_and_counts_what_it_refused() -> None:
    directory = NodeDirectory(MemoryIndex(1024), Membership(3.0, 30.0))
    directory.add_source("a:1")
    model = ModelDaemon("a")
    model.store(Tier.DRAM, range(1, 1101))
    directory.on_batch("a:1", model.batch(1, 1), 0.0, 0.0)
    (view,) = directory.nodes(0.0)
    assert (view.dropped, view.exactness) == (76, Exactness.DEGRADED)
    directory.check_integrity()


def test_node_whose_refused_rows_are_gone_is_exact_again() -> None:
    directory = NodeDirectory(MemoryIndex(1024), Membership(3.0, 30.0))
    directory.add_source("a:1")
    model = ModelDaemon("a")
    model.store(Tier.DRAM, range(1, 1101))
    model.remove(Tier.DRAM, range(1025, 1101))
    directory.on_batch("a:1", model.batch(1, 2), 0.0, 0.0)
    directory.on_report("a:1", model.report(), 0.0, 0.0)
    assert directory.nodes(0.0)[0].exactness is Exactness.EXACT
    model.store(Tier.DRAM, range(2000, 2001))
    directory.on_batch("a:1", model.batch(3, 3), 1.0, 1.0)
    directory.on_report("a:1", model.report(), 1.0, 1.0)
    assert directory.nodes(1.0)[0].exactness is Exactness.DEGRADED
    directory.check_integrity()


def test_source_removed_while_it_sends_a_snapshot_takes_the_snapshot_along(
    directory: NodeDirectory,
) -> None:
    model = daemon("a", range(1, 101))
    feed(directory, "a:1", model)
    feed(directory, "b:1", model)
    directory.on_snapshot_started("a:1")
    directory.on_page("a:1", model.pages()[0], 1.0)
    directory.remove_source("a:1", 1.0)
    directory.on_snapshot_ended("a:1", 1.0)
    directory.on_report("b:1", model.report(), 2.0, 2.0)
    assert directory.nodes(2.0)[0].exactness is Exactness.EXACT


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_nodes_without_a_proper_name_are_refused(directory: NodeDirectory, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        directory.on_report("a:1", ModelDaemon(name).report(), 0.0, 0.0)


def test_node_may_move_to_another_address(directory: NodeDirectory) -> None:
    model = daemon("a", range(1, 6))
    feed(directory, "a:1", model)
    model.store(Tier.DRAM, range(6, 9))
    feed(directory, "b:1", model)
    assert [hit.hit_blocks for hit in directory.query(CHAIN)] == [8]
    assert directory.position("b:1").from_seq == model.seq + 1
