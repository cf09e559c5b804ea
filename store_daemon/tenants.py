"""Who a block counts against, how much each tenant holds, and how much it may. Pure.

A tenant is a salt id; blocks without one are nobody's and under no quota. In DRAM a tenant's slots
count from the moment they are staged, on SSD its records as they lie in their segments. Usage is
kept as it changes; `check_integrity` adds it up anew from the blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberkv_proto.types import SaltId

if TYPE_CHECKING:
    from store_daemon.block import Block

IDLE_TENANTS = 1024
"""Tenants without blocks or limits of their own that are remembered, with their counts."""
_SPARE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may hold in each tier, in bytes; None: as much as there is room."""

    dram_bytes: int | None = None
    ssd_bytes: int | None = None


NO_LIMIT = Quota()


def quota_of(dram_bytes: int, ssd_bytes: int) -> Quota:
    """A quota as settings and messages say it: 0 is no limit."""
    return Quota(dram_bytes or None, ssd_bytes or None)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant holds and may hold. `evicted_blocks` went because it was over its quota."""

    salt_id: SaltId
    dram_bytes: int
    ssd_bytes: int
    quota: Quota
    evicted_blocks: int


_Entry = tuple[int, int, int, "Block"]
"""Access and depth when it was offered (deeper first), a number that decides ties, the block."""


class Victims:
    """A tenant's blocks of one tier, least recently used first and children before parents.

    Entries are not withdrawn: a block that may not go is passed over when it comes to the front,
    and one that was used since goes back to where it belongs now.
    """

    def __init__(self, is_stale: Callable[[Block], bool]) -> None:
        """`is_stale` says which entries can be dropped: theirs are no candidates at present."""
        self._is_stale = is_stale
        self._heap: list[_Entry] = []
        self._offers = 0
        self._clean_at = _SPARE_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Block]:
        """Blocks with an entry, some more than once."""
        return (entry[3] for entry in self._heap)

    def offer(self, block: Block) -> None:
        """The block may have become a victim."""
        self._offers += 1
        heapq.heappush(self._heap, (block.access, -block.depth, self._offers, block))
        if len(self._heap) > self._clean_at:
            newest = {id(entry[3]): entry for entry in sorted(self._heap, key=lambda e: e[2])}
            self._heap = [entry for entry in newest.values() if not self._is_stale(entry[3])]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + _SPARE_ENTRIES

    def next(
        self, may_go: Callable[[Block], bool], passed_over: Callable[[Block], None]
    ) -> Block | None:
        """The next victim, which stays queued. What may not go is taken out and reported."""
        heap = self._heap
        while heap:
            access, _, number, block = heap[0]
            if not may_go(block):
                heapq.heappop(heap)
                passed_over(block)
            elif block.access != access:
                heapq.heapreplace(heap, (block.access, -block.depth, number, block))
            else:
                return block
        return None


class Tenant:
    """One tenant's account. The catalog charges and refunds it."""

    __slots__ = (
        "_over",
        "dram_bytes",
        "evicted_blocks",
        "has_own_quota",
        "in_dram",
        "on_ssd",
        "quota",
        "salt_id",
        "ssd_bytes",
    )

    def __init__(self, salt_id: SaltId, quota: Quota, over: dict[SaltId, Tenant]) -> None:
        self.salt_id = salt_id
        self.quota = quota
        self.has_own_quota = False
        self.dram_bytes = 0
        self.ssd_bytes = 0
        self.evicted_blocks = 0
        self.in_dram = Victims(lambda block: not block.is_queued)
        self.on_ssd = Victims(lambda block: not block.in_ssd)
        self._over = over

    def charge_dram(self, byte_count: int) -> None:
        """Count bytes taken or, negative, given back."""
        self.dram_bytes += byte_count
        if self.is_over_dram:
            self._over[self.salt_id] = self

    @property
    def is_over_dram(self) -> bool:
        limit = self.quota.dram_bytes
        return limit is not None and self.dram_bytes > limit

    def exceeds_dram(self, more_bytes: int) -> bool:
        """Whether it would be over its quota with so many bytes more."""
        limit = self.quota.dram_bytes
        return limit is not None and self.dram_bytes + more_bytes > limit

    def exceeds_ssd(self, more_bytes: int) -> bool:
        limit = self.quota.ssd_bytes
        return limit is not None and self.ssd_bytes + more_bytes > limit

    @property
    def usage(self) -> TenantUsage:
        return TenantUsage(
            self.salt_id, self.dram_bytes, self.ssd_bytes, self.quota, self.evicted_blocks
        )


class TenantBook:
    """All tenants that hold something, have a quota of their own, or did so lately.

    Args:
        default: the quota of who has none of their own.
        quotas: those that are configured.
    """

    def __init__(
        self, default: Quota = NO_LIMIT, quotas: Mapping[SaltId, Quota] | None = None
    ) -> None:
        self._default = default
        self._tenants: dict[SaltId, Tenant] = {}
        self._over: dict[SaltId, Tenant] = {}
        """Who was over their DRAM quota at their last charge, or since it was changed."""
        self._sweep_at = IDLE_TENANTS
        for salt_id, quota in (quotas or {}).items():
            self.set_quota(salt_id, quota)

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, salt_id: SaltId | None) -> Tenant | None:
        """The tenant of a salt id, entered when it is new; None: nobody."""
        if salt_id is None:
            return None
        tenant = self._tenants.get(salt_id)
        if tenant is None:
            if len(self._tenants) >= self._sweep_at:
                self._forget_idle()
            tenant = self._tenants[salt_id] = Tenant(salt_id, self._default, self._over)
        return tenant

    def set_quota(self, salt_id: SaltId, quota: Quota) -> None:
        """From now on. Who is over it keeps what it has until room is needed."""
        tenant = self.of(salt_id)
        assert tenant is not None
        tenant.quota, tenant.has_own_quota = quota, True
        if tenant.is_over_dram:
            self._over[salt_id] = tenant

    def drop_quota(self, salt_id: SaltId) -> None:
        """Back to what all have that have none of their own."""
        tenant = self._tenants.get(salt_id)
        if tenant is not None:
            self.set_quota(salt_id, self._default)
            tenant.has_own_quota = False

    def set_default(self, quota: Quota) -> None:
        """The quota of all who have none of their own, from now on. O(tenants)."""
        self._default = quota
        for tenant in self._tenants.values():
            if not tenant.has_own_quota:
                tenant.quota = quota
                if tenant.is_over_dram:
                    self._over[tenant.salt_id] = tenant

    def over_quota(self) -> Iterator[Tenant]:
        """Who holds more DRAM than allowed. O(those who did at their last charge)."""
        for tenant in list(self._over.values()):
            if tenant.is_over_dram:
                yield tenant
            else:
                del self._over[tenant.salt_id]

    def usage(self) -> tuple[TenantUsage, ...]:
        """Of every tenant, by salt id."""
        return tuple(self._tenants[salt_id].usage for salt_id in sorted(self._tenants))

    def limited(self) -> list[TenantUsage]:
        """Of those that have a quota of their own, by salt id."""
        return [
            self._tenants[s].usage for s in sorted(self._tenants) if self._tenants[s].has_own_quota
        ]

    def check_integrity(self, blocks: Iterable[Block], asleep: Mapping[SaltId, int]) -> None:
        """Assert that each account is the sum over its blocks, and who is over quota is known.

        Args:
            blocks: all that the catalog holds.
            asleep: bytes on SSD of the blocks that sleep.
        """
        queued = {id(block) for tenant in self._tenants.values() for block in tenant.in_dram}
        on_ssd = {id(block) for tenant in self._tenants.values() for block in tenant.on_ssd}
        dram: dict[SaltId, int] = {}
        ssd = dict(asleep)
        for block in blocks:
            tenant = block.tenant
            if tenant is None:
                continue
            salt_id = tenant.salt_id
            assert self._tenants.get(salt_id) is tenant, "a block of a forgotten tenant"
            dram[salt_id] = dram.get(salt_id, 0) + block.dram_bytes
            ssd[salt_id] = ssd.get(salt_id, 0) + block.ssd_bytes
            assert not block.is_queued or id(block) in queued, "a victim its tenant cannot find"
            assert not block.in_ssd or id(block) in on_ssd, "an SSD copy its tenant cannot find"
        for salt_id, tenant in self._tenants.items():
            assert tenant.dram_bytes == dram.get(salt_id, 0), f"{salt_id.hex()}: dram usage drifted"
            assert tenant.ssd_bytes == ssd.get(salt_id, 0), f"{salt_id.hex()}: ssd usage drifted"
            assert not tenant.is_over_dram or salt_id in self._over

    def _forget_idle(self) -> None:
        """O(tenants), once for as many new ones."""
        for tenant in list(self._tenants.values()):
            if not (tenant.dram_bytes or tenant.ssd_bytes or tenant.has_own_quota):
                del self._tenants[tenant.salt_id]
                self._over.pop(tenant.salt_id, None)
        self._sweep_at = 2 * len(self._tenants) + IDLE_TENANTS
