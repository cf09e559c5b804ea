"""The catalog and the pool kept in step: takes and frees slots, evicts, commits, tells the sink.

Runs on the daemon's event loop; nothing here waits. Decisions are `catalog`'s and `eviction`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from client_sdk import faults
from emberkv_proto.types import BlockHash, NamespaceId, Tier
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import Freed
from store_daemon.config import DramSection
from store_daemon.departures import Departures
from store_daemon.eviction import EvictionQueue
from store_daemon.extents import choose_extent
from store_daemon.histogram import Measures
from store_daemon.pins import PinBook
from store_daemon.policies import POLICIES
from store_daemon.ports import EventSink
from store_daemon.quotas import QuotaEviction
from store_daemon.recoverable_catalog import RecoverableCatalog
from store_daemon.replicas import ReplicaLimits, Replicas
from store_daemon.residency import Told
from store_daemon.sessions import StagedPart
from store_daemon.tenants import Tenant, TenantBook
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.slots import Extent, SizeClass, Slot
from store_daemon.tiers.ssd import SsdRow
from store_daemon.tombstones import OldPart

MAX_ROOM_STEPS = 256
SHED_BLOCKS = 16
"""Most blocks of others that one step of making room evicts."""
TRIM_BLOCKS = 256
"""Most blocks one trim evicts before the loop may serve others."""


class Holdings:
    """What the node holds. `counters` are monotonic and named as they are exported."""

    def __init__(
        self,
        config: DramSection,
        pool: Pool,
        clock: Callable[[], float],
        tenants: TenantBook | None = None,
        patience_seconds: float = 0.0,
    ) -> None:
        """`patience_seconds`: how long a victim waits for its SSD copy before it may go without."""
        self.pool = pool
        self._clock = clock
        self.counters: Counter[str] = Counter()
        self.measures = Measures()
        self.queue = EvictionQueue(POLICIES[config.policy](), clock, self._count_policy_failure)
        self.queue.on_reused = self._reused
        self.catalog = RecoverableCatalog(
            self.queue.offer, self.queue.all_entered, self._left_dram, self._unlinked
        )
        capacity_bytes = pool.slots.total_bytes
        self.replicas = Replicas(ReplicaLimits(capacity_bytes), clock)
        self.pins = PinBook(int(config.pin_share * capacity_bytes))
        self.lost_pins: list[tuple[NamespaceId, BlockHash]] = []
        """Hard pins whose block is gone, still to be struck from the local index."""
        self.tenants = tenants or TenantBook()
        self.quotas = QuotaEviction(
            self.tenants,
            self.catalog,
            self.queue,
            self.counters,
            self.let_go,
            lambda tenant: self._evict_overdue(lambda block: block.tenant is tenant),
            self.lose_ssd,
        )
        self.departures = Departures(
            int((1 - config.low_watermark) * capacity_bytes), patience_seconds
        )
        self.is_being_saved: Callable[[Block], bool] = lambda block: False
        """Whether a victim's SSD copy is on its way, so that it is worth waiting for."""
        self.rows_to_forget: list[SsdRow] = []
        """Rows of blocks that left SSD; the writeback thread drops them."""
        self.on_resident: Callable[[Sequence[Block]], None] = lambda blocks: None
        """Told of blocks that have become resident in DRAM, and of parts that come later."""
        self.on_own: Callable[[Block], None] = lambda block: None
        """Told of each replica that has become one of our own."""
        self.on_reused: Callable[[Block], None] = lambda block: None
        """Told of each block that was asked for again."""
        self._config = config
        self.sink: EventSink | None = None
        """Where events go; set before the first block."""
        self.teller: Callable[[Told], None] | None = None
        """Told of each event after the sink, with the hashes of its blocks."""

    def reconfigure(self, config: DramSection) -> None:
        """Other watermarks, another policy, another limit for pins; the pool stays as it is."""
        if config.policy != self._config.policy:
            self.queue.use(POLICIES[config.policy](), self.catalog.blocks.values())
        capacity_bytes = self.pool.slots.total_bytes
        self.pins.limit_bytes = int(config.pin_share * capacity_bytes)
        self.departures.limit_bytes = int((1 - config.low_watermark) * capacity_bytes)
        self._config = config

    # ---- room ----

    def take(self, size_class: SizeClass, tenant: Tenant | None = None) -> Slot | None:
        """A slot marked STAGED, evicting what must go; None when all else is held or staged.

        A tenant that would be over its quota makes room among its own blocks, or gets None.
        """
        if tenant is not None and not self.quotas.admit(tenant, size_class.slot_bytes):
            return None
        slot = self.pool.take(size_class)
        steps = 0
        while (
            slot is None
            and steps < MAX_ROOM_STEPS
            and (self._make_room(size_class) or self._evict_overdue(_any_block))
        ):
            slot = self.pool.take(size_class)
            steps += 1
        return slot

    def take_all(
        self, namespace: StoredNamespace, parts: Sequence[int], tenant: Tenant | None = None
    ) -> dict[int, Slot] | None:
        """A slot for each of these parts of one block, or none at all. Quotas as in `take`."""
        if tenant is not None:
            wanted_bytes = sum(namespace.size_classes[part].slot_bytes for part in parts)
            if not self.quotas.admit(tenant, wanted_bytes):
                return None
        slots: dict[int, Slot] = {}
        for part in parts:
            slot = self.take(namespace.size_classes[part])
            if slot is None:
                self.give_back(slots.values())
                return None
            slots[part] = slot
        return slots

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Free slots whose bytes nobody reads or writes any more."""
        for slot in slots:
            self.pool.give_back(slot)

    @property
    def is_over_watermark(self) -> bool:
        return self.pool.slots.usage > self._config.high_watermark

    @property
    def is_over_low_watermark(self) -> bool:
        return self.pool.slots.usage > self._config.low_watermark

    def trim(self) -> bool:
        """Evict down to the low watermark, a bounded number of blocks; return whether to go on."""
        catalog, low = self.catalog, self._config.low_watermark
        left_blocks = TRIM_BLOCKS
        while left_blocks > 0:
            left_blocks -= 1
            if self._usage_to_come <= low:
                return False
            over = self.quotas.victim()
            if over is not None:
                if not self.quotas.evict(over):
                    return False
                continue
            victim = self.queue.oldest_of_all(catalog.is_evictable)
            part = (
                catalog.old_parts.oldest_of_all(catalog.may_lose_part)
                if catalog.old_parts
                else None
            )
            if part is not None and (victim is None or part.access < victim.access):
                self.drop_part(part)
            elif victim is None:
                return False
            elif len(run := self._run_to_trim(victim, part, left_blocks)) > 1:
                self._evict_run(run)
                left_blocks -= len(run) - 1
            elif not self.let_go(victim):
                return False
        return True

    def _run_to_trim(self, victim: Block, part: OldPart | None, most: int) -> list[Block]:
        """The next victims as far as they are one chain's end, and as far as they must go.

        `part` goes before what is younger.
        """
        namespace = victim.namespace
        if namespace.optional or victim.tenant is not None:
            return []
        slots = self.pool.slots
        too_much = self._usage_to_come - self._config.low_watermark
        wanted = math.ceil(too_much * slots.capacity_bytes / namespace.slot_bytes - 1e-6)
        behind = self.queue.order_behind(victim)
        if part is not None:
            behind = min(behind, part.access)
        run: list[Block] = []
        used: dict[Extent, int] = {}
        for block in self.catalog.run_above(victim, min(wanted, most)):
            if (run and block.access >= behind) or self.is_being_saved(block):
                break
            run.append(block)
            for slot in block.slots:
                if slot is not None:
                    extent = slot.extent
                    used[extent] = used.get(extent, extent.used_slots) - 1
            if not all(used.values()):
                break  # an extent comes free: that changes how much must go
        return run

    def _evict_run(self, run: Sequence[Block]) -> None:
        """`evict` for each of a chain's end, last block first."""
        now, observe = self._clock(), self.measures.evicted_idle_seconds.observe
        for block in run:
            faults.hit(faults.EVICT)
            observe(now - block.used_at)
        demoted = sum([block.in_ssd for block in run])
        self.counters["demoted_blocks"] += demoted
        self.counters["evicted_blocks"] += len(run) - demoted
        slots = self.catalog.drop_run(run).slots
        slots.reverse()  # neighbours were given to a chain in its order
        self.pool.give_back_run(slots)

    @property
    def _usage_to_come(self) -> float:
        """Usage once the victims that were put off have left."""
        slots = self.pool.slots
        if not self.departures.waiting_bytes or not slots.capacity_bytes:
            return slots.usage
        return (slots.used_bytes - self.departures.waiting_bytes) / slots.capacity_bytes

    def let_go(self, victim: Block) -> bool:
        """Evict a victim, or put it off until its SSD copy is written; False: neither, for now."""
        if not self.is_being_saved(victim):
            self.evict(victim)
            return True
        tenant = victim.tenant  # nobody else's block goes for it
        if self.departures.is_full and not self._evict_overdue(lambda b: b.tenant is tenant):
            if self.departures.is_patient:
                self.counters["unwritten_victims_kept"] += 1
                return False
            self.counters["unwritten_victims_lost"] += 1
            self.evict(victim)
            return True
        self.departures.put_off(victim, self._clock())
        self.queue.withdraw(victim)
        return True

    def writing_ended(self, block: Block) -> None:
        """The block waits for its SSD copy no more: it is there, or will not come for now."""
        if self.departures.end(block):
            self.catalog.offer(block)

    def _evict_overdue(self, is_wanted: Callable[[Block], bool]) -> bool:
        """Let the first wanted block that was put off long enough go unwritten."""
        block = self.departures.overdue(
            self._clock(), lambda b: is_wanted(b) and not (b.pins or b.writers)
        )
        if block is None:
            return False
        self.writing_ended(block)
        if not self.catalog.is_evictable(block):
            return False
        self.counters["unwritten_victims_lost"] += 1
        self.evict(block)
        return True

    def evict(self, block: Block) -> None:
        """Free a victim's slots; with an SSD copy it stays resident there."""
        faults.hit(faults.EVICT)
        self.counters["demoted_blocks" if block.in_ssd else "evicted_blocks"] += 1
        self.measures.evicted_idle_seconds.observe(self._clock() - block.used_at)
        self._let_go(self.catalog.drop_dram(block))

    def drop_part(self, old: OldPart) -> None:
        """Free a window or state part's slot; its block stays."""
        is_saved = old.block.rows[old.part] is not None
        self.counters["demoted_parts" if is_saved else "evicted_parts"] += 1
        self._let_go(self.catalog.drop_part(old.block, old.part))

    # ---- changes of one block ----

    def commit_part(self, block: Block, part: int, slot: Slot, checksum: int) -> None:
        """Publish a written part; tells `on_resident` when the block is, or was, resident by it.

        A block that was quarantined meanwhile takes it no more.
        """
        if block.is_doomed:
            self.catalog.abort_part(block, part)
            self.give_back([slot])
            return
        self.pool.commit(slot, block.hash, block.parent, checksum, block.salt_id)
        self.catalog.commit_part(block, part, slot)
        if block.in_dram:
            self.on_resident((block,))

    def commit_parts(
        self, staged: Sequence[StagedPart], part: int, checksums: Sequence[int]
    ) -> None:
        """`commit_part` for each block, in fewer passes."""
        if any(one.block.is_doomed for one in staged):
            for (block, slot), checksum in zip(staged, checksums, strict=True):
                self.commit_part(block, part, slot, checksum)
            return
        if not staged:
            return
        blocks, slots = zip(*staged, strict=True)
        if any(block.tenant is not None for block in blocks):
            for block, slot, checksum in zip(blocks, slots, checksums, strict=True):
                self.pool.commit(slot, block.hash, block.parent, checksum, block.salt_id)
        else:
            hashes, parents = [block.hash for block in blocks], [block.parent for block in blocks]
            self.pool.commit_run(slots, hashes, parents, checksums)
        self.catalog.commit_run(blocks, part, slots)
        resident = [block for block in blocks if block.in_dram]
        if resident:
            self.on_resident(resident)

    def abort_part(self, block: Block, part: int) -> None:
        self.catalog.abort_part(block, part)

    def land(self, block: Block, slots: Mapping[int, Slot]) -> None:
        """Parts of a block were read from SSD into `slots`, and their checksums hold."""
        for part, slot in slots.items():
            row = block.rows[part]
            assert row is not None
            self.pool.commit(slot, block.hash, block.parent, row.checksum, block.salt_id)
        self.catalog.land(block, slots)
        self.counters["promoted_blocks"] += 1

    def lose_ssd(self, block: Block) -> None:
        """Forget the block's SSD copy: it cannot be read, or must go."""
        self._let_go(self.catalog.drop_ssd(block))

    def quarantine(self, block: Block) -> None:
        """The block's DRAM bytes are wrong: unlink it everywhere; freed when nobody holds it."""
        self.counters["corrupt_blocks"] += 1
        self.remove(block)

    def remove(self, block: Block) -> list[SsdRow]:
        """Unlink the block everywhere; its slots are freed when nobody holds them.

        Returns the rows it had, which are to be forgotten.
        """
        freed = self.catalog.doom(block)
        self._let_go(freed)
        for slot in block.slots:
            if slot is not None:  # held by a reader; a restart meanwhile must not find it
                self.pool.unlink(slot)
        return freed.rows

    def drop_rows(self, rows: Iterable[SsdRow]) -> None:
        """The SSD tier has reclaimed these rows."""
        for row in rows:
            self._let_go(self.catalog.drop_row(row))

    def drop_incomplete(self) -> None:
        """Forget recovered blocks of which a part is missing."""
        self._let_go(self.catalog.drop_incomplete())

    def unpin(self, blocks: Iterable[Block]) -> None:
        """End one pin of each; a doomed block's slots are freed with the last one."""
        self.give_back(self.catalog.unpin(blocks))

    def expire_pins(self, now: float) -> None:
        """End the soft pins whose time is over."""
        self.unkeep(self.pins.expire(now))

    def unkeep(self, blocks: Iterable[Block]) -> None:
        """An operator's pin on these blocks has ended."""
        for block in blocks:
            self.catalog.offer(block)

    def shed_replicas(self, wanted_bytes: int = 0) -> None:
        """Make replicas, and so many more bytes of them, fit into their share, as far as they may
        go now."""
        replicas = self.replicas
        while replicas.bytes and replicas.bytes + wanted_bytes > replicas.limits.share_bytes:
            victim = replicas.oldest(self.catalog.is_evictable)
            if victim is None:
                return
            self.counters["shed_replicas"] += 1
            self.evict(victim)

    def drop_copies(self, passing: Sequence[Block]) -> None:
        """Free the DRAM of blocks that are on SSD and that nobody but one peer asked for."""
        for block in reversed(passing):
            is_idle = block.in_ssd and block.is_saved and not block.uses
            if is_idle and self.catalog.is_evictable(block):
                self.evict(block)
                self.counters["read_through_blocks"] += 1

    def publish(self) -> None:
        """Hand the recorded events to the sink, in order."""
        events = self.catalog.drain_events()
        if events:
            assert self.sink is not None, "a change before there is somebody to tell"
            for told in events:
                self.sink.emit(told.event)
                if self.teller is not None:
                    self.teller(told)

    def check_integrity(self) -> None:
        self.catalog.check_integrity()
        self.queue.check_integrity()
        self.pool.check_integrity()
        self.pins.check_integrity(self.catalog.blocks)
        sleeping = self.catalog.sleeping
        asleep = sleeping.bytes_by_salt() if sleeping is not None else {}
        self.tenants.check_integrity(self.catalog.blocks.values(), asleep)
        self.departures.check_integrity(self.catalog.blocks.values())
        self.replicas.check_integrity()

    # ---- inner steps ----

    def _left_dram(self, block: Block) -> None:
        self.replicas.forget(block)
        self.queue.left(block)

    def _reused(self, block: Block) -> None:
        if self.replicas.forget(block):
            self.counters["kept_replicas"] += 1
            self.on_own(block)
        self.on_reused(block)

    def _unlinked(self, block: Block) -> None:
        """A block that had to stay has left every tier all the same."""
        self.departures.end(block)
        if self.pins.is_hard(block):
            self.lost_pins.append((block.namespace.id, block.hash))
        self.pins.unpin([block])

    def _count_policy_failure(self) -> None:
        self.counters["policy_failures"] += 1

    def _let_go(self, freed: Freed) -> None:
        self.give_back(freed.slots)
        self.rows_to_forget += freed.rows

    def _make_room(self, wanted: SizeClass) -> bool:
        """One step towards a slot of the class: evict a block, or empty another class's extent.

        The oldest block of all decides: when it is another namespace's, room moves over to us.
        """
        if self.quotas.shed(wanted):
            return True
        is_evictable = self.catalog.is_evictable
        own = self.queue.oldest(wanted.namespace_id, is_evictable)
        oldest = self.queue.oldest_of_all(is_evictable)
        part = self.catalog.old_parts.oldest(wanted, self.catalog.may_lose_part)
        if part is not None and (oldest is None or part.access < oldest.access):
            self.drop_part(part)
            return True
        if oldest is None:
            return False
        if own is oldest and own.slots[wanted.part] is not None:
            return self.let_go(own)
        extent = choose_extent(self.pool.slots, wanted, self.catalog)
        blocks = set(extent.occupants.values()) if extent is not None else set()
        if part is not None and any(block.access > part.access for block in blocks):
            # It is lost whole, with what is younger than what our own class could lose.
            if own is None or own.access > part.access:
                self.drop_part(part)
                return True
            blocks = set()
        if blocks and not any(self.is_being_saved(block) for block in blocks):
            self.counters["moved_extents"] += 1
            for block in blocks:
                self.evict(block)
            return True
        has_shed = self._shed_others(wanted)
        if (own is not None and self.let_go(own)) or has_shed:
            return True
        if part is not None:
            self.drop_part(part)
        return part is not None

    def _shed_others(self, wanted: SizeClass) -> bool:
        """Evict other namespaces' blocks that are older than any of ours; False: none.

        A chain lies in several extents, so often none of them can go at once; leaf by leaf they
        do empty.
        """
        for number in range(SHED_BLOCKS):
            victim = self.queue.oldest_of_all(self.catalog.is_evictable)
            is_ours = victim is None or victim.namespace.id == wanted.namespace_id
            if victim is None or is_ours or not self.let_go(victim):
                return number > 0
        return True

    def blocks_of(self, tier: Tier) -> int:
        return self.catalog.ledgers[tier].blocks


def _any_block(block: Block) -> bool:
    return True
