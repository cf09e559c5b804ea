"""Which blocks there are, in which tiers, and who keeps them there. Pure: no I/O, no clock.

              begin_part          commit_part (required)       add_row (required)
    (absent) ───────────► STAGED ───────────────────────► DRAM ──────────────────► DRAM+SSD
                            │ abort_part                   │ drop_dram      land ▲ │ drop_dram
                            ▼                              ▼                     │ ▼
                         (absent)                       (absent)                 SSD
    doom: unlinked at once from every tier; its slots are free when the last pin is gone.

A block is resident in a tier when all its required parts are (see `needs`); only then, and when
that ends, an event is recorded. Parts of window and state groups may come later or be missing: a
tombstone, which `usable_prefix` minds. `drain_events` hands events out in order. Slots and rows are
opaque here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, Keys
from emberkv_proto.hashing import index_key, index_keys
from emberkv_proto.types import BlockHash, Tier
from store_daemon.block import Block, StoredNamespace
from store_daemon.tombstones import PartQueue

if TYPE_CHECKING:
    from store_daemon.tenants import Tenant
    from store_daemon.tiers.slots import Slot
    from store_daemon.tiers.ssd import SsdRow

STORED_TIERS = (Tier.DRAM, Tier.SSD)
MAX_ANCESTORS_ASKED = 1024
"""How far up a chain is followed before a block that came after its child leans on its parent."""


@dataclass(slots=True)
class TierLedger:
    """A tier's conservation books: stored - removed == blocks, and xor over their index keys.

    `xor` stands where `drain_events` was last called, so it always agrees with the events.
    """

    blocks: int = 0
    xor: int = 0
    stored: int = 0
    removed: int = 0


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
        self.ledgers = {tier: TierLedger() for tier in STORED_TIERS}
        self._children: dict[BlockHash, int] = {}
        self._doomed: set[Block] = set()
        self._changes: list[tuple[type[BlocksStored | BlocksRemoved], Tier, list[BlockHash]]] = []
        self._on_evictable = on_evictable
        self._on_entered = on_entered
        self._on_left = on_left
        self._on_unlinked = on_unlinked
        self.old_parts = PartQueue()
        """Parts in DRAM whose block can stay without them."""
        self.holes = 0
        """Blocks that came to DRAM while their parent was in no tier."""

    def find(self, namespace: StoredNamespace, block_hash: BlockHash) -> Block | None:
        """A block of this namespace; another namespace's is not visible."""
        block = self.blocks.get(block_hash)
        return block if block is not None and block.namespace is namespace else None

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
        self._place(block, part, slot)
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
            self._place(block, part, slot)
            if block.tenant is not None:
                block.tenant.charge_dram(block.namespace.size_classes[part].slot_bytes)
        self._offer(block)

    def recover_part(
        self,
        namespace: StoredNamespace,
        block_hash: BlockHash,
        parent: BlockHash | None,
        part: int,
        slot: Slot,
        tenant: Tenant | None = None,
    ) -> bool:
        """Take over a slot of an earlier life, unverified. False if the part is there already."""
        block = self.blocks.get(block_hash) or self._create(namespace, block_hash, parent, tenant)
        if block.namespace is not namespace or block.slots[part] is not None:
            return False
        block.is_verified = False
        self._place(block, part, slot)
        if block.tenant is not None:
            block.tenant.charge_dram(namespace.size_classes[part].slot_bytes)
        self._offer(block)
        return True

    def recover_row(
        self, namespace: StoredNamespace, row: SsdRow, tenant: Tenant | None = None
    ) -> bool:
        """Take over a row of an earlier life. False if it does not fit or the part has one."""
        if not 0 <= row.part < namespace.parts:
            return False
        block = self.blocks.get(row.block_hash)
        if block is None:
            block = self._create(namespace, row.block_hash, row.parent, tenant)
        if block.namespace is not namespace or block.rows[row.part] is not None:
            return False
        self._add_row(block, row)
        return True

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
        block = self.blocks.get(row.block_hash)
        if block is None or row.part >= len(block.rows) or block.rows[row.part] != row:
            return Freed()
        freed = Freed(rows=[other for other in self._leave_ssd(block) if other != row])
        self._unlink_if_empty(block)
        return freed

    def move_row(self, old: SsdRow, new: SsdRow) -> bool:
        """The same bytes stand elsewhere now. False if the block is gone or has another row."""
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

    def drop_incomplete(self) -> Freed:
        """Forget what recovery left incomplete and nobody is writing. O(blocks)."""
        freed = Freed()
        for block in list(self.blocks.values()):
            if not block.in_dram and not block.writers:
                freed.slots += self._leave_dram(block)
            if not block.in_ssd:
                freed.rows += self._leave_ssd(block)
            self._unlink_if_empty(block)
        return freed

    def doom(self, block: Block) -> Freed:
        """Unlink the block everywhere. If it is pinned, `unpin` returns its slots later.

        Parts that are being written can only be aborted from then on.
        """
        assert not block.is_doomed
        block.is_doomed = True
        freed = Freed(rows=self._leave_ssd(block))
        slots = self._leave_dram(block)
        if block.tenant is not None:
            block.tenant.charge_dram(-block.dram_bytes)  # of the parts that are being written
        del self.blocks[block.hash]
        if block.stays:
            self._on_unlinked(block)
        if block.pins:
            block.slots = list(slots)
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

    def drain_events(self) -> list[Event]:
        """The changes since the last call, in order, neighbours of one kind as one event."""
        changes, self._changes = self._changes, []
        events: list[Event] = []
        for kind, tier, hashes in changes:
            keys = index_keys(hashes)
            self.ledgers[tier].xor ^= int(np.bitwise_xor.reduce(keys))
            events.append(kind(tier, keys))
        return events

    def resident_keys(self, tier: Tier) -> Keys:
        """Index keys of the tier's blocks. O(blocks)."""
        hashes = [b.hash for b in self.resident(tier)]
        return index_keys(hashes) if hashes else np.empty(0, dtype=np.uint64)

    def resident(self, tier: Tier) -> Iterator[Block]:
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
        for tier, ledger in self.ledgers.items():
            keys = [index_key(block.hash) for block in self.resident(tier)]
            xor = 0
            for key in keys:
                xor ^= key
            for _, changed, hashes in self._changes:
                for block_hash in hashes if changed is tier else ():
                    xor ^= index_key(block_hash)
            assert ledger.blocks == len(keys), f"{tier.name}: {ledger.blocks} != {len(keys)}"
            assert ledger.stored - ledger.removed == ledger.blocks, f"{tier.name}: not conserved"
            assert ledger.xor == xor, f"{tier.name}: digest drifted"
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

    def _place(self, block: Block, part: int, slot: Slot) -> None:
        block.slots[part] = slot
        if not block.leans:
            self._lean(block)
        slot.extent.occupants[slot.number] = block
        if part in block.namespace.optional:
            self.old_parts.touch(block, part, block.access)
        if not block.in_dram and block.namespace.has_required(block.slots):
            self._enter_dram(block)

    def _enter_dram(self, block: Block) -> None:
        block.in_dram = True
        if block.parent is not None and block.parent not in self.blocks:
            self.holes += 1
        self._record(BlocksStored, Tier.DRAM, block)

    def _leave_dram(self, block: Block) -> list[Slot]:
        slots = [slot for slot in block.slots if slot is not None]
        for part, slot in enumerate(block.slots):
            if slot is not None:
                self._clear(block, part, slot)
        if block.in_dram:
            block.in_dram = False
            self._record(BlocksRemoved, Tier.DRAM, block)
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
            self._record(BlocksStored, Tier.SSD, block)

    def _leave_ssd(self, block: Block) -> list[SsdRow]:
        if block.tenant is not None:
            block.tenant.ssd_bytes -= block.ssd_bytes
        rows = [row for row in block.rows if row is not None]
        block.rows = [None] * len(block.rows)
        if block.in_ssd:
            block.in_ssd = False
            self._record(BlocksRemoved, Tier.SSD, block)
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

    def _record(self, kind: type[BlocksStored | BlocksRemoved], tier: Tier, block: Block) -> None:
        ledger = self.ledgers[tier]
        if kind is BlocksStored:
            ledger.blocks += 1
            ledger.stored += 1
        else:
            ledger.blocks -= 1
            ledger.removed += 1
        last = self._changes[-1] if self._changes else None
        if last is not None and last[0] is kind and last[1] is tier:
            last[2].append(block.hash)
        else:
            self._changes.append((kind, tier, [block.hash]))
