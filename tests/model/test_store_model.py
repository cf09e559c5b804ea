"""The store under random calls: leases never show wrong bytes, events never drift from the truth.

The model is what a client knows: what it staged, committed and leased. After every step all live
leases are read in full, staged slots are looked at for foreign bytes, and every invariant holds.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberkv_proto.errors import PoolFullError
from emberkv_proto.hashing import checksum, salt_id
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import AcquirePolicy, BlockHash, Tier
from store_daemon.block import Block
from store_daemon.lease_limit import blocks_that_fit
from store_daemon.leases import Lease, readable_parts
from store_daemon.sessions import Session
from store_daemon.tenants import Quota
from store_daemon.tiers.segments import PAGE_BYTES
from tests.helpers.naive_hits import is_needed, longest_hit
from tests.helpers.store import (
    BLOCK_TOKENS,
    FakeClock,
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
OWNERS = {
    block_hash: seed
    for chains in CHAINS
    for seed, hashes in enumerate(chains)
    for block_hash in hashes[4:]
}
RANKS = [(0, 0), (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
"""Namespace and part of each client; the first two write the same parts."""
RANK = st.integers(0, len(RANKS) - 1)
NAMESPACE = st.integers(0, len(NAMESPACES) - 1)
SEED = st.integers(0, 2)
LENGTH = st.integers(1, 12)
SHARED_BLOCKS = 4
TENANTS = (None, salt_id(b"ann"), salt_id(b"ben"))
"""Whose blocks those of each seed's chains are, behind the shared ones."""
TIER = st.sampled_from([Tier.DRAM, Tier.SSD])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.directory = Path(tempfile.mkdtemp(prefix="ember-model-"))
        self.loop = asyncio.new_event_loop()
        self.committed: set[tuple[BlockHash, int]] = set()
        self.hard: dict[BlockHash, set[Tier]] = {}
        """Hard pins, and the tiers that each block was in when it was pinned or lost since."""
        self.soft: dict[BlockHash, tuple[float, set[Tier]]] = {}
        self.quotas: dict[bytes, int] = {}
        self.has_bad_records = False

    @initialize(mode=st.sampled_from(["on_commit", "on_evict", "on_reuse"]))
    def begin(self, mode: Literal["on_commit", "on_evict", "on_reuse"]) -> None:
        self.mode = mode
        self._open()

    def _open(self) -> None:
        async def build() -> SmallStore:
            return SmallStore(
                self.directory, extents=7, ssd_segments=4, writeback=self.mode, clock=self.clock
            )

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
        # One call is for one tenant.
        end = SHARED_BLOCKS if start < SHARED_BLOCKS else len(full)
        hashes = full[start : min(start + length, end)]
        parent = full[start - 1] if start else None
        session = self.sessions[rank]
        salt = TENANTS[seed] if start >= SHARED_BLOCKS else None
        before = self._usage()
        staged = self.in_loop(lambda: self.small.store.stage(session, hashes, parent, salt))
        for tenant, used in self._usage().items():
            assert used <= max(self.quotas.get(tenant, used), before.get(tenant, 0))
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
            runs = [(hashes[start:SHARED_BLOCKS], parent, None)] if start < SHARED_BLOCKS else []
            first = max(start, SHARED_BLOCKS)
            runs.append((hashes[first:], hashes[first - 1], TENANTS[seed]))
            for run, before, salt in runs:
                self.in_loop(
                    lambda session=session, run=run, before=before, salt=salt: self.small.put(
                        session, run, before, salt
                    )
                )
            for block_hash in hashes[start:]:
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

    @rule(
        rank=RANK,
        seed=SEED,
        length=LENGTH,
        policy=st.sampled_from(AcquirePolicy),
        recompute=st.sampled_from([None, 1e-9, 1e-4, 10.0]),
    )
    def acquire(
        self, rank: int, seed: int, length: int, policy: AcquirePolicy, recompute: float | None
    ) -> None:
        session = self.sessions[rank]
        hashes = CHAINS[RANKS[rank][0]][seed][:length]
        lender = self.small.store.lender
        assert lender.limit_bytes is not None
        fitting = blocks_that_fit(
            lender.limit_bytes, lender.leases.of(session.id), session.own, hashes
        )
        if not fitting:
            with pytest.raises(PoolFullError):
                self.in_loop(lambda: self.small.store.acquire(session, hashes, policy, 30.0))
            return
        hashes = hashes[:fitting]
        readable, held = self._naive_hit(rank, hashes, now=True), self._naive_hit(rank, hashes)
        store = self.small.store
        lease = self.in_loop(lambda: store.acquire(session, hashes, policy, 30.0, recompute))
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
        now = self.clock.now
        self.soft = {h: pin for h, pin in self.soft.items() if now < pin[0]}

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

    # ---- operators ----

    @rule(ns=NAMESPACE, seed=SEED, start=st.integers(0, 8), length=LENGTH)
    def pin_hard(self, ns: int, seed: int, start: int, length: int) -> None:
        hashes = CHAINS[ns][seed][start : start + length]
        pins = self.small.store.holdings.pins
        room = (pins.limit_bytes - pins.hard_bytes) // self._slot_bytes(ns)
        here = self._resident_run(hashes)
        pinned = self.in_loop(
            lambda: self.small.store.operations.pin(NAMESPACES[ns].id, hashes, None)
        )
        new = [n for n, h in enumerate(here) if h not in self.hard]
        assert pinned.pinned_blocks == (new[room] if len(new) > room else len(here))
        assert pinned.pinned_bytes == pins.hard_bytes
        for block_hash in here[: pinned.pinned_blocks]:
            self.soft.pop(block_hash, None)
            self.hard[block_hash] = self._tiers_of(block_hash)

    @rule(ns=NAMESPACE, seed=SEED, length=LENGTH, ttl=st.sampled_from([2.0, 5.0]))
    def pin_soft(self, ns: int, seed: int, length: int, ttl: float) -> None:
        hashes = CHAINS[ns][seed][:length]
        here = self._resident_run(hashes)
        self.in_loop(lambda: self.small.store.operations.pin(NAMESPACES[ns].id, hashes, ttl))
        for block_hash in here:
            if block_hash not in self.hard:
                earlier = self.soft.get(block_hash, (0.0, set()))[0]
                until = max(earlier, self.clock.now + ttl)
                self.soft[block_hash] = (until, self._tiers_of(block_hash))

    @precondition(lambda self: self.hard or self.soft)
    @rule(ns=NAMESPACE, seed=SEED, is_all=st.booleans())
    def unpin(self, ns: int, seed: int, is_all: bool) -> None:
        known = set(self.hard) | set(self.soft)
        mine = {h for chains in CHAINS[ns] for h in chains} if is_all else set(CHAINS[ns][seed])
        hashes = None if is_all else CHAINS[ns][seed]
        if not self.small.store.holdings.pins.covers(next(iter(known))):
            raise AssertionError("a pin that the store does not know")
        namespace_id = NAMESPACES[ns].id
        ended = self.in_loop(lambda: self.small.store.operations.unpin(namespace_id, hashes))
        assert ended == len(known & mine)
        for block_hash in known & mine:
            self.hard.pop(block_hash, None)
            self.soft.pop(block_hash, None)

    @rule(seed=st.integers(1, 2), slots=st.sampled_from([0, 1, 3, 8]))
    def set_quota(self, seed: int, slots: int) -> None:
        tenant = TENANTS[seed]
        assert tenant is not None
        quota = Quota(slots * 8192 or None, slots * 12288 or None)
        self.in_loop(lambda: self.small.store.operations.set_quota(tenant, quota))
        self.quotas.pop(tenant, None)
        if slots:
            self.quotas[tenant] = slots * 8192

    @rule(tier=TIER, ns=NAMESPACE, seed=SEED, start=st.integers(0, 11))
    def evict_as_told(self, tier: Tier, ns: int, seed: int, start: int) -> None:
        hashes = CHAINS[ns][seed][start:]
        before = [self._block(h) for h in hashes]
        took_room = [b for b in before if b is not None and _takes_room(b, tier)]
        operations, namespace_id = self.small.store.operations, NAMESPACES[ns].id
        evicted = self.loop.run_until_complete(operations.evict(tier, namespace_id, hashes))
        assert evicted.evicted_blocks + evicted.kept_blocks == len(took_room)
        assert evicted.evicted_blocks == sum(not _takes_room(b, tier) for b in took_room)

    @rule(tier=TIER, ns=st.none() | NAMESPACE, size=st.sampled_from([1, 50_000, 10**9]))
    def evict_by_bytes(self, tier: Tier, ns: int | None, size: int) -> None:
        namespace_id = None if ns is None else NAMESPACES[ns].id
        operations = self.small.store.operations
        evicted = self.loop.run_until_complete(operations.evict_bytes(tier, namespace_id, size))
        assert evicted.freed_bytes >= size or size > 1 or evicted.evicted_blocks == 0

    @precondition(lambda self: len(self.committed) > 12)
    @rule(tier=st.none() | TIER, ns=st.none() | NAMESPACE)
    def clear(self, tier: Tier | None, ns: int | None) -> None:
        namespace_id = None if ns is None else NAMESPACES[ns].id
        held = {b for b in self._blocks() if b.pins or b.writers}
        self.loop.run_until_complete(self.small.store.operations.clear(tier, namespace_id))
        spaces = NAMESPACES if ns is None else [NAMESPACES[ns]]
        for each in (Tier.DRAM, Tier.SSD) if tier is None else (tier,):
            for block in self._blocks():
                if block.namespace.namespace in spaces and each in _tiers(block):
                    assert block in held or block.hash in self.hard or each is Tier.DRAM
        pins = self.small.store.holdings.pins
        self.soft = {h: pin for h, pin in self.soft.items() if h in pins.soft}

    # ---- corruption ----

    @precondition(lambda self: len(self.committed) > 4)
    @rule(data=st.data())
    def dram_bytes_are_found_wrong(self, data: st.DataObject) -> None:
        """As a failed verification does: unlinked at once, freed when the last reader is gone."""
        found = sorted((b for b in self._blocks() if b.in_dram), key=lambda b: b.hash)
        if not found:
            return
        block = found[data.draw(st.integers(0, len(found) - 1))]
        offsets = {slot.offset for slot in block.slots if slot is not None}
        holdings = self.small.store.holdings
        was_held = bool(block.pins)
        holdings.quarantine(block)
        holdings.publish()
        self._unpinned(block.hash)
        free = {
            extent.base + number
            for extent in holdings.pool.slots.extents()
            for number in extent.free
        }
        if was_held:  # two-phase: no slot of it is free while it is read
            held = {s.extent.base + s.number for s in block.slots if s is not None}
            assert {s.offset for s in block.slots if s is not None} == offsets
            assert not held & free

    @precondition(lambda self: len(self.committed) > 4)
    @rule(data=st.data())
    def an_ssd_record_goes_bad(self, data: st.DataObject) -> None:
        """A byte on the drive flips; who reads it next finds out, and nobody is shown it."""
        ssd = self.small.ssd
        assert ssd is not None
        rows = sorted(
            (r for b in self._blocks() if b.in_ssd for r in b.rows if r is not None),
            key=lambda row: (row.segment, row.offset),
        )
        if not rows:
            return
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        with ssd.segment_path(row).open("r+b") as file:
            file.seek(row.offset + PAGE_BYTES)
            byte = file.read(1)
            file.seek(row.offset + PAGE_BYTES)
            file.write(bytes([byte[0] ^ 1]))
        # It may be found at any time from now on; then its SSD copy goes.
        for tiers in [*self.hard.values(), *(tiers for _, tiers in self.soft.values())]:
            tiers.discard(Tier.SSD)
        self.has_bad_records = True

    # ---- holes ----

    @rule(seed=SEED, number=st.integers(1, 11))
    def a_block_whose_parent_is_absent_is_a_hole(self, seed: int, number: int) -> None:
        hashes, session = CHAINS[0][seed], self.sessions[0]
        catalog = self.small.store.holdings.catalog
        block = catalog.blocks.get(hashes[number])
        if block is not None:
            return
        salt = TENANTS[seed] if number >= SHARED_BLOCKS else None
        before = catalog.holes
        run, parent = hashes[number : number + 1], hashes[number - 1]
        stored = self.in_loop(lambda: self.small.put(session, run, parent, salt))
        if stored:
            self.committed.add((hashes[number], 0))
        is_hole = bool(stored) and parent not in catalog.blocks
        assert catalog.holes == before + is_hole

    # ---- inner steps ----

    def _blocks(self) -> list[Block]:
        return list(self.small.store.holdings.catalog.blocks.values())

    def _block(self, block_hash: BlockHash) -> Block | None:
        return self.small.store.holdings.catalog.blocks.get(block_hash)

    def _tiers_of(self, block_hash: BlockHash) -> set[Tier]:
        block = self._block(block_hash)
        tiers = _tiers(block) if block is not None else set()
        return tiers - {Tier.SSD} if self.has_bad_records else tiers

    def _resident_run(self, hashes: list[BlockHash]) -> list[BlockHash]:
        run = []
        for block_hash in hashes:
            block = self._block(block_hash)
            if block is None or not _tiers(block):
                break
            run.append(block_hash)
        return run

    def _unpinned(self, block_hash: BlockHash) -> None:
        self.hard.pop(block_hash, None)
        self.soft.pop(block_hash, None)

    def _slot_bytes(self, ns: int) -> int:
        return sum(-(-group.part_bytes // 4096) * 4096 for group in NAMESPACES[ns].groups)

    def _usage(self) -> dict[bytes, int]:
        return {u.salt_id: u.dram_bytes for u in self.small.store.operations.usage()}

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
        self.soft.clear()
        self.quotas.clear()

    # ---- always ----

    @invariant()
    def nothing_drifts(self) -> None:
        self.small.check_integrity()

    @invariant()
    def pinned_blocks_stay_where_they_are(self) -> None:
        pins = self.small.store.holdings.pins
        if self.has_bad_records:  # what was only on SSD may be gone, and its pin with it
            self.hard = {
                h: tiers for h, tiers in self.hard.items() if Tier.DRAM in tiers or h in pins.hard
            }
            self.soft = {
                h: pin for h, pin in self.soft.items() if Tier.DRAM in pin[1] or h in pins.soft
            }
        assert set(pins.hard) == set(self.hard)
        assert set(pins.soft) == set(self.soft)
        assert pins.hard_bytes <= pins.limit_bytes
        kept = {**self.hard, **{h: tiers for h, (_, tiers) in self.soft.items()}}
        for block_hash, tiers in kept.items():
            assert tiers <= _tiers(self.small.store.holdings.catalog.blocks[block_hash])

    @invariant()
    def blocks_are_the_tenants_who_staged_them(self) -> None:
        for block in self.small.store.holdings.catalog.blocks.values():
            seed = OWNERS.get(block.hash)
            assert block.salt_id == (TENANTS[seed] if seed is not None else None)

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


def _tiers(block: Block) -> set[Tier]:
    return ({Tier.DRAM} if block.in_dram else set()) | ({Tier.SSD} if block.in_ssd else set())


def _takes_room(block: Block, tier: Tier) -> bool:
    return any(block.slots) if tier is Tier.DRAM else block.in_ssd


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestStoreModel = StoreMachine.TestCase
