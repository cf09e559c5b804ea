"""Values under keys, kept as blocks of the store: what is behind the door for Redis clients.

A key is known by its BLAKE3-256 hash, keyed with the door's name: equal hashes are taken for equal
keys, as everywhere here. A value lies in one slot behind a header of HEADER_BYTES that holds its
length; slots come in sizes a sixteenth apart, each a namespace of its own, made when it is first
needed. Nothing of a slot but the value is ever sent.

A value is replaced as a whole: it is received into a slot that no key names, and takes its key over
when it is complete. Who reads the earlier value then reads it to its end.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field

import blake3

from emberkv_proto.errors import (
    DrainingError,
    EmberError,
    InvalidRequestError,
    PoolFullError,
    UnavailableError,
)
from emberkv_proto.hashing import RunningChecksum
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.shm_layout import ALIGNMENT, align_up
from emberkv_proto.types import SALT_ID_BYTES, AcquirePolicy, BlockHash, SaltId
from store_daemon.block import VALUES_FAMILY, Block
from store_daemon.leases import Lease
from store_daemon.sessions import Session
from store_daemon.store import BlockStore
from store_daemon.tenants import Quota, Tenant
from store_daemon.tiers.slots import Slot
from store_daemon.tiers.ssd import SsdRow
from store_daemon.writeback import Batch

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"EKV1"
HEADER_BYTES = _HEADER.size
_STEPS = 16
"""Sizes between a power of two and the next."""
BRING_SECONDS = 10.0
FORGET_SECONDS = 10.0
"""How long a DEL waits for a copy of its value that is being written."""
MOST_TRIES = 3
"""How often a value that was replaced while it was brought is looked up again."""


@dataclass(eq=False, slots=True)
class Incoming:
    """A value that is being received into its slot."""

    block_hash: BlockHash
    session: Session
    slot: Slot
    byte_count: int
    _place: memoryview
    """Of the value, in the slot."""
    _sum: RunningChecksum
    received: int = 0

    def room(self, most: int) -> memoryview:
        """Where the next bytes go."""
        return self._place[self.received : self.received + most]

    def took(self, byte_count: int) -> None:
        """So many bytes are in the room that was given."""
        end = self.received + byte_count
        with self._place[self.received : end] as piece:
            self._sum.update(piece)
        self.received = end

    def write(self, piece: bytes | bytearray) -> None:
        self._place[self.received : self.received + len(piece)] = piece
        self.took(len(piece))


@dataclass(eq=False, slots=True)
class Outgoing:
    """A value that was asked for. It stays where it is until `ValueShelf.close`."""

    block_hash: BlockHash
    lease: Lease | None = None
    """While it is being brought."""
    session: Session | None = None
    block: Block | None = None
    """Held by a pin."""
    view: memoryview | None = None
    """The value; None: there is none, or not yet."""
    is_begun: bool = False
    """Whether its length was sent."""
    sent: int = 0
    held_bytes: int = 0
    """What it takes of the pool, or will when it has been brought."""

    @property
    def is_waiting(self) -> bool:
        return self.lease is not None


@dataclass(slots=True)
class Leftovers:
    """What a start of the daemon could still find of values that are gone."""

    rows: list[SsdRow] = field(default_factory=list)
    hashes: set[BlockHash] = field(default_factory=set)
    """Of those that `batches` write or move at the moment."""
    batches: list[Batch] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.batches)


@dataclass(eq=False, slots=True)
class ValueShelf:
    """The values of one door. Runs on the store's loop; only `bring` and `forget` wait.

    Who calls `begin`, `commit` or `remove` calls `publish` before the loop turns.
    """

    store: BlockStore
    name: str
    quota: Quota
    max_value_bytes: int
    _key: bytes = field(init=False)
    _salt_id: SaltId = field(init=False)
    _largest_payload: int = field(init=False)
    _most_close_sizes: int = field(init=False)
    _sessions: dict[int, Session] = field(init=False, default_factory=dict)
    """By the size of their slots."""
    _arriving: set[Incoming] = field(init=False, default_factory=set)
    _arriving_bytes: int = field(init=False, default=0)
    """Slots that values are received into; they count in no tenant's account yet."""
    _held: set[Outgoing] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._key = blake3.blake3(b"emberkv resp door\0" + self.name.encode()).digest()
        self._salt_id = SaltId(self._key[:SALT_ID_BYTES])
        slots = self.store.holdings.pool.slots
        self._largest_payload = slots.largest_payload
        share = self.quota.dram_bytes or slots.total_bytes
        self._most_close_sizes = max(1, share // slots.extent_bytes // 2)
        self.max_value_bytes = min(self.max_value_bytes, self._largest_payload - HEADER_BYTES)
        self.store.holdings.tenants.set_quota(self._salt_id, self.quota)

    @property
    def tenant(self) -> Tenant:
        """Whose quota all values count against."""
        tenant = self.store.holdings.tenants.of(self._salt_id)
        assert tenant is not None
        return tenant

    # ---- asking ----

    def has(self, key: bytes) -> bool:
        return self._find(self._hash(key)) is not None

    def open(self, key: bytes) -> Outgoing:
        """The value under a key, held; one that is not in DRAM is waiting and begins to be brought.

        Close it.
        """
        outgoing = Outgoing(self._hash(key))
        self._open(outgoing)
        counters = self.store.holdings.counters
        is_known = outgoing.view is not None or outgoing.is_waiting
        counters["resp_hits" if is_known else "resp_misses"] += 1
        return outgoing

    async def bring(self, outgoing: Outgoing) -> None:
        """Wait until a waiting value is here, or known not to come."""
        for _ in range(MOST_TRIES):
            lease, session = outgoing.lease, outgoing.session
            if lease is None:
                return
            assert session is not None
            try:
                await self.store.wait(session, lease.id, 0, BRING_SECONDS)
            except EmberError:  # it ran out: as if it had not come
                outgoing.lease = None
                return
            if lease.ready:
                block = lease.blocks[0]
                assert block is not None
                self._hold(outgoing, block)
                self._release(outgoing)
                return
            self._release(outgoing)
            self._open(outgoing)  # it may have been replaced meanwhile
        self._release(outgoing)

    def close(self, outgoing: Outgoing) -> None:
        """The value was sent, or nobody wants it any more. Once."""
        self._release(outgoing)
        if outgoing.view is not None:
            outgoing.view.release()
            outgoing.view = None
        if outgoing.block is not None:
            self._held.discard(outgoing)
            self.store.holdings.unpin([outgoing.block])
            outgoing.block = None

    # ---- writing ----

    def begin(self, key: bytes, byte_count: int) -> Incoming:
        """Room for a value. Commit or abort it.

        Raises:
            InvalidRequestError: longer than `max_value_bytes`.
            PoolFullError: all else is held, or the quota is smaller than that.
            DrainingError: the daemon is shutting down.
        """
        store, holdings = self.store, self.store.holdings
        if byte_count > self.max_value_bytes:
            raise InvalidRequestError(f"a value of {byte_count} bytes")
        if store.is_draining:
            raise DrainingError("the daemon is shutting down")
        session = self._session(self._payload_for(byte_count))
        size_class = session.own.size_classes[0]
        wanted = self._arriving_bytes + size_class.slot_bytes
        is_admitted = holdings.quotas.admit(self.tenant, wanted)
        slot = holdings.take(size_class) if is_admitted else None
        if slot is None:
            raise PoolFullError("all of the pool, or of this door's quota, is held")
        running = RunningChecksum()
        header = _HEADER.pack(_MAGIC, 0, byte_count)
        running.update(header)
        with holdings.pool.payload(slot) as payload:
            payload[:HEADER_BYTES] = header
            place = payload[HEADER_BYTES : HEADER_BYTES + byte_count]
        incoming = Incoming(self._hash(key), session, slot, byte_count, place, running)
        self._arriving.add(incoming)
        self._arriving_bytes += size_class.slot_bytes
        return incoming

    def abort(self, incoming: Incoming) -> None:
        """It will not be complete."""
        self._arrived(incoming)
        self.store.holdings.give_back([incoming.slot])

    def commit(self, incoming: Incoming) -> Leftovers:
        """The value is complete: it takes over its key.

        Returns the rows of the value that was there before: forget them. Its copy may be on its way
        to SSD as well, which needs no waiting: where a start finds both, it takes what is in DRAM.

        Raises InvalidRequestError: an engine's block has this hash.
        """
        assert incoming.received == incoming.byte_count
        holdings, slot = self.store.holdings, incoming.slot
        self._arrived(incoming)
        with holdings.pool.payload(slot) as payload:
            used = HEADER_BYTES + incoming.byte_count
            rest = bytes(len(payload) - used)  # no other's bytes go to SSD with it
            payload[used:] = rest
        incoming._sum.update(rest)
        holdings.catalog.wake((incoming.block_hash,))
        earlier = holdings.catalog.blocks.get(incoming.block_hash)
        left = Leftovers()
        if earlier is not None:
            if not self._is_ours(earlier):
                holdings.give_back([slot])
                raise InvalidRequestError("this key's hash is taken by another kind of block")
            left.rows = holdings.remove(earlier)
        block = holdings.catalog.begin_part(
            incoming.session.own, incoming.block_hash, None, 0, self.tenant
        )
        holdings.commit_part(block, 0, slot, incoming._sum.value)
        return left

    def remove(self, key: bytes, left: Leftovers) -> bool:
        """Delete a value; whether there was one. What is left of it is added to `left`.

        A batch that is being written may hold the value, one that it replaced, or its copy on the
        way to another segment.
        """
        block_hash = self._hash(key)
        block = self._find(block_hash)
        rows = [] if block is None else self.store.holdings.remove(block)
        left.rows += rows
        writeback = self.store.writeback
        batch = writeback.in_flight if writeback is not None else None
        if batch is not None and (rows or block_hash in batch.hashes):
            left.hashes.add(block_hash)
            if batch not in left.batches:
                left.batches.append(batch)
        return block is not None

    async def forget(self, left: Leftovers) -> None:
        """Strike out what is left, so that no start of the daemon finds it.

        Raises UnavailableError: the drive takes more than FORGET_SECONDS for what it writes now.
        """
        rows = left.rows
        if left.batches:
            ends = [batch.left for batch in left.batches]
            _, writing = await asyncio.wait(ends, timeout=FORGET_SECONDS)
            if writing:
                raise UnavailableError("the drive is busy: a restart may bring back what is gone")
            rows = rows + [
                row for end in ends for row in end.result() if row.block_hash in left.hashes
            ]
        if rows and self.store.ssd is not None:
            await asyncio.to_thread(self.store.ssd.forget, rows)

    # ---- the rest ----

    def publish(self) -> None:
        """Tell of what has changed."""
        self.store.holdings.publish()

    def keep_leases(self) -> None:
        """Values that are being brought may take their time. Called every second or so."""
        for session in self._sessions.values():
            self.store.heartbeat(session)

    def check_integrity(self) -> None:
        slots = [incoming.slot for incoming in self._arriving]
        assert self._arriving_bytes == sum(slot.extent.slot_bytes for slot in slots)
        for slot in slots:
            assert slot.number not in slot.extent.occupants, "a value is received over another"
            assert slot.number not in slot.extent.free, "a value is received into a free slot"
        for outgoing in self._held:
            assert outgoing.block is not None
            assert outgoing.block.pins > 0

    @property
    def held(self) -> int:
        """Values that are being sent, and slots that are being filled."""
        return len(self._held) + len(self._arriving)

    # ---- inner steps ----

    def _hash(self, key: bytes) -> BlockHash:
        return BlockHash(blake3.blake3(key, key=self._key).digest())

    def _is_ours(self, block: Block) -> bool:
        namespace = block.namespace.namespace
        return namespace.engine_family == VALUES_FAMILY and namespace.isolation_domain == self.name

    def _find(self, block_hash: BlockHash) -> Block | None:
        catalog = self.store.holdings.catalog
        catalog.wake((block_hash,))
        block = catalog.blocks.get(block_hash)
        if block is None or not (block.in_dram or block.in_ssd) or not self._is_ours(block):
            return None
        return block

    def _payload_for(self, byte_count: int) -> int:
        """Of the slot for a value: a close fit, while there are few sizes.

        Each size takes an extent at least, which no other can use meanwhile. So when the close ones
        have half of what the door may have, values of new sizes share those of powers of two.
        """
        close = size_of(byte_count, self._largest_payload)
        if close in self._sessions or len(self._sessions) < self._most_close_sizes:
            return close
        return size_of(byte_count, self._largest_payload, steps=1)

    def _session(self, payload_bytes: int) -> Session:
        session = self._sessions.get(payload_bytes)
        if session is None:
            namespace = _namespace(self.name, payload_bytes)
            session = self.store.open_session(f"resp {self.name}", namespace, 0, None)
            self._sessions[payload_bytes] = session
        return session

    def _open(self, outgoing: Outgoing) -> None:
        block = self._find(outgoing.block_hash)
        if block is None:
            return
        if not outgoing.held_bytes:
            outgoing.held_bytes = block.namespace.slot_bytes
        if block.in_dram and block.is_verified:
            self.store.holdings.queue.touch([block])
            self._hold(outgoing, block)
            return
        try:
            session = self._session(block.namespace.size_classes[0].payload_bytes)
            lease = self.store.acquire(
                session, [block.hash], AcquirePolicy.WAIT_COMPLETE, BRING_SECONDS
            )
        except EmberError:  # draining, or too much is on its way
            self.store.holdings.counters["resp_unreadable_values"] += 1
            return
        outgoing.lease, outgoing.session = lease, session

    def _hold(self, outgoing: Outgoing, block: Block) -> None:
        slot = block.slots[0]
        assert slot is not None
        payload = self.store.holdings.pool.payload(slot)
        magic, _, byte_count = _HEADER.unpack_from(payload)
        if magic != _MAGIC or byte_count > len(payload) - HEADER_BYTES:
            self.store.holdings.counters["resp_unreadable_values"] += 1
            payload.release()
            return
        self.store.holdings.catalog.pin(block)
        outgoing.block = block
        outgoing.view = payload[HEADER_BYTES : HEADER_BYTES + byte_count]
        payload.release()
        self._held.add(outgoing)

    def _release(self, outgoing: Outgoing) -> None:
        lease, outgoing.lease = outgoing.lease, None
        if lease is not None and not lease.is_ended:
            assert outgoing.session is not None
            self.store.release(outgoing.session, [lease.id])

    def _arrived(self, incoming: Incoming) -> None:
        self._arriving.remove(incoming)
        self._arriving_bytes -= incoming.slot.extent.slot_bytes
        incoming._place.release()


def size_of(byte_count: int, largest_payload: int, steps: int = _STEPS) -> int:
    """The payload of the slot for a value: at most a sixteenth, or a page, is left over.

    Args:
        steps: sizes between a power of two and the next; the part that may be left over.
    """
    wanted = byte_count + HEADER_BYTES
    below = 1 << (wanted.bit_length() - 1)
    step = max(ALIGNMENT, below // steps)
    return min(align_up(-(-wanted // step) * step), largest_payload)


def _namespace(name: str, payload_bytes: int) -> Namespace:
    return Namespace(
        model=VALUES_FAMILY,
        weights_id="values",
        kv_dtype="bytes",
        layout_fingerprint="resp-value-1",
        block_tokens=1,
        groups=(Group(GroupKind.FULL, 1, payload_bytes),),
        engine_family=VALUES_FAMILY,
        isolation_domain=name,
    )
