"""The store under random calls: leases never show wrong bytes, events never drift from the truth.

The model is what a client knows: what it staged, committed and leased. After every step all live
leases are read in full, staged slots are looked at for foreign bytes, and every invariant holds.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberkv_proto.hashing import checksum
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import AcquirePolicy, BlockHash
from store_daemon.leases import Lease, readable_parts
from store_daemon.sessions import Session
from tests.helpers.naive_hits import is_needed, longest_hit
from tests.helpers.store import (
    BLOCK_TOKENS,
    SmallStore,
    chain,
    hybrid_namespace,
    payload,
    small_namespace,
)

HYBRID = hybrid_namespace(
    Group(GroupKind.FULL, 1, 5000),
    Group(GroupKind.SLIDING_WINDOW, 1, 3000, window_tokens=2 * BLOCK_TOKENS + 1),
    Group(GroupKind.MAMBA, 1, 7000),
)
NAMESPACES = (small_namespace(5000), small_namespace(9000, groups=2, model="wide"), HYBRID)
CHAINS = [[chain(ns, 12, seed, shared=4) for seed in range(3)] for ns in NAMESPACES]
RANKS = [(0, 0), (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
"""Namespace and part of each client; the first two write the same parts."""
RANK = st.integers(0, len(RANKS) - 1)
NAMESPACE = st.integers(0, len(NAMESPACES) - 1)
SEED = st.integers(0, 2)
LENGTH = st.integers(1, 12)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ember-model-"))
        self.loop = asyncio.new_event_loop()
        self.committed: set[tuple[BlockHash, int]] = set()
        self._open()

    def _open(self) -> None:
        async def build() -> SmallStore:
            return SmallStore(self.directory, extents=7, ssd_segments=4)

        self.small = self.loop.run_until_complete(build())
        self.sessions: list[Session] = [self.small.open(NAMESPACES[ns], part) for ns, part in RANKS]
        self.stages: list[tuple[int, int, dict[BlockHash, int]]] = []
        self.leases: list[tuple[int, Lease]] = []
        self.prefetches: list[tuple[int, int]] = []

    def in_loop(self, work: object) -> object:
        async def run() -> object:
            return work() if callable(work) else None

        return self.loop.run_until_complete(run())

    # ---- writing ----

    @rule(rank=RANK, seed=SEED, start=st.integers(0, 8), length=LENGTH)
    def stage(self, rank: int, seed: int, start: int, length: int) -> None:
        full = CHAINS[RANKS[rank][0]][seed]
        hashes = full[start : start + length]
        parent = full[start - 1] if start else None
        session = self.sessions[rank]
        staged = self.in_loop(lambda: self.small.store.stage(session, hashes, parent))
        granted = {h: o for h, o in zip(hashes, staged.offsets, strict=True) if o}
        if granted:
            self.small.write(session, hashes, staged)
            self.stages.append((rank, staged.stage_id, granted))

    @rule(ns=NAMESPACE, seed=SEED, length=st.integers(4, 12), behind=st.integers(0, 8))
    def put(self, ns: int, seed: int, length: int, behind: int) -> None:
        """All ranks of an engine store the head of a chain; windows and states only the end."""
        hashes = CHAINS[ns][seed][:length]
        for part in range(NAMESPACES[ns].parts):
            session = self.sessions[RANKS.index((ns, part))]
            start = min(behind, length - 1) if part in session.own.optional else 0
            parent = hashes[start - 1] if start else None
            run = hashes[start:]
            self.in_loop(lambda session=session, r=run, p=parent: self.small.put(session, r, p))
            for block_hash in run:
                self.committed.add((block_hash, part))

    @rule(ns=NAMESPACE, seed=SEED)
    def put_and_write_back(self, ns: int, seed: int) -> None:
        self.put(ns, seed, 12, 0)
        self.write_back()

    @precondition(lambda self: self.stages)
    @rule(data=st.data())
    def commit_some(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.stages) - 1))
        rank, stage_id, granted = self.stages[at]
        count = data.draw(st.integers(1, len(granted)))
        session = self.sessions[rank]
        hashes = list(granted)[:count]
        sums = [checksum(payload(h, session.part, session.part_bytes)) for h in hashes]
        self.in_loop(lambda: self.small.store.commit(session, stage_id, hashes, sums))
        for block_hash in hashes:
            del granted[block_hash]
            self.committed.add((block_hash, session.part))
        if not granted:
            del self.stages[at]

    @precondition(lambda self: self.stages)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rank, stage_id, _ = self.stages.pop(data.draw(st.integers(0, len(self.stages) - 1)))
        self.in_loop(lambda: self.small.store.abort(self.sessions[rank], stage_id))

    @precondition(lambda self: self.stages or self.leases)
    @rule(cut=st.booleans(), data=st.data())
    def end_session(self, cut: bool, data: st.DataObject) -> None:
        held = sorted({entry[0] for entry in [*self.stages, *self.leases]})
        rank = data.draw(st.sampled_from(held))
        store = self.small.store
        end = store.cut_session if cut else store.end_session
        self.in_loop(lambda: end(self.sessions[rank]))
        self.stages = [entry for entry in self.stages if entry[0] != rank]
        self.leases = [entry for entry in self.leases if entry[0] != rank]
        ns, part = RANKS[rank]
        self.sessions[rank] = self.small.open(NAMESPACES[ns], part)

    # ---- reading ----

    @rule(rank=RANK, seed=SEED, length=LENGTH, policy=st.sampled_from(AcquirePolicy))
    def acquire(self, rank: int, seed: int, length: int, policy: AcquirePolicy) -> None:
        session = self.sessions[rank]
        hashes = CHAINS[RANKS[rank][0]][seed][:length]
        readable, held = self._naive_hit(rank, hashes, now=True), self._naive_hit(rank, hashes)
        lease = self.in_loop(lambda: self.small.store.acquire(session, hashes, policy, 30.0))
        usable = lease.usable if lease is not None else 0
        assert readable <= usable <= held
        if policy is AcquirePolicy.BEST_EFFORT:
            assert usable == readable
        if lease is None:
            return
        if policy is AcquirePolicy.BEST_EFFORT:
            assert lease.is_complete
        self.leases.append((rank, lease))

    def _naive_hit(self, rank: int, hashes: list[BlockHash], now: bool = False) -> int:
        """The longest hit of what is held, or of what can be read `now`."""
        namespace = self.sessions[rank].own
        blocks = [self.small.store.holdings.catalog.find(namespace, h) for h in hashes]
        held = [
            [False] * namespace.parts
            if block is None or not (block.in_dram or block.in_ssd)
            else (readable_parts(block, namespace) if now else block.held_parts)
            for block in blocks
        ]
        groups = namespace.namespace.groups
        rows = [[parts[number] for parts in held] for number in range(len(groups))]
        return longest_hit(groups, BLOCK_TOKENS, rows)

    def _check_needs(self, rank: int, lease: Lease) -> None:
        """What the reader may read is what a hit of this length needs, and was committed."""
        for number, block_hash in enumerate(lease.hashes[: lease.usable]):
            for part, group in enumerate(NAMESPACES[RANKS[rank][0]].groups):
                is_mine = part in lease.needs.parts(number)
                assert is_mine == is_needed(group, BLOCK_TOKENS, lease.usable, number)
                if is_mine and number < lease.ready:
                    assert (block_hash, part) in self.committed, "a part nobody committed"

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rank, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.in_loop(lambda: self.small.store.release(self.sessions[rank], [lease.id]))

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]), beating=st.sets(RANK))
    def time_passes(self, seconds: float, beating: set[int]) -> None:
        self.small.clock.now += seconds
        for rank in beating:
            self.small.store.heartbeat(self.sessions[rank])
        self.in_loop(self.small.store.tick)
        self.leases = [entry for entry in self.leases if not entry[1].is_ended]

    @rule(rank=RANK, seed=SEED, length=LENGTH)
    def prefetch(self, rank: int, seed: int, length: int) -> None:
        session = self.sessions[rank]
        hashes = CHAINS[RANKS[rank][0]][seed][:length]
        begun = self.in_loop(lambda: self.small.store.prefetch(session, hashes, 30.0))
        if begun.prefetch_id:
            self.prefetches.append((rank, begun.prefetch_id))
        assert begun.blocks <= length

    @precondition(lambda self: self.prefetches)
    @rule(data=st.data())
    def cancel_prefetch(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.prefetches) - 1))
        rank, prefetch_id = self.prefetches.pop(at)
        self.in_loop(lambda: self.small.store.cancel_prefetch(self.sessions[rank], prefetch_id))

    # ---- moves ----

    @rule()
    def moves_settle(self) -> None:
        self.loop.run_until_complete(self.small.store.lender.promoter.settle())

    @rule()
    def write_back(self) -> None:
        self.loop.run_until_complete(self.small.flush())

    @rule(count=st.sampled_from([1, 3, 30]))
    def evict_some(self, count: int) -> None:
        holdings = self.small.store.holdings
        for _ in range(count):
            victim = holdings.queue.oldest_of_all(holdings.catalog.is_evictable)
            if victim is None:
                break
            assert holdings.catalog.children(victim.hash) == 0
            holdings.evict(victim)
            holdings.publish()

    @rule(count=st.sampled_from([1, 5]))
    def drop_old_parts(self, count: int) -> None:
        holdings = self.small.store.holdings
        for _ in range(count):
            part = holdings.catalog.old_parts.oldest_of_all(holdings.catalog.may_lose_part)
            if part is None:
                break
            holdings.drop_part(part)
            holdings.publish()
            assert part.block.in_dram

    @precondition(lambda self: len(self.committed) > 12)
    @rule()
    def killed_and_restarted(self) -> None:
        """The files are left as they are between two calls; nothing is closed in order."""
        small = self.small
        self.loop.run_until_complete(small.store.lender.promoter.settle())
        before = {h for h, _ in self.committed}
        resident = {b.hash for b in small.store.holdings.catalog.blocks.values() if b.in_dram}
        image = small.settings.dram.path.read_bytes()
        self.loop.run_until_complete(small.close())
        small.settings.dram.path.write_bytes(image)
        self._open()
        catalog = self.small.store.holdings.catalog
        assert {b.hash for b in catalog.blocks.values() if b.in_dram} == resident
        assert set(catalog.blocks) <= before, "a phantom block"

    # ---- always ----

    @invariant()
    def nothing_drifts(self) -> None:
        self.small.check_integrity()

    @invariant()
    def leases_show_right_bytes(self) -> None:
        for rank, lease in self.leases:
            self._check_needs(rank, lease)
            self.small.assert_readable(lease)

    @invariant()
    def staged_slots_are_nobody_elses(self) -> None:
        offsets = [offset for _, _, granted in self.stages for offset in granted.values()]
        assert len(set(offsets)) == len(offsets)
        with self.small.pool.view() as view:
            for rank, _, granted in self.stages:
                session = self.sessions[rank]
                for block_hash, offset in granted.items():
                    wanted = payload(block_hash, session.part, session.part_bytes)
                    assert view[offset : offset + len(wanted)] == wanted

    def teardown(self) -> None:
        self.loop.run_until_complete(self.small.close())
        self.loop.close()
        shutil.rmtree(self.directory)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestStoreModel = StoreMachine.TestCase
