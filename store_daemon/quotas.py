"""Whose blocks go because of a quota: a tenant's own before others', and first when room is needed.

Runs on the daemon's event loop; nothing here waits. Inside a tenant leaves go first, then what was
used least recently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from emberkv_proto.types import SaltId
from store_daemon.block import Block
from store_daemon.catalog import BlockCatalog
from store_daemon.config import DaemonSettings
from store_daemon.eviction import EvictionQueue
from store_daemon.tenants import Quota, Tenant, TenantBook, quota_of
from store_daemon.tiers.slots import SizeClass

MOST_EVICTED = 256
"""Blocks that one call evicts of a tenant at most; bounds one turn of the loop."""
MOST_PASSED_OVER = 64
"""SSD copies in use that one call looks past."""
SHED_BLOCKS = 16
"""Most blocks of tenants over quota that one step of making room evicts."""


class QuotaEviction:
    """Evicts what quotas say must go.

    Args:
        let_go: evicts a victim or has it written first; False: neither, for now.
        drop_ssd: forgets a block's SSD copy.
        hurry: evicts a block of the tenant that waits for being written; False: there is none.
    """

    def __init__(
        self,
        tenants: TenantBook,
        catalog: BlockCatalog,
        queue: EvictionQueue,
        counters: Counter[str],
        let_go: Callable[[Block], bool],
        hurry: Callable[[Tenant], bool],
        drop_ssd: Callable[[Block], None],
    ) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._queue = queue
        self._counters = counters
        self._let_go = let_go
        self._hurry = hurry
        self._drop_ssd = drop_ssd

    def admit(self, tenant: Tenant, byte_count: int) -> bool:
        """Evict the tenant's own blocks until it may take so many bytes; False: it may not.

        Then all else it has is held, or the quota is smaller than what it asks for.
        """
        for _ in range(MOST_EVICTED):
            if not tenant.exceeds_dram(byte_count):
                return True
            victim = self._victim_of(tenant)
            if victim is not None:
                if not self.evict(victim):
                    break
            elif self._hurry(tenant):
                self._count(tenant)
            else:
                break
        if tenant.exceeds_dram(byte_count):
            self._counters["over_quota_refused"] += 1
            return False
        return True

    def shed(self, wanted: SizeClass) -> bool:
        """Evict some blocks of who is over quota; return whether a slot of the class came free."""
        for _ in range(SHED_BLOCKS):
            victim = self.victim()
            if victim is None:
                return False
            part, is_own = wanted.part, victim.namespace.id == wanted.namespace_id
            is_wanted = is_own and victim.slots[part] is not None
            if not self.evict(victim):
                return False
            if is_wanted and not victim.takes_room:
                return True
        return False

    def victim(self) -> Block | None:
        """The next block of who is over quota; None: nobody is, or all they have is held."""
        for tenant in self._tenants.over_quota():
            victim = self._victim_of(tenant)
            if victim is not None:
                return victim
        return None

    def evict(self, victim: Block) -> bool:
        """Let a block go because of its quota, now or once it is written; False as `let_go`.

        It counts when it goes.
        """
        if not self._let_go(victim):
            return False
        if victim.tenant is not None and not victim.takes_room:
            self._count(victim.tenant)
        return True

    def admit_on_ssd(self, tenant: Tenant, byte_count: int) -> bool:
        """Drop the tenant's own SSD copies until so many bytes more fit; False: they do not.

        The oldest go first, and of a chain its end; what is pinned or being read stays.
        """
        passed_over: list[Block] = []
        for _ in range(MOST_EVICTED):
            if not tenant.exceeds_ssd(byte_count):
                break
            victim = tenant.on_ssd.next(_may_leave_ssd, passed_over.append)
            # What slept since the start is older than what was used since.
            is_young = victim is None or victim.access
            if is_young and self._catalog.wake_owned(tenant.salt_id):
                continue
            if victim is None or len(passed_over) > MOST_PASSED_OVER:
                break
            self._count(tenant)
            self._drop_ssd(victim)
        for block in passed_over:
            if block.in_ssd:
                tenant.on_ssd.offer(block)
        return not tenant.exceeds_ssd(byte_count)

    def _count(self, tenant: Tenant) -> None:
        tenant.evicted_blocks += 1
        self._counters["over_quota_blocks"] += 1

    def _victim_of(self, tenant: Tenant) -> Block | None:
        return tenant.in_dram.next(self._catalog.is_evictable, self._queue.withdraw)


def _may_leave_ssd(block: Block) -> bool:
    return block.in_ssd and not block.pins and not block.stays


def tenants_of(settings: DaemonSettings) -> TenantBook:
    """The tenants with the quotas that are configured."""
    return TenantBook(_default_quota(settings), _own_quotas(settings))


def change_quotas(tenants: TenantBook, old: DaemonSettings, new: DaemonSettings) -> None:
    """Set what differs between two configurations; what an operator has set besides stays."""
    before, after = _own_quotas(old), _own_quotas(new)
    if _default_quota(old) != _default_quota(new):
        tenants.set_default(_default_quota(new))
    for salt_id in before.keys() - after.keys():
        tenants.drop_quota(salt_id)
    for salt_id, quota in after.items():
        if before.get(salt_id) != quota:
            tenants.set_quota(salt_id, quota)


def _default_quota(settings: DaemonSettings) -> Quota:
    return quota_of(settings.dram.tenant_quota_bytes, settings.ssd.tenant_quota_bytes)


def _own_quotas(settings: DaemonSettings) -> dict[SaltId, Quota]:
    return {
        SaltId(bytes.fromhex(salt_id)): quota_of(own.dram_bytes, own.ssd_bytes)
        for salt_id, own in settings.tenants.items()
    }
