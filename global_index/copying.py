"""Pages of whole nodes, each right after one event, read while queries and events go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from emberkv_proto.events import SnapshotPage
from emberkv_proto.types import NodeId, Tier
from global_index.directory import NodeDirectory
from global_index.views import NodeRows

MAX_KEYS_PER_PAGE = 65536
ATTEMPTS = 3
"""A node whose rows are replaced meanwhile is begun anew as often."""


async def copied_pages(
    directory: NodeDirectory, node_ids: Sequence[NodeId]
) -> AsyncGenerator[SnapshotPage, None]:
    """Yield node after node; a node whose rows are not exact is left out. Close it (`aclosing`)."""
    for node_id in node_ids:
        rows = await _copy(directory, node_id)
        if rows is None:
            continue
        cut = [
            (tier, keys[start : start + MAX_KEYS_PER_PAGE])
            for tier, keys in rows.keys.items()
            for start in range(0, len(keys), MAX_KEYS_PER_PAGE)
        ] or [(Tier.DRAM, rows.keys[Tier.DRAM])]
        for number, (tier, keys) in enumerate(cut, start=1):
            is_last = number == len(cut)
            yield SnapshotPage(node_id, rows.incarnation, rows.seq, tier, keys, is_last)


async def _copy(directory: NodeDirectory, node_id: NodeId) -> NodeRows | None:
    for _ in range(ATTEMPTS):
        copy = directory.begin_copy(node_id)
        if copy is None:
            return None
        try:
            while copy.step():  # noqa: ASYNC110
                await asyncio.sleep(0)
            rows = directory.settle_copy(node_id, copy)
        finally:
            directory.end_copy(node_id, copy)
        if rows is not None:
            return rows
    return None
