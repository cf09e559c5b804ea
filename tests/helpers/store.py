"""A block store of a few hundred KiB on a directory, its clock in the test's hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event
from emberkv_proto.hashing import block_hashes, checksum
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, Incarnation, SaltId, Tier
from store_daemon.block import StoredNamespace
from store_daemon.config import DaemonSection, DaemonSettings, DramSection, NodeSection, SsdSection
from store_daemon.leases import Lease
from store_daemon.local_index import LocalIndex
from store_daemon.sessions import Session, Staged
from store_daemon.store import BlockStore
from store_daemon.tiers.pool import Pool
from store_daemon.tiers.ssd import SsdTier

BLOCK_TOKENS = 4


def small_namespace(part_bytes: int = 5000, groups: int = 1, model: str = "tiny") -> Namespace:
    group = Group(GroupKind.FULL, 1, part_bytes)
    return Namespace(model, "w1", "bfloat16", "0" * 32, BLOCK_TOKENS, (group,) * groups)


def hybrid_namespace(*groups: Group, shards: int = 1, model: str = "hybrid") -> Namespace:
    return Namespace(model, "w1", "bfloat16", "0" * 32, BLOCK_TOKENS, groups, shards)


def chain(namespace: Namespace, blocks: int, seed: int = 0, shared: int = 0) -> list[BlockHash]:
    """Hashes of a chain; chains of other seeds have its first `shared` blocks in common."""
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32)
    tokens[shared * BLOCK_TOKENS :] += np.uint32(seed * 100_000)
    return block_hashes(namespace.id, tokens, BLOCK_TOKENS)


def payload(block_hash: BlockHash, part: int, length: int) -> bytes:
    """The one content of a block's part, so that a wrong byte shows."""
    unit = block_hash + bytes([part])
    return (unit * (length // len(unit) + 1))[:length]


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class EventBook:
    """An event sink that keeps what is resident, and refuses an event that cannot be."""

    def __init__(self) -> None:
        self.resident: dict[Tier, set[int]] = {Tier.DRAM: set(), Tier.SSD: set()}
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)
        assert isinstance(event, BlocksStored | BlocksRemoved)
        keys = {int(key) for key in event.keys}
        assert len(keys) == len(event.keys), "a key twice in one event"
        held = self.resident[event.tier]
        if isinstance(event, BlocksStored):
            assert not keys & held, "stored twice"
            held |= keys
        else:
            assert keys <= held, "removed but not stored"
            held -= keys


class SmallStore:
    """The store with its files. Build it, and `close` it, inside a running loop."""

    def __init__(
        self,
        directory: Path,
        *,
        extents: int = 6,
        ssd_segments: int = 8,
        clock: FakeClock | None = None,
        boot_id: bytes = bytes(16),
        settings: DaemonSection | None = None,
        writeback: Literal["on_commit", "on_evict", "on_reuse"] = "on_commit",
        ssd: SsdSection | None = None,
    ) -> None:
        self.settings = DaemonSettings(
            node=NodeSection(id="node-1"),
            daemon=settings or DaemonSection(data_dir=directory / "data", lease_share=1.0),
            dram=DramSection(
                path=directory / "pool",
                capacity_bytes=extents * 65536,
                extent_bytes=65536,
                high_watermark=1.0,
                low_watermark=0.9,
            ),
            ssd=ssd
            or SsdSection(
                path=directory / "ssd",
                capacity_bytes=ssd_segments * 65536,
                segment_bytes=65536,
                io_threads=2,
                writeback=writeback,
                direct_io=False,
            ),
        )
        self.clock = clock or FakeClock()
        self.book = EventBook()
        self.is_closed = False
        self.index = LocalIndex.open(self.settings.daemon.data_dir, "node-1")
        known = {
            size_class
            for namespace in self.index.namespaces().values()
            for size_class in StoredNamespace.of(namespace).size_classes
        }
        self.pool = Pool.open(
            self.settings.dram, "node-1", Incarnation(1), known.__contains__, boot_id
        )
        self.ssd = SsdTier.open(self.settings.ssd, self.index, self.clock) if ssd_segments else None
        self.store = BlockStore(self.settings, self.pool, self.index, self.ssd, self.clock)
        self.store.set_sink(self.book)
        self.store.recover()

    async def close(self) -> None:
        """End it in order. The files stay, as after a kill."""
        self.is_closed = True
        await self.store.close(5.0)
        if self.ssd is not None:
            self.ssd.close()
        self.index.close()
        self.pool.close()

    def open(self, namespace: Namespace, part: int = 0) -> Session:
        return self.store.open_session("test", namespace, part, None)

    def write(self, session: Session, hashes: Sequence[BlockHash], staged: Staged) -> list[int]:
        """Fill the granted slots; return the numbers of the granted blocks."""
        numbers = [number for number, offset in enumerate(staged.offsets) if offset]
        with self.pool.view() as view:
            for number in numbers:
                content = payload(hashes[number], session.part, session.part_bytes)
                start = staged.offsets[number]
                view[start : start + len(content)] = content
        return numbers

    def put(
        self,
        session: Session,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
    ) -> int:
        """Stage, write and commit; return how many blocks were granted."""
        staged = self.store.stage(session, hashes, parent, salt_id)
        numbers = self.write(session, hashes, staged)
        if not numbers:
            return 0
        own = [hashes[number] for number in numbers]
        sums = [checksum(payload(h, session.part, session.part_bytes)) for h in own]
        return self.store.commit(session, staged.stage_id, own, sums)

    def assert_readable(self, lease: Lease) -> None:
        """Every needed part of every ready block holds its own bytes and checksum."""
        with self.pool.view() as view:
            for number, block in enumerate(lease.blocks[: lease.ready]):
                assert block is not None
                for part in lease.needs.parts(number):
                    slot = block.slots[part]
                    assert slot is not None
                    wanted = payload(block.hash, part, slot.payload_bytes)
                    assert view[slot.offset : slot.offset + slot.payload_bytes] == wanted
                    assert slot.checksum == checksum(wanted)

    async def flush(self) -> None:
        """Write back all that waits, as the running task would."""
        writeback = self.store.writeback
        assert writeback is not None
        while len(writeback) or self.store.holdings.rows_to_forget:
            await writeback.write_batch()

    def check_integrity(self) -> None:
        self.store.check_integrity()
        for tier in (Tier.DRAM, Tier.SSD):
            assert self.book.resident[tier] == {int(k) for k in self.store.resident_keys(tier)}
        if self.ssd is not None and not self.store._tasks:
            self._check_rows(self.ssd)

    def _check_rows(self, ssd: SsdTier) -> None:
        """While nobody writes, catalog and tier agree on what is on SSD and where."""
        holdings = self.store.holdings
        named = {row for block in holdings.catalog.blocks.values() for row in block.rows if row}
        live = set(ssd.recovered_rows())
        assert named <= live, "the catalog names rows that the tier does not hold"
        sleeping = holdings.catalog.sleeping
        named |= set(sleeping.rows()) if sleeping is not None else set()
        assert live - named <= set(holdings.rows_to_forget), "the tier holds rows nobody names"
        ssd.check_integrity()
