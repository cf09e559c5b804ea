"""Which blocks there are, in which tiers, and who keeps them there. Pure: no I/O, no clock.

              begin_part          commit_part (required)       add_row (required)
    (absent) ───────────► STAGED ───────────────────────► DRAM ──────────────────► DRAM+SSD
                            │ abort_part                   │ drop_dram      land ▲ │ drop_dram
                            ▼                              ▼                     │ ▼
                         (absent)                       (absent)                 SSD
    doom: unlinked at once from every tier; its slots are free when the last pin is gone.

A block is resident in a tier when all its required parts are (see `needs`); only then, and when
that ends, an event is recorded. Parts of window and state groups may come later or be missing: a
tombstone, which `usable_prefix` minds. Blocks that recovery found on SSD and nobody asked for sleep
(see `sleeping`): whoever is given hashes calls `wake` with them first. `drain_events` hands events
out in order. Slots and rows are opaque here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emberkv_proto.events import Keys
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import BlockHash, SaltId, Tier
from store_daemon.block import Block, StoredNamespace
from store_daemon.residency import STORED_TIERS, ResidencyBook, Told
from store_daemon.sleeping import SleepingBlocks
from store_daemon.tombstones import PartQueue

if TYPE_CHECKING:
    from store_daemon.tenants import Tenant
    from store_daemon.tiers.slots import Slot
    from store_daemon.tiers.ssd import SsdRow

MAX_ANCESTORS_ASKED = 1024
"""How far up a chain is followed before a block that came after its child leans on its parent."""
SCAN_BLOCKS = 4096
"""Looked at in one turn of the loop: about a millisecond."""
MOST_WOKEN = 256
"""Blocks of a tenant that one call wakes; bounds one turn of the loop."""

TenantOf = Callable[[SaltId | None], "Tenant | None"]
"""The account of a salt id; None: nobody's."""


@dataclass(slots=True)
class Freed:
    """What a change let go: slots to free now, rows to forget."""

    slots: list[Slot] = field(default_factory=list)
    rows: list[SsdRow] = field(default_factory=list)


class BlockCatalog:
    """All blocks of the node. Each call is O(parts) unless it says otherwise.

    Args:
        on_evictable: told of a block that may have become a victim (see `is_evictable`).
        on_entered, on_left: told of a block that begins and ceases to take room in DRAM.
        on_unlinked: told of a block that had to stay (see `Block.stays`) and is in no tier now.
    """

    def __init__(
        self,
        on_evictable: Callable[[Block], None],
        on_entered: Callable[[Block], None] = lambda block: None,
        on_left: Callable[[Block], None] = lambda block: None,
        on_unlinked: Callable[[Block], None] = lambda block: None,
    ) -> None:
        self.blocks: dict[BlockHash, Block] = {}
        self._book = ResidencyBook()
        self.ledgers = self._book.ledgers
        self._children: dict[BlockHash, int] = {}
        self._doomed: set[Block] = set()
        self._on_evictable = on_evictable
        self._on_entered = on_entered
        self._on_left = on_left
        self._on_unlinked = on_unlinked
        self.old_parts = PartQueue()
        """Parts in DRAM whose block can stay without them."""
        self.sleeping: SleepingBlocks | None = None
        """Those of recovery that were not asked for yet; they are in no other place here."""
        self._tenant_of: TenantOf = lambda salt_id: None
        self._awake: set[SaltId] = set()
        """Tenants that were found to have no block that sleeps."""
        self.holes = 0
        """Blocks that came to DRAM while their parent was in no tier."""

    def find(self, namespace: StoredNamespace, block_hash: BlockHash) -> Block | None:
        """A block of this namespace; another namespace's is not visible."""
        block = self.blocks.get(block_hash)
        if block is None and self.sleeping is not None:
            self.wake((block_hash,))
            block = self.blocks.get(block_hash)
        return block if block is not None and block.namespace is namespace else None

    def wake(self, hashes: Sequence[BlockHash]) -> None:
        """Let those of `hashes` that sleep be blocks like others. O(len(hashes))."""
        if self.sleeping is None:
            return
        for found in self.sleeping.wake(hashes):
            first = found.rows[0]
            tenant = self._tenant_of(first.salt_id)  # was charged when the block was adopted
            block = self._create(found.namespace, first.block_hash, first.parent, tenant)
            for row in found.rows:
                block.rows[row.part] = row
            block.in_ssd = True
            if tenant is not None:
                tenant.on_ssd.offer(block)
        if not len(self.sleeping):
            self.sleeping = None

    def wake_owned(self, salt_id: SaltId) -> bool:
        """Let some of a tenant's blocks be in `blocks`; False: none of them slept.

        O(blocks that slept at the start), in C.
        """
        if self.sleeping is None or salt_id in self._awake:
            return False
        owned = self.sleeping.of_salt(salt_id, MOST_WOKEN)
        if len(owned) < MOST_WOKEN:
            self._awake.add(salt_id)
        self.wake(owned)
        return bool(owned)

    def children(self, block_hash: BlockHash) -> int:
        """How many blocks in DRAM, or being written there, name it as their parent."""
        return self._children.get(block_hash, 0)

    def is_evictable(self, block: Block) -> bool:
        """Whether its slots may be freed now: nobody holds it and no child would be orphaned."""
        return (
            not block.pins
            and not block.writers
            and not block.stays
            and any(block.slots)
            and block.hash not in self._children
        )

    def may_lose_part(self, block: Block) -> bool:
        """Whether an optional part's slot may be freed now."""
        return block.in_dram and not block.pins and not block.writers and not block.stays

    def touch_parts(self, found: Sequence[Block]) -> None:
        """A hit was asked for: the optional parts in its reach are as young as their blocks."""
        if not found or not found[0].namespace.is_hybrid:
            return
        namespace = found[0].namespace
        needs = namespace.needs(len(found))
        for part in namespace.optional:
            for block in found[needs.starts[part] :]:
                if block.slots[part] is not None:
                    self.old_parts.touch(block, part, block.access)

    def usable_prefix(self, namespace: StoredNamespace, hashes: Sequence[BlockHash]) -> list[Block]:
        """The longest usable hit's blocks, resident in DRAM or SSD. O(len(hashes))."""
        found: list[Block] = []
        for block in map(self.blocks.get, hashes):
            if (
                block is None
                or block.namespace is not namespace
                or not (block.in_dram or block.in_ssd)
            ):
                break
            found.append(block)
        if namespace.is_hybrid:
            del found[namespace.longest_hit([block.held_parts for block in found]) :]
        return found

    def whole_prefix(self, namespace: StoredNamespace, hashes: Sequence[BlockHash]) -> list[Block]:
        """The leading blocks of which no part is missing. O(len(hashes))."""
        found = self.usable_prefix(namespace, hashes)
        if namespace.is_hybrid:
            tombstones = (n for n, block in enumerate(found) if not all(block.held_parts))
            del found[next(tombstones, len(found)) :]
        return found

    # ---- writing ----

    def begin_part(
        self,
        namespace: StoredNamespace,
        block_hash: BlockHash,
        parent: BlockHash | None,
        part: int,
        tenant: Tenant | None = None,
    ) -> Block:
        """Note that a part is being written; the block need not exist yet.

        A block stays the tenant's who staged it first, until it is gone from every tier.
        """
        block = self.blocks.get(block_hash)
        if block is None:
            block = self._create(namespace, block_hash, parent, tenant)
        assert block.namespace is namespace
        assert not block.writers >> part & 1
        assert block.slots[part] is None
        block.writers |= 1 << part
        if block.tenant is not None:
            block.tenant.charge_dram(namespace.size_classes[part].slot_bytes)
        if not block.leans:
            self._lean(block)
        return block

    def commit_part(self, block: Block, part: int, slot: Slot) -> None:
        """The part is whole in `slot`; with its last required part the block becomes resident."""
        assert block.writers >> part & 1, "commit without begin"
        assert not block.is_doomed
        block.writers &= ~(1 << part)
        self._bring_in(block, part, slot)
        self._offer(block)

    def abort_part(self, block: Block, part: int) -> None:
        """The part will not come. A block of which nothing is left is unlinked."""
        assert block.writers >> part & 1, "abort without begin"
        block.writers &= ~(1 << part)
        if block.is_doomed:
            return
        if block.tenant is not None:
            block.tenant.charge_dram(-block.namespace.size_classes[part].slot_bytes)
        self._lean(block)
        self._unlink_if_empty(block)
        self._offer(block)

    def land(self, block: Block, slots: Mapping[int, Slot]) -> None:
        """Parts were brought to DRAM from another tier."""
        for part, slot in slots.items():
            assert block.slots[part] is None
            assert not block.writers >> part & 1
            self._bring_in(block, part, slot)
            if block.tenant is not None:
                block.tenant.charge_dram(block.namespace.size_classes[part].slot_bytes)
        self._offer(block)

    def add_rows(self, block: Block, rows: Sequence[SsdRow]) -> None:
        """Parts were written to SSD; with those that are there already, all required ones."""
        assert not block.is_doomed
        for row in rows:
            assert block.rows[row.part] is None
            self._add_row(block, row)
        assert block.in_ssd

    # ---- letting go ----

    def drop_dram(self, block: Block) -> Freed:
        """Evict (or, with an SSD copy, demote) a block that nobody holds."""
        assert not block.pins
        assert not block.writers
        freed = Freed(slots=self._leave_dram(block))
        self._unlink_if_empty(block)
        return freed

    def drop_part(self, block: Block, part: int) -> Freed:
        """An optional part leaves DRAM; its block stays resident."""
        slot = block.slots[part]
        assert self.may_lose_part(block)
        assert part in block.namespace.optional
        assert slot is not None
        self._clear(block, part, slot)
        return Freed(slots=[slot])

    def drop_row(self, row: SsdRow) -> Freed:
        """The row's bytes are gone: the block leaves SSD, and its other rows are of no use."""
        self.wake((row.block_hash,))
        block = self.blocks.get(row.block_hash)
        if block is None or row.part >= len(block.rows) or block.rows[row.part] != row:
            return Freed()
        freed = Freed(rows=[other for other in self._leave_ssd(block) if other != row])
        self._unlink_if_empty(block)
        return freed

    def move_row(self, old: SsdRow, new: SsdRow) -> bool:
        """The same bytes stand elsewhere now. False if the block is gone or has another row."""
        self.wake((old.block_hash,))
        block = self.blocks.get(old.block_hash)
        if block is None or old.part >= len(block.rows) or block.rows[old.part] != old:
            return False
        block.rows[old.part] = new
        return True

    def drop_ssd(self, block: Block) -> Freed:
        """The block leaves SSD."""
        freed = Freed(rows=self._leave_ssd(block))
        self._unlink_if_empty(block)
        return freed

    def doom(self, block: Block) -> Freed:
        """Unlink the block everywhere. If it is pinned, `unpin` returns its slots later.

        Parts that are being written can only be aborted from then on.
        """
        assert not block.is_doomed
        block.is_doomed = True
        freed = Freed(rows=self._leave_ssd(block))
        places = list(block.slots)
        slots = self._leave_dram(block)
        if block.tenant is not None:
            block.tenant.charge_dram(-block.dram_bytes)  # of the parts that are being written
        del self.blocks[block.hash]
        if block.stays:
            self._on_unlinked(block)
        if block.pins:
            block.slots = places  # who holds it reads each part where it was
            self._doomed.add(block)
        else:
            freed.slots = slots
        return freed

    def offer(self, block: Block) -> None:
        """A reason for the block to stay has ended; it may be a victim now."""
        if self.blocks.get(block.hash) is block:
            self._offer(block)

    def pin(self, block: Block) -> None:
        block.pins += 1

    def unpin(self, blocks: Iterable[Block]) -> list[Slot]:
        """End one pin of each; return the slots of doomed blocks whose last pin it was."""
        freed: list[Slot] = []
        children = self._children
        for block in blocks:
            pins = block.pins = block.pins - 1
            assert pins >= 0, "unpin without pin"
            if pins:
                continue
            if block.is_doomed:
                if block in self._doomed:
                    self._doomed.remove(block)
                    freed += [slot for slot in block.slots if slot is not None]
                    block.slots = [None] * len(block.slots)
            elif not block.is_queued and block.hash not in children:
                self._offer(block)
        return freed

    # ---- asking ----

    def doomed_slots(self) -> Iterator[Slot]:
        """Slots of unlinked blocks that wait for their last reader."""
        for block in self._doomed:
            yield from filter(None, block.slots)

    def drain_events(self) -> list[Told]:
        """The changes since the last call, in order, neighbours of one kind as one event."""
        return self._book.drain()

    def resident_keys(self, tier: Tier) -> Keys:
        """Index keys of the tier's blocks. O(blocks)."""
        hashes = [b.hash for b in self.resident(tier)]
        keys = index_keys(hashes) if hashes else np.empty(0, dtype=np.uint64)
        if tier is Tier.SSD and self.sleeping is not None:
            return np.concatenate([keys, self.sleeping.keys()])
        return keys

    def scan_keys(self, tier: Tier) -> Iterator[Keys]:
        """Index keys of the tier's blocks, SCAN_BLOCKS at a time, as of when each is yielded.

        Blocks may come and go between two: one that came since the first may be left out. One
        step of all, which lists the blocks that do not sleep, takes 50 ms for a million.
        """
        if tier is Tier.SSD and self.sleeping is not None:
            yield from self.sleeping.scan_keys(SCAN_BLOCKS)
        blocks = list(self.blocks.values())  # those that woke meanwhile are here
        for start in range(0, len(blocks), SCAN_BLOCKS):
            some = blocks[start : start + SCAN_BLOCKS]
            hashes = [b.hash for b in some if (b.in_dram if tier is Tier.DRAM else b.in_ssd)]
            yield index_keys(hashes) if hashes else np.empty(0, dtype=np.uint64)

    def resident(self, tier: Tier) -> Iterator[Block]:
        """The tier's blocks, but for those that sleep."""
        for block in self.blocks.values():
            if block.in_dram if tier is Tier.DRAM else block.in_ssd:
                yield block

    def check_integrity(self) -> None:
        """Assert every invariant of the module docstring. O(blocks)."""
        children: dict[BlockHash, int] = {}
        for block_hash, block in self.blocks.items():
            assert block.hash == block_hash
            assert not block.is_doomed
            assert any(block.slots) or any(block.rows) or block.writers, "an empty block is linked"
            assert block.in_dram == block.namespace.has_required(block.slots)
            assert block.in_ssd == block.namespace.has_required(block.rows)
            assert block.in_ssd or not any(block.rows), "rows of a block that is not on SSD"
            assert block.pins >= 0
            for part, slot in enumerate(block.slots):
                assert not (slot is not None and block.writers >> part & 1)
                assert slot is None or slot.extent.occupants[slot.number] is block
            assert block.takes_room == bool(block.writers or any(block.slots))
            assert not block.leans or block.takes_room
            if block.leans and block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
            assert not self.is_evictable(block) or block.is_queued, "a victim nobody can find"
        assert children == self._children, "children counts drifted"
        optional = {
            (block, part)
            for block in self.blocks.values()
            for part in block.namespace.optional
            if block.slots[part] is not None
        }
        assert set(self.old_parts) == optional, "the queue of optional parts drifted"
        for tier in STORED_TIERS:
            self._book.check(tier, self.resident_keys(tier))
        if self.sleeping is not None:
            self.sleeping.check_integrity()
            assert not any(block_hash in self.sleeping for block_hash in self.blocks)
        for block in self._doomed:
            assert block.is_doomed
            assert block.pins > 0, "a doomed block that nobody holds was not freed"
            assert self.blocks.get(block.hash) is not block

    # ---- inner steps ----

    def _create(
        self,
        namespace: StoredNamespace,
        block_hash: BlockHash,
        parent: BlockHash | None,
        tenant: Tenant | None,
    ) -> Block:
        parts = namespace.parts
        block = Block(block_hash, namespace, parent, [None] * parts, [None] * parts)
        block.tenant = tenant
        before = self.blocks.get(parent) if parent is not None else None
        if before is not None:
            block.depth = before.depth + 1
            block.turn = before.turn + (before.uses > 0)
        self.blocks[block_hash] = block
        return block

    def _place(self, block: Block, part: int, slot: Slot) -> bool:
        """Return whether the block has become resident in DRAM; that is still to be booked."""
        block.slots[part] = slot
        if not block.leans:
            self._lean(block)
        slot.extent.occupants[slot.number] = block
        namespace = block.namespace
        if part in namespace.optional:
            self.old_parts.touch(block, part, block.access)
        if block.in_dram or not namespace.has_required(block.slots):
            return False
        block.in_dram = True
        if block.parent is not None and not self._is_known(block.parent):
            self.holes += 1
        return True

    def _bring_in(self, block: Block, part: int, slot: Slot) -> None:
        if self._place(block, part, slot):
            self._book.stored(Tier.DRAM, (block.hash,))

    def _is_known(self, block_hash: BlockHash) -> bool:
        return block_hash in self.blocks or (
            self.sleeping is not None and block_hash in self.sleeping
        )

    def _leave_dram(self, block: Block) -> list[Slot]:
        slots: list[Slot] = []
        for part, slot in enumerate(block.slots):
            if slot is not None:
                self._clear(block, part, slot)
                slots.append(slot)
        if block.in_dram:
            block.in_dram = False
            self._book.removed(Tier.DRAM, (block.hash,))
        self._lean(block)
        return slots

    def _clear(self, block: Block, part: int, slot: Slot) -> None:
        del slot.extent.occupants[slot.number]
        block.slots[part] = None
        if block.tenant is not None:
            block.tenant.charge_dram(-block.namespace.size_classes[part].slot_bytes)
        if part in block.namespace.optional:
            self.old_parts.discard(block, part)

    def _lean(self, block: Block) -> None:
        """Count the block as its parent's child exactly while it has or gets a place in DRAM.

        A forged chain that bites its own tail would hold its slots for ever, so the block that
        closes the ring leans on nobody.
        """
        leans = not block.is_doomed and (bool(block.writers) or any(block.slots))
        if leans is not block.takes_room:
            block.takes_room = leans
            (self._on_entered if leans else self._on_left)(block)
        if leans is block.leans or (leans and self._may_close_ring(block)):
            return
        parent_hash = block.parent
        block.leans = leans
        if parent_hash is None:
            return
        if leans:
            self._children[parent_hash] = self._children.get(parent_hash, 0) + 1
            return
        left = self._children[parent_hash] - 1
        if left:
            self._children[parent_hash] = left
            return
        del self._children[parent_hash]
        parent = self.blocks.get(parent_hash)
        if parent is not None:
            self._offer(parent)

    def _may_close_ring(self, block: Block) -> bool:
        """Whether leaning on its parent could make the block its own ancestor.

        Only a block that came after its child can; the way up is followed for a bounded number of
        steps.
        """
        if block.hash not in self._children:
            return block.parent == block.hash
        ancestor = block.parent
        for _ in range(MAX_ANCESTORS_ASKED):
            above = self.blocks.get(ancestor) if ancestor is not None else None
            if above is None or not above.leans:
                return ancestor == block.hash
            ancestor = above.parent
        return True

    def _add_row(self, block: Block, row: SsdRow) -> None:
        block.rows[row.part] = row
        if block.tenant is not None:
            block.tenant.ssd_bytes += row.end - row.offset
        if not block.in_ssd and block.namespace.has_required(block.rows):
            block.in_ssd = True
            if block.tenant is not None:
                block.tenant.on_ssd.offer(block)
            self._book.stored(Tier.SSD, (block.hash,))

    def _leave_ssd(self, block: Block) -> list[SsdRow]:
        if block.tenant is not None:
            block.tenant.ssd_bytes -= block.ssd_bytes
        rows = [row for row in block.rows if row is not None]
        block.rows = [None] * len(block.rows)
        if block.in_ssd:
            block.in_ssd = False
            self._book.removed(Tier.SSD, (block.hash,))
        return rows

    def _unlink_if_empty(self, block: Block) -> None:
        if (
            not (any(block.slots) or any(block.rows) or block.writers)
            and self.blocks.get(block.hash) is block
        ):
            del self.blocks[block.hash]
            if block.stays:
                self._on_unlinked(block)

    def _offer(self, block: Block) -> None:
        if not block.is_queued and self.is_evictable(block):
            self._on_evictable(block)
