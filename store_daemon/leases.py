"""Leases: which session may read which blocks, and until when. Pure: the clock is passed in.

A lease pins its blocks in the catalog from the grant on. Blocks [0, ready) can be read; those in
[ready, usable) are being brought; `usable` only shrinks, `ready` only grows, and a lease is
complete when they meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from emberkv_proto.errors import LeaseExpiredError, PoolFullError, UnknownLeaseError
from emberkv_proto.types import BlockHash, Source
from store_daemon.catalog import Block, StoredNamespace

LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)
PEERS = SessionId(0)
"""Holder of the leases that other daemons have."""
REMEMBERED_EXPIRED = 4096
MAX_LEASES = 4096
"""Most leases that one holder may have; more is a client that forgets to release."""


@dataclass(eq=False, slots=True)
class Lease:
    """A right to read blocks, which stay where they are until it ends."""

    id: LeaseId
    session: SessionId
    namespace: StoredNamespace
    hashes: Sequence[BlockHash]
    blocks: list[Block | None]
    """The usable blocks, pinned; None for one that a peer is still sending."""
    sources: bytearray
    """Per usable block, where it was when the lease was granted."""
    expires_at: float
    ready: int = 0
    moved: int = 0
    """Blocks before this one need no move, or theirs was begun."""
    is_ended: bool = False

    @property
    def usable(self) -> int:
        return len(self.blocks)

    @property
    def is_complete(self) -> bool:
        return self.ready == len(self.blocks)

    def advance(self) -> bool:
        """Count further leading blocks that can be read now; return whether there were any."""
        ready, blocks = self.ready, self.blocks
        while ready < len(blocks):
            block = blocks[ready]
            if block is None or not (block.in_dram and block.is_verified):
                break
            ready += 1
        has_more = ready > self.ready
        self.ready = ready
        return has_more

    def shrink(self, usable: int) -> list[Block]:
        """Give up the blocks from `usable` on; return those to unpin. Never below `ready`."""
        usable = max(usable, self.ready)
        gone = [block for block in self.blocks[usable:] if block is not None]
        del self.blocks[usable:]
        del self.sources[usable:]
        return gone


class LeaseTable:
    """All live leases. The caller pins before `grant` and unpins what a call returns."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._by_session: dict[SessionId, dict[LeaseId, Lease]] = {}
        self._next_id = 0
        self._expired: dict[LeaseId, SessionId] = {}
        """The last leases that ran out, to tell "too late" from "never granted"."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(
        self,
        session: SessionId,
        namespace: StoredNamespace,
        hashes: Sequence[BlockHash],
        blocks: list[Block | None],
        sources: bytearray,
        expires_at: float,
    ) -> Lease:
        """Record a lease over blocks that the caller has pinned."""
        assert len(hashes) == len(blocks)
        self._next_id += 1
        lease = Lease(
            LeaseId(self._next_id), session, namespace, hashes, blocks, sources, expires_at
        )
        self._leases[lease.id] = lease
        self._by_session.setdefault(session, {})[lease.id] = lease
        return lease

    def check_room(self, session: SessionId) -> None:
        """Raises PoolFullError when the holder has as many leases as it may."""
        if len(self._by_session.get(session, ())) >= MAX_LEASES:
            raise PoolFullError(f"{MAX_LEASES} leases are held already; release those not needed")

    def check(self, session: SessionId, lease_id: LeaseId, now: float) -> Lease:
        """The session's lease, if it may be used now.

        Raises:
            UnknownLeaseError: released before, never granted, or another session's.
            LeaseExpiredError: too late; its pins are held until `expire` returns it.
        """
        lease = self._find(session, lease_id)
        if now >= lease.expires_at:
            raise LeaseExpiredError(f"lease {lease_id} ended {now - lease.expires_at:.3f} s ago")
        return lease

    def renew(self, session: SessionId, now: float, expires_at: float) -> None:
        """Prolong the session's leases, but for those that have run out already."""
        for lease in self._by_session.get(session, {}).values():
            if now < lease.expires_at:
                lease.expires_at = expires_at

    def end(self, session: SessionId, lease_id: LeaseId) -> Lease:
        """End a lease, once.

        Raises:
            UnknownLeaseError: ended before, never granted, or another session's.
            LeaseExpiredError: `expire` has ended it.
        """
        lease = self._find(session, lease_id)
        del self._leases[lease_id]
        mine = self._by_session[session]
        del mine[lease_id]
        if not mine:
            del self._by_session[session]
        lease.is_ended = True
        return lease

    def end_session(self, session: SessionId) -> list[Lease]:
        """End all leases of a session that went away."""
        return [self.end(session, lease_id) for lease_id in list(self._by_session.get(session, ()))]

    def expire(self, now: float) -> list[Lease]:
        """End the leases that ran out. O(leases)."""
        late = [lease for lease in self._leases.values() if now >= lease.expires_at]
        for lease in late:
            self.end(lease.session, lease.id)
            self._expired[lease.id] = lease.session
        while len(self._expired) > REMEMBERED_EXPIRED:
            del self._expired[next(iter(self._expired))]
        return late

    def check_integrity(self) -> None:
        """Assert that the two maps agree and each lease's counts are in order."""
        mine = {lease.id for leases in self._by_session.values() for lease in leases.values()}
        assert mine == set(self._leases)
        for lease in self._leases.values():
            assert not lease.is_ended
            assert 0 <= lease.ready <= lease.usable <= len(lease.hashes)
            assert len(lease.sources) == lease.usable
            for block in lease.blocks[: lease.ready]:
                assert block is not None
                assert all(block.slots), "a ready block has no slot"

    def _find(self, session: SessionId, lease_id: LeaseId) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session == session:
            return lease
        if self._expired.get(lease_id) == session:
            raise LeaseExpiredError(f"lease {lease_id} ran out; look the blocks up again")
        raise UnknownLeaseError(f"lease {lease_id} is not held; look the blocks up again")


def source_of(block: Block) -> Source:
    return Source.DRAM if block.in_dram else Source.SSD
