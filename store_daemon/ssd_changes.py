"""The catalog follows what the SSD tier did on its own account."""

from __future__ import annotations

from collections.abc import Iterable

from store_daemon.block import Block
from store_daemon.holdings import Holdings
from store_daemon.namespaces import NamespaceBook
from store_daemon.tiers.changes import TierChanges
from store_daemon.tiers.ssd import SsdRow, SsdTier


def advise(ssd: SsdTier, holdings: Holdings) -> None:
    """Tell the tier what its reclaim is to keep. It asks from the thread that writes."""
    pins, blocks = holdings.pins, holdings.catalog.blocks

    def is_used(row: SsdRow) -> bool:
        """Reads that DRAM answered do not reach the tier."""
        block = blocks.get(row.block_hash)
        return block is not None and block.in_dram and block.uses > 0

    ssd.keep(is_pinned=lambda row: pins.covers(row.block_hash), is_used=is_used)


def follow(holdings: Holdings, changes: TierChanges) -> None:
    """Rows that went leave their blocks, those that moved stay. The caller publishes."""
    for move in changes.moved:  # first: what moved may have gone from there
        if not holdings.catalog.move_row(move.old, move.new):
            holdings.rows_to_forget.append(move.new)
    holdings.drop_rows(changes.gone)
    holdings.drop_rows(changes.lost)


def take_found(
    holdings: Holdings,
    namespaces: NamespaceBook,
    found: Iterable[SsdRow],
) -> None:
    """Announce the rows of a drive that came back. The caller publishes."""
    touched: set[Block] = set()
    for row in found:
        namespace = namespaces.get(row.namespace_id)
        tenant = holdings.tenants.of(row.salt_id)
        if namespace is None or not holdings.catalog.recover_row(namespace, row, tenant):
            holdings.rows_to_forget.append(row)
            continue
        touched.add(holdings.catalog.blocks[row.block_hash])
    for block in touched:
        if block.in_ssd:
            holdings.counters["recovered_blocks_ssd"] += 1
        else:
            holdings.lose_ssd(block)  # a part of it is missing
