"""What earlier lives left in the pool and on SSD becomes blocks of the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter

from emberkv_proto.hashing import UNKNOWN_CHECKSUM
from emberkv_proto.types import NamespaceId
from store_daemon.block import StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.sleeping import SleepingBlocks
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.slots import Slot

Namespaces = Mapping[NamespaceId, StoredNamespace]


def take_over_pool(holdings: Holdings, namespaces: Namespaces) -> list[Slot]:
    """Enter the committed slots; return those that somebody may still be writing to."""
    pool, catalog, tenant_of = holdings.pool, holdings.catalog, holdings.tenants.of
    for extent, found in groupby(pool.found, key=attrgetter("slot.extent")):
        namespace = namespaces[extent.size_class.namespace_id]
        holdings.give_back(catalog.recover_slots(namespace, found, tenant_of))
    catalog.offer_recovered()
    unsummed = sum(found.slot.checksum == UNKNOWN_CHECKSUM for found in pool.found)
    if unsummed:  # their bytes were complete before their headers
        holdings.counters["recovered_unsummed_parts"] += unsummed
    staged = pool.found_staged
    pool.found, pool.found_staged = [], []
    return staged


def take_over_rows(holdings: Holdings, namespaces: Namespaces, rows: RowTable) -> None:
    """Enter the rows; those of whole blocks that are not in DRAM only sleep."""
    catalog, tenant_of = holdings.catalog, holdings.tenants.of
    sleeping = SleepingBlocks(rows, namespaces)
    for row in sleeping.outsiders():
        namespace = namespaces.get(row.namespace_id)
        tenant = tenant_of(row.salt_id)
        if namespace is None or not catalog.recover_row(namespace, row, tenant):
            holdings.rows_to_forget.append(row)
    holdings.rows_to_forget += catalog.recover_rows(sleeping.wake(list(catalog.blocks)))
    catalog.adopt(sleeping, tenant_of)
