"""How much of DRAM one session may hold through leases. Pure.

Heartbeats renew leases for as long as a client lives, so without a limit one client could keep all
slots from the others. Blocks that several leases of the session share count once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from emberkv_proto.types import BlockHash
from store_daemon.block import StoredNamespace
from store_daemon.leases import Lease


def blocks_that_fit(
    limit_bytes: int,
    held: Collection[Lease],
    namespace: StoredNamespace,
    hashes: Sequence[BlockHash],
) -> int:
    """How many leading blocks may be leased beside what the session holds already.

    A block counts with all its parts. O(held leases) while all of it would fit counted double,
    else O(blocks of the held leases).
    """
    block_bytes = namespace.slot_bytes
    room = limit_bytes // block_bytes
    if len(hashes) + sum(lease.usable for lease in held) <= room:
        return len(hashes)
    leased: set[BlockHash] = set()
    for lease in held:
        leased.update(lease.hashes[: lease.usable])
    room -= len(leased)
    for number, block_hash in enumerate(hashes):
        if block_hash not in leased:
            if room <= 0:
                return number
            room -= 1
    return len(hashes)
