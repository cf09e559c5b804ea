"""The catalog at the start of a life: it takes over what earlier ones left. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from emberkv_proto.hashing import UNKNOWN_CHECKSUM
from emberkv_proto.types import BlockHash, Tier
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import Freed, TenantOf
from store_daemon.run_catalog import RunCatalog
from store_daemon.sleeping import SleepingBlocks, WokenBlock

if TYPE_CHECKING:
    from store_daemon.tenants import Tenant
    from store_daemon.tiers.pool import FoundSlot
    from store_daemon.tiers.slots import Slot
    from store_daemon.tiers.ssd import SsdRow


class RecoverableCatalog(RunCatalog):
    """A catalog with the steps of recovery: slots first, then rows, then the blocks that sleep."""

    def recover_slots(
        self, namespace: StoredNamespace, found: Iterable[FoundSlot], tenant_of: TenantOf
    ) -> list[Slot]:
        """Take over slots of an earlier life, unverified; return those whose part is there already.

        O(slots), and O(blocks) once for all: call `offer_recovered` after the last of them.
        """
        refused: list[Slot] = []
        resident: list[BlockHash] = []
        holes, blocks, parts = self.holes, self.blocks, namespace.parts
        children, on_entered = self._children, self._on_entered
        for slot, block_hash, parent, salt_id in found:
            block = blocks.get(block_hash)
            if block is None:
                # Not `_create`: how deep it lies is not known while its ancestors may be missing.
                block = Block(block_hash, namespace, parent, [None] * parts, [None] * parts)
                if salt_id is not None:
                    block.tenant = tenant_of(salt_id)
                blocks[block_hash] = block
                block.takes_room = True
                on_entered(block)
                if block_hash not in children and parent != block_hash:  # it closes no ring
                    block.leans = True
                    if parent is not None:
                        children[parent] = children.get(parent, 0) + 1
            part = slot.extent.size_class.part
            if block.namespace is not namespace or block.slots[part] is not None:
                refused.append(slot)
                continue
            block.is_verified = False
            if self._place(block, part, slot):
                resident.append(block_hash)
            if block.tenant is not None:
                block.tenant.charge_dram(slot.extent.slot_bytes)
        self._book.stored(Tier.DRAM, resident)
        self.holes = holes  # they came in an earlier life
        return refused

    def offer_recovered(self) -> None:
        """Tell of all blocks that may be victims. O(blocks)."""
        for block in self.blocks.values():
            self._offer(block)

    def recover_row(
        self, namespace: StoredNamespace, row: SsdRow, tenant: Tenant | None = None
    ) -> bool:
        """Take over a row of an earlier life. False if it does not fit or the part has one."""
        if not 0 <= row.part < namespace.parts:
            return False
        self.wake((row.block_hash,))
        block = self.blocks.get(row.block_hash)
        if block is None:
            block = self._create(namespace, row.block_hash, row.parent, tenant)
        if block.namespace is not namespace or block.rows[row.part] is not None:
            return False
        if not _is_copy(block, row):
            return False
        self._add_row(block, row)
        return True

    def recover_rows(self, found: Iterable[WokenBlock]) -> list[SsdRow]:
        """Add the rows of an earlier life to blocks that are here without any; return those that
        belong to other blocks."""
        refused: list[SsdRow] = []
        hashes: list[BlockHash] = []
        for namespace, rows in found:
            block = self.blocks[rows[0].block_hash]
            if (
                block.namespace is not namespace
                or any(block.rows)
                or not all(_is_copy(block, row) for row in rows)
            ):
                refused += rows
                continue
            for row in rows:
                block.rows[row.part] = row
            block.in_ssd = True
            if block.tenant is not None:
                block.tenant.ssd_bytes += block.ssd_bytes
                block.tenant.on_ssd.offer(block)
            hashes.append(block.hash)
        self._book.stored(Tier.SSD, hashes)
        return refused

    def adopt(self, sleeping: SleepingBlocks, tenant_of: TenantOf) -> None:
        """Take over the blocks on SSD of an earlier life, none of which is here yet."""
        assert self.sleeping is None
        if not len(sleeping):
            return
        self.sleeping, self._tenant_of = sleeping, tenant_of
        for salt_id, byte_count in sleeping.bytes_by_salt().items():
            tenant = tenant_of(salt_id)
            assert tenant is not None
            tenant.ssd_bytes += byte_count
        self._book.stored_keys(Tier.SSD, sleeping.keys())

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


def _is_copy(block: Block, row: SsdRow) -> bool:
    """Whether a row may hold what stands in DRAM.

    It does not where a value was replaced and the end of the daemon came before its old row was
    struck out: what is in DRAM is newer.
    """
    slot = block.slots[row.part]
    return slot is None or slot.checksum in (UNKNOWN_CHECKSUM, row.checksum)
