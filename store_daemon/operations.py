"""What operators do to a store: pin, unpin, evict, clear, set quotas, ask who holds what.

Everything runs on the daemon's event loop. Calls that may touch every block are coroutines and let
others run in between; what they answer is what they did, not what the store looks like afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from emberkv_proto.errors import InvalidRequestError, UnavailableError
from emberkv_proto.types import SALT_ID_BYTES, BlockHash, NamespaceId, SaltId, Tier
from store_daemon.block import PINNED, Block, StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.local_index import LocalIndex
from store_daemon.namespaces import NamespaceBook
from store_daemon.tenants import Quota, TenantUsage

LONGEST_SOFT_PIN_SECONDS = 7 * 86400.0
log = logging.getLogger(__name__)
TURN_BLOCKS = 512
"""Blocks that a long call looks at before it lets others run."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Answer to a pin."""

    pinned_blocks: int
    """Leading blocks of those asked for that are under a pin now."""
    pinned_bytes: int
    """Under hard pins on this node."""
    limit_bytes: int
    """Of hard pins on this node."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Answer to evict and clear; a block that left two tiers counts twice."""

    evicted_blocks: int
    freed_bytes: int
    """Slots in DRAM, records on SSD (their room comes back when their segment is reclaimed)."""
    kept_blocks: int
    """Asked to go, but pinned, being read or written, or a parent of such a block."""


class Operations:
    """One store's. Built and owned by it.

    Args:
        on_rows_to_forget: told that blocks have left SSD.
        save: asked to see that a block comes to SSD too.
    """

    def __init__(
        self,
        holdings: Holdings,
        index: LocalIndex,
        namespaces: NamespaceBook,
        clock: Callable[[], float],
        on_rows_to_forget: Callable[[], None],
        save: Callable[[Block], object],
    ) -> None:
        self._holdings = holdings
        self._index = index
        self._namespaces = namespaces
        self._clock = clock
        self._on_rows_to_forget = on_rows_to_forget
        self._save = save

    # ---- pins ----

    def pin(
        self, namespace_id: NamespaceId, hashes: Sequence[BlockHash], ttl_seconds: float | None
    ) -> Pinned:
        """Keep the leading blocks that are here, in the tiers they are in and come to.

        With a time to live: a soft pin, which ends by itself and with the daemon. Without: a hard
        pin, which lives on over restarts; its blocks are those that fit under the limit, and those
        in DRAM only are written to SSD, whatever the mode, to outlive a reboot.

        Raises:
            UnknownNamespaceError, InvalidRequestError.
            UnavailableError: hard pins cannot be written down; nothing was pinned.
        """
        namespace = self._namespaces.known(namespace_id)
        pins = self._holdings.pins
        blocks = self._resident_run(namespace, hashes)
        if ttl_seconds is None:
            asked = len(blocks)
            blocks = pins.that_fit(blocks)
            self._holdings.counters["refused_pins"] += asked - len(blocks)
            try:
                self._index.put_pins(namespace_id, [block.hash for block in blocks])
            except OSError as error:
                raise UnavailableError(f"hard pins cannot be kept: {error}") from None
            pins.pin_hard(blocks)
            for block in blocks:
                self._save(block)
            again = {block.hash for block in blocks}
            self._holdings.lost_pins[:] = [
                lost for lost in self._holdings.lost_pins if lost[1] not in again
            ]
        else:
            if not 0 < ttl_seconds <= LONGEST_SOFT_PIN_SECONDS:
                raise InvalidRequestError(
                    f"a soft pin of {ttl_seconds} s; wanted more than 0 and at most"
                    f" {LONGEST_SOFT_PIN_SECONDS:.0f}; leave it out for a hard pin"
                )
            pins.pin_soft(blocks, self._clock() + ttl_seconds)
        return Pinned(len(blocks), pins.hard_bytes, pins.limit_bytes)

    def unpin(
        self, namespace_id: NamespaceId | None, hashes: Sequence[BlockHash] | None = None
    ) -> int:
        """End the pins on these blocks, or on all of the namespace, or (None) all there are.

        Returns how many ended. Raises UnknownNamespaceError, InvalidRequestError, UnavailableError.
        """
        pins = self._holdings.pins
        if namespace_id is None:
            if hashes is not None:
                raise InvalidRequestError("hashes without the namespace they are of")
            found = [*pins.hard.values(), *(block for block, _ in pins.soft.values())]
        else:
            namespace = self._namespaces.known(namespace_id)
            if hashes is None:
                everything = [*pins.hard.values(), *(block for block, _ in pins.soft.values())]
                found = [block for block in everything if block.namespace is namespace]
            else:
                maybe = (self._holdings.catalog.find(namespace, h) for h in hashes)
                found = [block for block in maybe if block is not None]
        return self._unpin(found)

    def recover_pins(self) -> None:
        """Lay the hard pins of earlier lives anew; those whose block is gone are forgotten."""
        kept: list[Block] = []
        gone: list[tuple[NamespaceId, BlockHash]] = []
        try:
            stored = self._index.pins()
        except OSError as error:
            log.warning("hard pins are lost: %s", error)
            self._holdings.counters["unreadable_pins"] += 1
            return
        for namespace_id, block_hash in stored:
            namespace = self._namespaces.get(namespace_id)
            block = None
            if namespace is not None:
                block = self._holdings.catalog.find(namespace, block_hash)
            if block is not None:
                kept.append(block)
            else:
                gone.append((namespace_id, block_hash))
        self._holdings.pins.pin_hard(kept)
        self._holdings.lost_pins += gone
        self.forget_lost_pins()

    def forget_lost_pins(self) -> None:
        """Strike from the index the hard pins whose blocks are gone; tried again if it fails."""
        lost = self._holdings.lost_pins
        if not lost:
            return
        try:
            self._index.delete_pins(lost)
        except OSError:
            self._holdings.counters["failed_pin_deletions"] += 1
        else:
            lost.clear()

    # ---- evict and clear ----

    async def evict(
        self, tier: Tier, namespace_id: NamespaceId, hashes: Sequence[BlockHash]
    ) -> Evicted:
        """Take these blocks out of a tier, the last ones first.

        What is not written to SSD yet is gone when it leaves DRAM.

        Raises:
            UnknownNamespaceError, InvalidRequestError: not a tier that is kept here.
        """
        _check_tier(tier)
        namespace = self._namespaces.known(namespace_id)
        found = (self._holdings.catalog.find(namespace, h) for h in reversed(hashes))
        tally = _Tally()
        for block in [b for b in found if b is not None and _takes_room(b, tier)]:
            self._try_drop(block, tier, tally)
        self._published()
        return tally.answer()

    async def evict_bytes(
        self, tier: Tier, namespace_id: NamespaceId | None, byte_count: int
    ) -> Evicted:
        """Take blocks out of a tier, least recently used first, until so many bytes are free.

        From DRAM they go in the order of eviction. `kept_blocks` is 0 if it was enough.

        Raises: as `evict`.
        """
        _check_tier(tier)
        if byte_count <= 0:
            raise InvalidRequestError(f"evict of {byte_count} bytes; name blocks or a size")
        namespace = self._namespaces.known(namespace_id) if namespace_id is not None else None
        tally = _Tally()
        if tier is Tier.DRAM:
            await self._evict_oldest(namespace, byte_count, tally)
        else:
            await self._wake_all()
            blocks = self._of(namespace, tier)
            blocks = await asyncio.to_thread(
                lambda: sorted(blocks, key=lambda block: (block.access, -block.depth))
            )
            await self._drop_until(blocks, tier, byte_count, tally)
        self._published()
        if tally.freed_bytes >= byte_count:
            tally.kept_blocks = 0
        else:
            tally.kept_blocks = len(self._of(namespace, tier))
        return tally.answer()

    async def clear(self, tier: Tier | None, namespace_id: NamespaceId | None) -> Evicted:
        """Take everything out of a tier, or (None) out of all, hard pins excepted.

        Soft pins on what is cleared end. What is being read or written stays and is counted.

        Raises: as `evict`.
        """
        namespace = self._namespaces.known(namespace_id) if namespace_id is not None else None
        if tier is not None:
            _check_tier(tier)
        tally, kept = _Tally(), 0
        # SSD first: what leaves DRAM afterwards is then not announced as demoted.
        if tier is not Tier.DRAM:
            await self._wake_all()
        for each in (Tier.SSD, Tier.DRAM) if tier is None else (tier,):
            blocks = self._of(namespace, each)
            self._unpin(block for block in blocks if not self._holdings.pins.is_hard(block))
            await self._drop_until(blocks, each, math.inf, tally)
            kept += sum(_takes_room(block, each) for block in blocks)
        self._published()
        tally.kept_blocks = kept
        return tally.answer()

    # ---- tenants ----

    def set_quota(self, salt_id: SaltId, quota: Quota) -> None:
        """A tenant's quota until the daemon ends. Raises InvalidRequestError."""
        if len(salt_id) != SALT_ID_BYTES:
            raise InvalidRequestError(f"salt_id has {len(salt_id)} bytes; wanted {SALT_ID_BYTES}")
        self._holdings.tenants.set_quota(salt_id, quota)

    def usage(self) -> tuple[TenantUsage, ...]:
        """What each tenant holds and may hold, by salt id."""
        return self._holdings.tenants.usage()

    # ---- inner steps ----

    def _resident_run(self, namespace: StoredNamespace, hashes: Sequence[BlockHash]) -> list[Block]:
        found: list[Block] = []
        for block_hash in hashes:
            block = self._holdings.catalog.find(namespace, block_hash)
            if block is None or not (block.in_dram or block.in_ssd):
                break
            found.append(block)
        return found

    def _unpin(self, blocks: Iterable[Block]) -> int:
        holdings = self._holdings
        found = list(blocks)
        hard = [(b.namespace.id, b.hash) for b in found if holdings.pins.is_hard(b)]
        try:
            self._index.delete_pins(hard)
        except OSError as error:
            raise UnavailableError(f"hard pins cannot be struck out: {error}") from None
        ended = holdings.pins.unpin(found)
        holdings.unkeep(ended)
        return len(ended)

    async def _wake_all(self) -> None:
        """Let no block sleep, a few at a time. O(blocks)."""
        catalog = self._holdings.catalog
        asleep = iter(catalog.sleeping if catalog.sleeping is not None else ())
        while turn := list(islice(asleep, TURN_BLOCKS)):
            catalog.wake(turn)
            await asyncio.sleep(0)

    def _of(self, namespace: StoredNamespace | None, tier: Tier) -> list[Block]:
        """What takes room in the tier, but for blocks that sleep. O(blocks)."""
        return [
            block
            for block in self._holdings.catalog.blocks.values()
            if (namespace is None or block.namespace is namespace) and _takes_room(block, tier)
        ]

    async def _evict_oldest(
        self, namespace: StoredNamespace | None, byte_count: int, tally: _Tally
    ) -> None:
        catalog, queue = self._holdings.catalog, self._holdings.queue
        while tally.freed_bytes < byte_count:
            for _ in range(TURN_BLOCKS):
                if namespace is None:
                    victim = queue.oldest_of_all(catalog.is_evictable)
                else:
                    victim = queue.oldest(namespace.id, catalog.is_evictable)
                if victim is None:
                    return
                self._try_drop(victim, Tier.DRAM, tally)
                if tally.freed_bytes >= byte_count:
                    return
            await self._let_others_run()

    async def _drop_until(
        self, blocks: Sequence[Block], tier: Tier, byte_count: float, tally: _Tally
    ) -> None:
        """Drop what may go; a parent gets its turn when its last child has gone."""
        waiting = list(reversed(blocks))
        asked = {id(block) for block in blocks}
        seen = 0
        while waiting and tally.freed_bytes < byte_count:
            block = waiting.pop()
            if _takes_room(block, tier) and self._try_drop(block, tier, tally):
                parent = self._holdings.catalog.blocks.get(block.parent) if block.parent else None
                if parent is not None and tier is Tier.DRAM and id(parent) in asked:
                    waiting.append(parent)
            seen += 1
            if seen % TURN_BLOCKS == 0:
                await self._let_others_run()

    def _try_drop(self, block: Block, tier: Tier, tally: _Tally) -> bool:
        """Drop a block from the tier if it may go now."""
        holdings = self._holdings
        if tier is Tier.DRAM:
            holdings.writing_ended(block)  # an operator's word does not wait for the SSD copy
            may_go, byte_count = holdings.catalog.is_evictable(block), block.dram_bytes
        else:
            may_go, byte_count = not block.pins and not block.stays & PINNED, block.ssd_bytes
        if not may_go:
            tally.kept_blocks += 1
            return False
        tally.evicted_blocks += 1
        tally.freed_bytes += byte_count
        if tier is Tier.DRAM:
            holdings.evict(block)
        else:
            holdings.lose_ssd(block)
        return True

    async def _let_others_run(self) -> None:
        self._published()
        await asyncio.sleep(0)

    def _published(self) -> None:
        self._holdings.publish()
        if self._holdings.rows_to_forget:
            self._on_rows_to_forget()


@dataclass(slots=True)
class _Tally:
    evicted_blocks: int = 0
    freed_bytes: int = 0
    kept_blocks: int = 0

    def answer(self) -> Evicted:
        return Evicted(self.evicted_blocks, self.freed_bytes, self.kept_blocks)


def _check_tier(tier: Tier) -> None:
    if tier not in (Tier.DRAM, Tier.SSD):
        raise InvalidRequestError(f"tier {tier.name} is not kept here; wanted DRAM or SSD")


def _takes_room(block: Block, tier: Tier) -> bool:
    return any(block.slots) if tier is Tier.DRAM else block.in_ssd
