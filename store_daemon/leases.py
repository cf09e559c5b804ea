"""Leases: which session may read which blocks, and until when. Pure: the clock is passed in.

A lease pins its blocks in the catalog from the grant on. Blocks [0, ready) can be read; those in
[ready, usable) are being brought; `usable` only shrinks, `ready` only grows, and a lease is
complete when they meet. Where a shorter hit needs other parts (window and state groups, see
`needs`), the lease becomes ready as a whole, and shrinks to what is usable as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from emberkv_proto.errors import LeaseExpiredError, PoolFullError, UnknownLeaseError
from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.needs import Needs

LeaseId = NewType("LeaseId", int)
SessionId = NewType("SessionId", int)
PEERS = SessionId(0)
"""Holder of the leases that other daemons have."""
ROUTERS = SessionId(-1)
"""Holder of the prefetches that routers asked for."""
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
    needs: Needs
    """Which parts of the blocks its reader may read."""
    recompute_seconds: float | None = None
    """What computing a block anew costs its reader; None: it waits whatever that costs."""
    arrived: int = 0
    """Leading blocks whose needed parts can be read."""
    moved: int = 0
    """Blocks before this one need no move, or theirs was begun."""
    is_ended: bool = False

    @property
    def usable(self) -> int:
        return len(self.blocks)

    @property
    def ready(self) -> int:
        return self.arrived if self.needs.is_divisible or self.is_complete else 0

    @property
    def is_complete(self) -> bool:
        return self.arrived == len(self.blocks)

    def is_readable(self, number: int) -> bool:
        """Whether the needed parts of a usable block can be read now."""
        block = self.blocks[number]
        return block is not None and self.needs.are_readable(block, number)

    def advance(self) -> bool:
        """Count further leading blocks that can be read now; return whether more are ready."""
        before = self.ready
        arrived = self.needs.count_readable(self.blocks, self.arrived)
        self.arrived = arrived
        return self.ready > before

    def shrink(self, usable: int) -> list[Block]:
        """Give up the blocks from `usable` on; return those to unpin. Never below `ready`.

        An indivisible lease keeps less where that is the longest hit of what it has or awaits.
        """
        if not self.needs.is_divisible and not self.is_complete:
            everything = [True] * self.namespace.parts
            usable = self.namespace.longest_hit(
                [everything if b is None else b.held_parts for b in self.blocks[:usable]]
            )
        return self._cut(max(usable, self.ready))

    def freeze(self) -> list[Block]:
        """Give up what cannot be read now; return the blocks to unpin. Completes the lease."""
        usable = self.ready
        if not self.needs.is_divisible and not self.is_complete:
            usable = self.namespace.longest_hit(
                [readable_parts(block, self.namespace) for block in self.blocks]
            )
        return self._cut(usable)

    def _cut(self, usable: int) -> list[Block]:
        gone = [block for block in self.blocks[usable:] if block is not None]
        if not self.needs.is_divisible and usable < self.usable:
            self.needs = self.namespace.needs(usable)
            self.arrived = self.moved = 0
        del self.blocks[usable:]
        del self.sources[usable:]
        self.moved = min(self.moved, usable)
        self.advance()
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
        """Record a lease over blocks that the caller has pinned. Peers get every part.

        What of it can be read is still to be counted: see `Lease.advance`.
        """
        assert len(hashes) == len(blocks)
        self._next_id += 1
        lease = Lease(
            LeaseId(self._next_id),
            session,
            namespace,
            hashes,
            blocks,
            sources,
            expires_at,
            namespace.everything if session == PEERS else namespace.needs(len(blocks)),
        )
        self._leases[lease.id] = lease
        self._by_session.setdefault(session, {})[lease.id] = lease
        return lease

    def of(self, session: SessionId) -> Collection[Lease]:
        """What the session holds."""
        return self._by_session.get(session, {}).values()

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
            assert lease.arrived <= lease.usable
            for number, block in enumerate(lease.blocks[: lease.ready]):
                assert block is not None
                for part in lease.needs.parts(number):
                    assert block.slots[part] is not None, "a ready block has no slot"

    def _find(self, session: SessionId, lease_id: LeaseId) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session == session:
            return lease
        if self._expired.get(lease_id) == session:
            raise LeaseExpiredError(f"lease {lease_id} ran out; look the blocks up again")
        raise UnknownLeaseError(f"lease {lease_id} is not held; look the blocks up again")


def readable_parts(block: Block | None, namespace: StoredNamespace) -> list[bool]:
    """Per part, whether it can be read now."""
    if block is None or block.is_doomed or not block.is_verified:
        return [False] * namespace.parts
    return [slot is not None for slot in block.slots]
