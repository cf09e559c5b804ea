"""Small real stores in memory, for the parts that talk to other nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from client_sdk.index_client import IndexedNode
from emberkv_proto.errors import PoolFullError, UnavailableError, UnknownNamespaceError
from emberkv_proto.events import BlocksRemoved, BlocksStored, Keys, TierCleared
from emberkv_proto.hashing import block_hashes, checksum, index_keys
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.shm_layout import align_up
from emberkv_proto.types import (
    BlockHash,
    Incarnation,
    NamespaceId,
    NodeHit,
    NodeId,
    SaltId,
    Seq,
    Tier,
    TierDigest,
)
from store_daemon.ports import EventSink, PeerGrant, PoolRange


def small_namespace(part_bytes: int = 5000, shards: int = 2) -> Namespace:
    groups = (Group(GroupKind.FULL, 2, part_bytes), Group(GroupKind.MLA, 1, part_bytes // 2))
    return Namespace("m", "w", "bfloat16", "f" * 32, 4, groups, shards=shards)


def chain(namespace: Namespace, blocks: int, seed: int = 0) -> list[BlockHash]:
    tokens = [seed * 100_000 + n for n in range(blocks * namespace.block_tokens)]
    return block_hashes(namespace.id, tokens, namespace.block_tokens)


def part_payload(block: BlockHash, part: int, length: int) -> bytes:
    """Bytes that only this part of this block has."""
    seed = int.from_bytes(block[:8], "little") ^ part
    return np.random.default_rng(seed).bytes(length)


@dataclass
class MemoryResidency:
    """Implements `ports.Residency` with a set of keys per tier; each change is emitted at once."""

    sink: EventSink | None = None
    resident: dict[Tier, set[int]] = field(
        default_factory=lambda: {Tier.DRAM: set(), Tier.SSD: set()}
    )

    def store(self, tier: Tier, keys: set[int]) -> None:
        added = keys - self.resident[tier]
        self.resident[tier] |= added
        assert self.sink is not None
        self.sink.emit(BlocksStored(tier, as_keys(added)))

    def remove(self, tier: Tier, keys: set[int]) -> None:
        gone = keys & self.resident[tier]
        self.resident[tier] -= gone
        assert self.sink is not None
        self.sink.emit(BlocksRemoved(tier, as_keys(gone)))

    def clear(self, tier: Tier) -> None:
        self.resident[tier].clear()
        assert self.sink is not None
        self.sink.emit(TierCleared(tier))

    def resident_keys(self, tier: Tier) -> Keys:
        return as_keys(self.resident[tier])

    def scan_keys(self, tier: Tier) -> Iterator[Keys]:
        keys = sorted(self.resident[tier])
        for start in range(0, len(keys), 16):
            yield as_keys({*keys[start : start + 16]} & self.resident[tier])

    def digests(self) -> tuple[TierDigest, ...]:
        return tuple(
            TierDigest(tier, len(keys), xor_of(keys)) for tier, keys in self.resident.items()
        )


def as_keys(keys: set[int]) -> Keys:
    return np.array(sorted(keys), dtype=np.uint64)


def xor_of(keys: set[int]) -> int:
    result = 0
    for key in keys:
        result ^= key
    return result


class MemoryPeerStore:
    """Implements `ports.PeerStore` over a pool it fills itself."""

    def __init__(self, pool: memoryview, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        self._next_offset = 0
        self._blocks: dict[BlockHash, list[PoolRange]] = {}
        self._lock = threading.Lock()
        self.leases: dict[int, tuple[PoolRange, ...]] = {}
        self.granted = 0
        self.lies: set[BlockHash] = set()
        """Blocks whose checksum is reported wrong."""
        self.ready_blocks = 1 << 30
        """As many leading blocks of any run are in DRAM, the others on SSD."""
        self.may_read_hook: Callable[[], None] = lambda: None
        self._held: frozenset[int] = frozenset()
        self._go_on = threading.Event()

    def put(self, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            ranges = []
            for part in range(self._namespace.parts):
                length = self._namespace.part_bytes(part)
                place = PoolRange(self._next_offset, length)
                self._next_offset += align_up(length)
                self._pool[place.offset : place.offset + length] = part_payload(block, part, length)
                ranges.append(place)
            self._blocks[block] = ranges

    def hold_reads(self, hashes: Sequence[BlockHash]) -> threading.Event:
        """Reads of these blocks wait from now on until the event is set."""
        self._held = frozenset(p.offset for block in hashes for p in self._blocks[block])
        self._go_on = threading.Event()
        return self._go_on

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            self._blocks.pop(block, None)

    async def peer_acquire(
        self,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        lease_seconds: float,
        requester: str,
        wait_seconds: float = 0.0,
        ready_only: bool = False,
    ) -> PeerGrant:
        if ready_only:
            hashes = hashes[: self.ready_blocks]
        deadline = time.monotonic() + wait_seconds
        while hashes and hashes[0] not in self._blocks and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if namespace_id != self._namespace.id:
            raise UnknownNamespaceError(f"namespace {namespace_id.hex()} is not here")
        held: list[BlockHash] = []
        for block in hashes:
            if block not in self._blocks:
                break
            held.append(block)
        ranges = tuple(place for block in held for place in self._blocks[block])
        sums = tuple(
            checksum(bytes(self._pool[p.offset : p.offset + p.length])) ^ (block in self.lies)
            for block in held
            for p in self._blocks[block]
        )
        with self._lock:
            self.granted += 1
            if held:
                self.leases[self.granted] = ranges
        lease_id = self.granted if held else 0
        return PeerGrant(lease_id, len(held), self._namespace.parts, ranges, sums)

    def peer_release(self, lease_id: int) -> None:
        with self._lock:
            del self.leases[lease_id]

    def may_read(self, lease_id: int, offset: int, length: int) -> bool:
        self.may_read_hook()
        if offset in self._held:
            assert self._go_on.wait(60), "the test never let the read go on"
        with self._lock:
            return any(
                place.offset <= offset and offset + length <= place.offset + place.length
                for place in self.leases.get(lease_id, ())
            )


class MemoryTarget:
    """Implements `ports.PullTarget`: slots with guard bytes between, and a record of what landed.

    Closing a room overwrites what was not landed, so a late write would break `check`.
    """

    GUARD = 0x55

    def __init__(self, pool: memoryview, namespace: Namespace, room_blocks: int = 1 << 30) -> None:
        self._pool = pool
        self._pool[:] = bytes([self.GUARD]) * len(pool)
        self._namespace = namespace
        self._next_offset = 4096
        self.room_blocks = room_blocks
        self.landed: dict[BlockHash, list[PoolRange]] = {}
        self.parents: list[BlockHash | None] = []
        self.salt_ids: list[SaltId | None] = []
        self.open_rooms = 0
        self.is_full = False

    def allot(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        salt_ids: Sequence[SaltId | None] = (),
    ) -> MemoryRoom:
        self.salt_ids += salt_ids
        if self.is_full:
            raise PoolFullError("no slot is free")
        self.parents.append(parent)
        ranges = []
        for _ in hashes[: self.room_blocks]:
            parts = []
            for part in range(namespace.parts):
                length = namespace.part_bytes(part)
                parts.append(PoolRange(self._next_offset, length))
                self._next_offset += align_up(length) + 4096
            ranges.append(parts)
        self.open_rooms += 1
        return MemoryRoom(self, hashes, ranges)

    def check(self) -> None:
        """Assert that exactly the landed blocks' bytes are in the pool, guard bytes elsewhere."""
        assert self.open_rooms == 0
        expected = bytearray([self.GUARD]) * len(self._pool)
        for block, ranges in self.landed.items():
            for part, place in enumerate(ranges):
                payload = part_payload(block, part, place.length)
                expected[place.offset : place.offset + place.length] = payload
        assert self._pool == expected

    def wipe(self, ranges: Sequence[PoolRange]) -> None:
        for place in ranges:
            self._pool[place.offset : place.offset + place.length] = (
                bytes([self.GUARD]) * place.length
            )


@dataclass
class MemoryRoom:
    """Implements `ports.PullRoom`."""

    target: MemoryTarget
    hashes: Sequence[BlockHash]
    ranges: Sequence[Sequence[PoolRange]]
    landed: set[int] = field(default_factory=set)
    is_closed: bool = False

    def land(self, block: int, checksums: Sequence[int]) -> None:
        assert not self.is_closed
        assert block == len(self.landed), "landed out of order"
        assert len(checksums) == len(self.ranges[block])
        self.landed.add(block)
        self.target.landed[self.hashes[block]] = list(self.ranges[block])

    def publish(self) -> None:
        assert not self.is_closed

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.target.open_rooms -= 1
        for block, ranges in enumerate(self.ranges):
            if block not in self.landed:
                self.target.wipe(ranges)


class MemoryIndex:
    """Implements `peers.IndexQueries` by matching keys against what each node is said to hold."""

    def __init__(self) -> None:
        self.held: dict[NodeId, set[int]] = {}
        self.ssd_only: set[NodeId] = set()
        self.addresses: dict[NodeId, str] = {}
        self.states: dict[NodeId, str] = {}
        self.incarnations: dict[NodeId, Incarnation] = {}
        self.is_away = False
        self.queries = 0

    def holds(self, node: str, address: str, hashes: Sequence[BlockHash]) -> None:
        node_id = NodeId(node)
        self.addresses[node_id] = address
        self.held.setdefault(node_id, set()).update(int(key) for key in index_keys(hashes))

    async def query(
        self, keys: npt.NDArray[np.uint64], *, timeout_seconds: float | None = None
    ) -> list[NodeHit]:
        self.queries += 1
        self._check()
        hits = []
        for node_id, held in self.held.items():
            length = 0
            while length < len(keys) and int(keys[length]) in held:
                length += 1
            dram = 0 if node_id in self.ssd_only else length
            hits.append(NodeHit(node_id, length, dram, length - dram))
        return hits

    async def nodes(self, *, timeout_seconds: float | None = None) -> list[IndexedNode]:
        self._check()
        return [
            IndexedNode(
                node_id=node_id,
                incarnation=self.incarnations.get(node_id, Incarnation(1)),
                seq=Seq(1),
                state=self.states.get(node_id, "ok"),
                exactness="exact",
                grpc_address=address,
                tiers=(),
                engines=(),
                lag_seconds=0.0,
                gaps=0,
                snapshots=0,
            )
            for node_id, address in self.addresses.items()
        ]

    def _check(self) -> None:
        if self.is_away:
            raise UnavailableError("index is away")


@contextmanager
def took_at_most(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took <= seconds, f"took {took:.3f} s"
