"""Catalog, queue and policy as the store wires them, on slots of no bytes."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import BlockCatalog
from store_daemon.eviction import EvictionQueue
from store_daemon.policies import EvictionPolicy
from store_daemon.tiers.slots import Slot, SlotAllocator
from store_daemon.tiers.ssd import SsdRow
from tests.helpers.store import chain, small_namespace


class EvictionDouble:
    """`now` is the test's to move. A request reads what is there and stores the rest."""

    def __init__(self, policy: EvictionPolicy, namespace: Namespace | None = None) -> None:
        self.now = 1000.0
        self.failures = 0
        self.queue = EvictionQueue(policy, lambda: self.now, self._count_failure)
        self.catalog = BlockCatalog(self.queue.offer, self.queue.entered, self.queue.left)
        self.own = StoredNamespace.of(namespace or small_namespace())
        self._slots = SlotAllocator(65536, 1024)
        self._victims: list[BlockHash] = []
        self._chains: dict[tuple[int, int], list[BlockHash]] = {}

    def hashes(self, session: int, count: int, shared: int = 0) -> list[BlockHash]:
        """The head of the session's chain; all sessions have `shared` blocks in common."""
        full = self._chains.get((session, shared))
        if full is None:
            full = chain(self.own.namespace, 32, session + 1, shared)
            self._chains[session, shared] = full
        return full[:count]

    def request(self, hashes: Sequence[BlockHash], capacity: int) -> list[Block]:
        """Touch the usable prefix and store the rest, evicting when `capacity` blocks are there."""
        found = self.catalog.usable_prefix(self.own, hashes)
        self.queue.touch(found)
        blocks = list(found)
        for block in found:
            self.catalog.pin(block)
        self.queue.next_access()
        for block_hash in hashes[len(found) :]:
            if len(self.catalog.blocks) >= capacity and not self.evict(1):
                break
            parent = blocks[-1].hash if blocks else None
            block = self.store(block_hash, parent)
            self.catalog.pin(block)
            blocks.append(block)
        self.catalog.unpin(blocks)
        return blocks

    def store(self, block_hash: BlockHash, parent: BlockHash | None) -> Block:
        block = self.catalog.begin_part(self.own, block_hash, parent, 0)
        self.catalog.commit_part(block, 0, self._take())
        return block

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks; each must be a leaf that nobody holds."""
        for done in range(count):
            victim = self.queue.oldest_of_all(self.catalog.is_evictable)
            if victim is None:
                return done
            assert not victim.pins
            assert not victim.writers
            assert not self.catalog.children(victim.hash), "a parent went before its child"
            self._victims.append(victim.hash)
            self.drop(victim)
        return count

    def drop(self, block: Block) -> None:
        for slot in self.catalog.drop_dram(block).slots:
            self._slots.give_back(slot)

    def take_victims(self) -> list[BlockHash]:
        """Who went since the last call, in order."""
        victims, self._victims = self._victims, []
        return victims

    def keep_on_ssd(self, block: Block) -> None:
        self.catalog.add_rows(
            block, [SsdRow(self.own.id, block.hash, 0, block.parent, 1, 0, 5000, 7)]
        )

    def land(self, block: Block) -> None:
        self.catalog.land(block, {0: self._take()})

    def check(self) -> None:
        self.catalog.check_integrity()
        self.queue.check_integrity()

    def _take(self) -> Slot:
        size_class = self.own.size_classes[0]
        slot = self._slots.take(size_class)
        if slot is None:
            self._slots.carve(size_class)
            slot = self._slots.take(size_class)
        assert slot is not None
        return slot

    def _count_failure(self) -> None:
        self.failures += 1
