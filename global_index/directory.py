"""Nodes and their rows: carries out what `ingest` and `membership` decide, on a `BlockIndex`.

No I/O and no clock of its own, so that races are tested without sockets. One thread owns it.
Messages come by *source* (a daemon's address); what they mean depends on the node they name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    Event,
    EventBatch,
    Keys,
    SnapshotNeeded,
    SnapshotPage,
    TierCleared,
    merged,
)
from emberkv_proto.types import (
    EngineInfo,
    Incarnation,
    IndexKey,
    NodeHit,
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
from global_index.bucket_comparison import BucketComparison
from global_index.holders import HolderPool
from global_index.index import MAX_HOLDERS, Applied, BlockIndex, Holder, HolderHits
from global_index.ingest import (
    AUDITED_TIERS,
    REPAIR_FIRST_SECONDS,
    Exactness,
    Ingest,
    Position,
)
from global_index.membership import Liveness, Membership
from global_index.row_copy import RowsCopy
from global_index.views import ChainTrace, FollowedNode, NodeRows, NodeView
from global_index.watch import Standing

log = logging.getLogger(__name__)

MAX_NODE_ID_CHARS = 253
SEED_WAIT_SECONDS = 60.0
"""Rows from another index go when their daemon has not spoken for as long."""
HOLDERS_OF_NODE = 2
"""One that is visible, and one that a snapshot fills."""
MAX_NODES = MAX_HOLDERS // HOLDERS_OF_NODE


class StreamStep(Enum):
    """What the reader of an event stream does next."""

    CONTINUE = "continue"
    RESUBSCRIBE = "resubscribe"
    SNAPSHOT = "snapshot"
    COMPARE = "compare"
    """Let other work come between, call `NodeDirectory.compare`, do what that says."""


@dataclass(slots=True)
class _Rows:
    holder: Holder
    dropped: int = 0
    copies: list[RowsCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Comparison:
    buckets: BucketComparison
    generation: GenerationId
    seq: Seq


@dataclass(slots=True)
class _Node:
    id: NodeId
    ingest: Ingest
    generations: dict[GenerationId, _Rows] = field(default_factory=dict)
    visible: _Rows | None = None
    report: NodeReport | None = None
    comparison: _Comparison | None = None
    delay_seconds: float = 0.0
    anomalies: int = 0
    dropped: int = 0

    @property
    def exactness(self) -> Exactness:
        exactness = self.ingest.exactness
        is_cut = self.visible is not None and self.visible.dropped > 0
        return Exactness.DEGRADED if is_cut and exactness is Exactness.EXACT else exactness


@dataclass(slots=True)
class _Source:
    """A daemon's address. Until its first message nobody knows which node it is."""

    node_id: NodeId | None = None
    wants_snapshot: bool = False
    not_before: float = 0.0
    is_fetching: bool = False


class NodeDirectory:
    """All nodes, all rows. Costs are those of the index; O(nodes) for `nodes` and `tick`."""

    def __init__(
        self, index: BlockIndex, membership: Membership, holders: HolderPool | None = None
    ) -> None:
        self._index = index
        self._holders = holders or HolderPool(index)
        self._membership = membership
        self._nodes: dict[NodeId, _Node] = {}
        self._sources: dict[str, _Source] = {}
        self._by_holder: dict[Holder, _Node] = {}
        self._seeded: dict[NodeId, float] = {}
        """Nodes known from another index only, and since when. No query names them."""
        self.on_rebased: Callable[[NodeId], None] = lambda _: None
        """Told when a node's visible holder has changed, before the old one can be reused."""

    # Sources

    def add_source(self, address: str) -> None:
        """Follow an address; a node that was removed by order stays out until `readmit`."""
        self._sources.setdefault(address, _Source())

    def remove_source(self, address: str, now: float) -> None:
        """Follow an address no longer. What it was sending of a snapshot is given up."""
        source = self._sources.get(address)
        if source and source.is_fetching:
            self.on_snapshot_ended(address, now)
        self._sources.pop(address, None)

    def position(self, address: str) -> Position:
        node = self._node_of(address)
        return node.ingest.position() if node else Position(Incarnation(0), Seq(1))

    def wants_snapshot(self, address: str, now: float) -> bool:
        source, node = self._sources[address], self._node_of(address)
        if node:
            return node.ingest.wants_snapshot(now)
        return source.wants_snapshot and now >= source.not_before

    # Messages of a source

    def on_stream_started(self, address: str) -> None:
        node = self._node_of(address)
        if node:
            node.ingest.on_stream_started()

    def on_batch(self, address: str, batch: EventBatch, now: float, wall: float) -> StreamStep:
        node = self._hear(address, batch.node_id, batch.incarnation, now)
        if node is None:
            return StreamStep.CONTINUE
        node.delay_seconds = max(0.0, wall - batch.sent_unix_seconds)
        return self._carry_out(node, node.ingest.on_batch(batch, now))

    def on_report(self, address: str, report: NodeReport, now: float, wall: float) -> StreamStep:
        node = self._hear(address, report.node_id, report.incarnation, now)
        if node is None:
            return StreamStep.CONTINUE
        if report.incarnation >= node.ingest.fence:
            node.report = report
            node.delay_seconds = max(0.0, wall - report.sent_unix_seconds)
        own = {tier: self._digest(node, tier) for tier in AUDITED_TIERS}
        actions = node.ingest.on_report(report, own, now)
        if node.visible and node.ingest.agrees:
            node.visible.dropped = 0  # what was refused is there by now, or gone from the node
        return self._carry_out(node, actions)

    def on_bucket_rows(self, address: str, rows: BucketRows, now: float) -> StreamStep:
        node = self._hear(address, rows.node_id, rows.incarnation, now)
        if node is None:
            return StreamStep.CONTINUE
        return self._carry_out(node, node.ingest.on_bucket_rows(rows, now))

    def compare(self, address: str, now: float) -> StreamStep:
        """Compare some more of the node's rows with its digests; for a reader told to COMPARE."""
        node = self._node_of(address)
        if node is None or node.comparison is None:
            return StreamStep.CONTINUE
        if node.comparison.buckets.step():
            return StreamStep.COMPARE
        done, node.comparison = node.comparison, None
        actions = node.ingest.on_compared(done.generation, done.seq, done.buckets.choices, now)
        return self._carry_out(node, actions)

    def on_snapshot_needed(self, address: str, message: SnapshotNeeded, now: float) -> StreamStep:
        node = self._node_of(address)
        if node:
            return self._carry_out(node, node.ingest.on_snapshot_needed(message, now))
        if self._claim_seed(address, message):
            return StreamStep.RESUBSCRIBE
        self._sources[address].wants_snapshot = True
        return StreamStep.SNAPSHOT if self.wants_snapshot(address, now) else StreamStep.CONTINUE

    def on_snapshot_started(self, address: str) -> None:
        source, node = self._sources[address], self._node_of(address)
        source.wants_snapshot, source.is_fetching = False, True
        if node:
            self._carry_out(node, node.ingest.on_snapshot_started())

    def on_page(self, address: str, page: SnapshotPage, now: float) -> None:
        source, known = self._sources[address], self._node_of(address)
        node = self._hear(address, page.node_id, page.incarnation, now)
        if node is None:
            return
        if source.is_fetching and node is not known:
            # Only now is it known whose snapshot this is; this is its first page.
            self._carry_out(node, node.ingest.on_snapshot_started())
        self._carry_out(node, node.ingest.on_page(page, now))

    def on_snapshot_unanswered(self, address: str, now: float) -> None:
        """The fetch brought no message; it is tried again with the next connection."""
        source, node = self._sources.get(address), self._node_of(address)
        if source:
            source.is_fetching = False
            if node is None:
                source.wants_snapshot, source.not_before = True, now
        if node:
            self._carry_out(node, node.ingest.on_snapshot_unanswered(now))

    def on_snapshot_ended(self, address: str, now: float) -> None:
        """The fetch is over; if its last page did not come, it is tried again later."""
        source, node = self._sources.get(address), self._node_of(address)
        if source:
            source.is_fetching = False
            if node is None:
                source.wants_snapshot, source.not_before = True, now + REPAIR_FIRST_SECONDS
        if node:
            self._carry_out(node, node.ingest.on_snapshot_failed(now))

    # Rows from and for another index

    def on_seed_page(self, page: SnapshotPage, now: float) -> bool:
        """Rows of a node that has not spoken yet; False when it has, or is one too many."""
        node = self._nodes.get(page.node_id)
        if node is None:
            is_known = self._membership.state(page.node_id) is not None
            has_room = self._holders.has_room(HOLDERS_OF_NODE)
            if is_known or not has_room or not _is_node_id(page.node_id):
                return False
            self._holders.reserve(HOLDERS_OF_NODE)
            node = self._nodes[page.node_id] = _Node(page.node_id, Ingest(page.node_id))
            self._seeded[node.id] = now
            self._carry_out(node, node.ingest.on_snapshot_started())
        elif node.id not in self._seeded or node.visible is not None:
            return False
        self._carry_out(node, node.ingest.on_page(page, now))
        return True

    def drop_seed(self, node_id: NodeId) -> None:
        """Forget what came of a node that has not spoken."""
        if self._seeded.pop(node_id, None) is not None:
            self._drop_node(node_id)

    def begin_copy(self, node_id: NodeId) -> RowsCopy | None:
        """Begin to copy a node's rows; None unless they are exact. End it with `end_copy`."""
        node = self._nodes.get(node_id)
        if node is None or node.visible is None or not self._may_copy(node):
            return None
        copy = RowsCopy(self._index, node.visible.holder)
        node.visible.copies.append(copy)
        return copy

    def settle_copy(self, node_id: NodeId, copy: RowsCopy) -> NodeRows | None:
        """What was copied, as of now; None when the rows were replaced or are not exact."""
        node = self._nodes.get(node_id)
        if node is None or node.visible is None or copy not in node.visible.copies:
            return None
        if not self._may_copy(node):
            return None
        return NodeRows(node_id, node.ingest.incarnation, node.ingest.seq, copy.settle())

    def end_copy(self, node_id: NodeId, copy: RowsCopy) -> None:
        node = self._nodes.get(node_id)
        for rows in node.generations.values() if node else ():
            if copy in rows.copies:
                rows.copies.remove(copy)

    def _may_copy(self, node: _Node) -> bool:
        is_quiet = self._membership.state(node.id) in (Liveness.OK, Liveness.SUSPECT)
        return is_quiet and node.exactness is Exactness.EXACT

    def _claim_seed(self, address: str, message: SnapshotNeeded) -> bool:
        """Whether the seeded rows of this life of the node at `address` can be gone on from."""
        node = self._nodes.get(message.node_id) if message.node_id else None
        if node is None or node.id not in self._seeded or node.visible is None:
            return False
        if node.ingest.incarnation != message.incarnation or node.ingest.seq > message.seq:
            return False
        self._sources[address].node_id = node.id
        return True

    # Time and operators

    def tick(self, now: float) -> None:
        """Let silence have its consequences."""
        for change in self._membership.tick(now):
            node = self._nodes[change.node_id]
            log.warning("node %s is %s", node.id, change.now.value)
            if change.now is Liveness.GONE:
                if node.visible:
                    self._index.clear_tier(node.visible.holder, Tier.DRAM)
                    for copy in node.visible.copies:
                        copy.note(TierCleared(Tier.DRAM))
                self._carry_out(node, node.ingest.on_rows_lost(now))
        for node_id, since in [*self._seeded.items()]:
            if now - since >= SEED_WAIT_SECONDS:
                self.drop_seed(node_id)
        followed = {source.node_id for source in self._sources.values()}
        for node_id in [*self._nodes]:
            if node_id not in followed and self._membership.state(node_id) is Liveness.GONE:
                self._drop_node(node_id)  # nobody would tell of its return
                self._membership.forget(node_id)

    def sweep(self) -> bool:
        """Remove some rows that no query sees; True while there are more."""
        return self._holders.sweep()

    def remove_node(self, node_id: NodeId) -> tuple[str, ...]:
        """Take a node out, by order: no query names it from now on.

        Returns the addresses that it came from, which are sources no longer.
        """
        addresses = tuple(a for a, source in self._sources.items() if source.node_id == node_id)
        for address in addresses:
            del self._sources[address]
        node = self._nodes.get(node_id)
        if node:
            self._drop_node(node_id)
            self._membership.remove(node_id, node.ingest.fence)
        return addresses

    def readmit(self, node_id: NodeId) -> None:
        """Let a removed node come back even in the same incarnation."""
        self._membership.readmit(node_id)

    # Questions

    def query(self, keys: Keys) -> list[NodeHit]:
        """Leading runs of a chain on the nodes that are OK, longest first."""
        return self.node_hits(self._index.query(keys))

    def node_hits(self, found: HolderHits) -> list[NodeHit]:
        """What a query of the index has found, of the nodes that are OK, longest first."""
        hits = []
        for holder, hit, hbm, dram in found.rows():
            node = self._by_holder.get(holder)
            if node and self._membership.state(node.id) is Liveness.OK:
                hits.append(NodeHit(node.id, hit, dram, hit - hbm - dram))
        hits.sort(key=lambda hit: -hit.hit_blocks)
        return hits

    def explain(self, keys: Keys) -> list[ChainTrace]:
        """Every node's view of a chain, nodes left out of answers included. Not for hot paths."""
        blocks: list[dict[Holder, tuple[Tier, ...]]] = [
            {holding.holder: holding.tiers for holding in self._index.holdings(IndexKey(key))}
            for key in keys.tolist()
        ]
        traces = []
        for node in self._spoken():
            holder = node.visible.holder if node.visible else None
            tiers = tuple(block.get(holder, ()) if holder is not None else () for block in blocks)
            run = next((i for i, held in enumerate(tiers) if not held), len(tiers))
            traces.append(ChainTrace(node.id, self._liveness(node), node.exactness, run, tiers))
        return sorted(traces, key=lambda trace: (-trace.hit_blocks, trace.node_id))

    def nodes(self, now: float) -> list[NodeView]:
        return [self._view(node, now) for node in self._spoken()]

    def node(self, node_id: NodeId, now: float) -> NodeView:
        return self._view(self._nodes[node_id], now)

    def followed(self) -> list[FollowedNode]:
        found = (self.followed_at(address) for address in self._sources)
        return [node for node in found if node is not None]

    def followed_at(self, address: str) -> FollowedNode | None:
        """Which rows an address's messages go to, as of now; None before there are any."""
        node = self._node_of(address)
        if node is None or node.visible is None:
            return None
        return FollowedNode(address, node.id, node.visible.holder, self._liveness(node))

    def standings(self) -> dict[NodeId, Standing]:
        """What watchers are told of each node, when it changes."""
        return {
            node.id: Standing(
                node.ingest.incarnation,
                self._liveness(node),
                node.exactness,
                node.report.grpc_address if node.report else "",
                node.report.engines if node.report else (),
            )
            for node in self._spoken()
        }

    def base_of(self, node_id: NodeId) -> Holder | None:
        """Where an engine of this node finds more; None unless the node is in answers."""
        node = self._nodes.get(node_id)
        if node is None or node.visible is None or self._liveness(node) is not Liveness.OK:
            return None
        return node.visible.holder

    def reported_engines(self) -> list[tuple[NodeId, EngineInfo]]:
        """What every known node last said of its engines."""
        return [
            (node.id, engine)
            for node in self._nodes.values()
            if node.report
            for engine in node.report.engines
        ]

    @property
    def swept_holders(self) -> int:
        """Generations whose rows are still being removed."""
        return self._holders.swept

    def check_integrity(self, others: Iterable[Holder] = ()) -> None:
        """Assert that holders, generations and rows fit together; `others`: engines'. O(table)."""
        self._index.check_integrity()
        self._membership.check_integrity()
        live = [*others]
        for node in self._nodes.values():
            node.ingest.check_integrity()
            assert (node.visible is None) == (node.ingest.visible is None)
            assert len(node.generations) <= 2, "a generation was not dropped"
            live += [rows.holder for rows in node.generations.values()]
            if node.visible:
                assert node.generations[node.ingest.visible or GenerationId(0)] is node.visible
                assert self._by_holder[node.visible.holder] is node
        for node_id in self._seeded:
            assert node_id in self._nodes, "a seeded node is lost"
            assert self._membership.state(node_id) is None, "a node that spoke counts as seeded"
        assert len(self._by_holder) == sum(1 for node in self._nodes.values() if node.visible)
        self._holders.check_integrity(live)

    # Inside

    def _spoken(self) -> Iterator[_Node]:
        """Nodes that were heard of from their daemon."""
        return (node for node in self._nodes.values() if node.id not in self._seeded)

    def _node_of(self, address: str) -> _Node | None:
        source = self._sources.get(address)
        return self._nodes.get(source.node_id) if source and source.node_id else None

    def _hear(
        self, address: str, node_id: NodeId, incarnation: Incarnation, now: float
    ) -> _Node | None:
        """The node a message is of; None for one that was removed, or a source that was."""
        source = self._sources.get(address)
        if source is None:
            return None
        if not _is_node_id(node_id):
            raise InvalidRequestError(f"{address} names itself {node_id[:300]!r}")
        node = self._nodes.get(node_id)
        if node and incarnation < node.ingest.fence:
            return node  # ingest counts and refuses it; it is no sign of life
        if node is None:
            self._holders.reserve(HOLDERS_OF_NODE)
        if not self._membership.hear(node_id, incarnation, now):
            if node is None:
                self._holders.unreserve(HOLDERS_OF_NODE)
            return None
        self._seeded.pop(node_id, None)
        if node is None:
            node = self._nodes[node_id] = _Node(node_id, Ingest(node_id))
        if source.node_id != node_id:
            log.info("%s is node %s", address, node_id)
            source.node_id = node_id
        return node

    def _carry_out(self, node: _Node, actions: list[Action]) -> StreamStep:
        step = StreamStep.CONTINUE
        for action in actions:
            match action:
                case OpenGeneration(generation):
                    node.generations[generation] = _Rows(self._holders.take())
                case Apply(generation, events):
                    self._apply(node, node.generations[generation], events)
                case Swap(generation, replaced):
                    node.visible = node.generations[generation]
                    self._by_holder[node.visible.holder] = node
                    self.on_rebased(node.id)
                    if replaced is not None:
                        self._retire(node, replaced)
                case DropGeneration(generation):
                    self._retire(node, generation)
                case CompareBuckets(generation, theirs):
                    holder = node.generations[generation].holder
                    comparison = BucketComparison(self._index, holder, theirs)
                    node.comparison = _Comparison(comparison, generation, node.ingest.seq)
                    step = StreamStep.COMPARE
                case ReplaceBucket(generation, tier, bucket, keys):
                    rows = node.generations[generation]
                    own = self._index.bucket_keys(rows.holder, tier, bucket)
                    gone = BlocksRemoved(tier, np.setdiff1d(own, keys))
                    new = BlocksStored(tier, np.setdiff1d(keys, own))
                    self._apply(node, rows, (gone, new))
                case Resume():
                    step = StreamStep.RESUBSCRIBE
                case FetchSnapshot():
                    step = StreamStep.SNAPSHOT
        return step

    def _apply(self, node: _Node, rows: _Rows, events: tuple[Event, ...]) -> None:
        for event in merged(events):
            match event:
                case BlocksStored(tier, keys):
                    applied = self._index.apply_stored(rows.holder, tier, keys)
                case BlocksRemoved(tier, keys):
                    applied = self._index.apply_removed(rows.holder, tier, keys)
                case TierCleared(tier):
                    applied = Applied(self._index.clear_tier(rows.holder, tier), 0, 0)
            for copy in rows.copies:
                copy.note(event)
            node.anomalies += applied.unchanged
            node.dropped += applied.dropped
            rows.dropped += applied.dropped

    def _retire(self, node: _Node, generation: GenerationId) -> None:
        holder = node.generations.pop(generation).holder
        self._by_holder.pop(holder, None)
        self._holders.retire(holder)

    def _drop_node(self, node_id: NodeId) -> None:
        node = self._nodes.pop(node_id)
        self._seeded.pop(node_id, None)
        self.on_rebased(node_id)
        for generation in [*node.generations]:
            self._retire(node, generation)
        self._holders.unreserve(HOLDERS_OF_NODE)

    def _digest(self, node: _Node, tier: Tier) -> TierDigest:
        if node.visible is None:
            return TierDigest(tier, 0, 0)
        return self._index.digest(node.visible.holder, tier)

    def _liveness(self, node: _Node) -> Liveness:
        return self._membership.state(node.id) or Liveness.GONE

    def _view(self, node: _Node, now: float) -> NodeView:
        reported = {digest.tier: digest for digest in (node.report.tiers if node.report else ())}
        tiers = []
        for tier in AUDITED_TIERS:
            own, theirs = self._digest(node, tier), reported.get(tier, TierDigest(tier, 0, 0))
            tiers.append(
                TierDigest(tier, own.blocks, own.xor, theirs.capacity_bytes, theirs.used_bytes)
            )
        return NodeView(
            node_id=node.id,
            incarnation=node.ingest.incarnation,
            seq=node.ingest.seq,
            liveness=self._liveness(node),
            exactness=node.exactness,
            reported_state=node.report.state if node.report else "",
            grpc_address=node.report.grpc_address if node.report else "",
            tiers=tuple(tiers),
            engines=node.report.engines if node.report else (),
            lag_seconds=node.delay_seconds + self._membership.silent_seconds(node.id, now),
            counts=node.ingest.counts,
            anomalies=node.anomalies,
            dropped=node.dropped,
        )


def _is_node_id(text: str) -> bool:
    return 0 < len(text) <= MAX_NODE_ID_CHARS
