"""Chains of small blocks whose bytes follow from their hashes, written and read by an SDK client.

Light to import: client processes of campaigns use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3

from client_sdk import SyncClient
from client_sdk.sync_borrowed import StagedWrite
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash

PART_BYTES = 4000
BLOCK_TOKENS = 4
NAMESPACE = Namespace(
    "small",
    "w1",
    "float32",
    KvLayout("float32", 1, 1, 8).fingerprint,
    BLOCK_TOKENS,
    (Group(GroupKind.FULL, 1, PART_BYTES),),
)


def chain_of(number: int, blocks: int) -> list[BlockHash]:
    """The hashes of chain `number`; no two chains share a block."""
    tokens = [number & 0xFFFFFFFF, number >> 32, *range(2, blocks * BLOCK_TOKENS)]
    return block_hashes(NAMESPACE.id, tokens, BLOCK_TOKENS)


def payload_of(block_hash: BlockHash) -> bytes:
    return blake3.blake3(block_hash).digest(length=PART_BYTES)


def stage_chain(client: SyncClient, hashes: Sequence[BlockHash]) -> StagedWrite:
    """Stage and fill what is granted; the caller commits or leaves it."""
    write = client.stage(hashes)
    for i in write.granted:
        write.view(i)[:] = payload_of(hashes[i])
    return write


def write_chain(client: SyncClient, hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """Store a chain; return the blocks that this call committed."""
    with stage_chain(client, hashes) as write:
        mine = write.granted
        if mine:
            write.commit()
        return [hashes[i] for i in mine]


def read_chain(client: SyncClient, hashes: Sequence[BlockHash], seconds: float = 20.0) -> int:
    """Read what is there of a chain, as an engine does: copy, then ask whether the lease held.

    Returns how many blocks that was. Raises AssertionError, naming the block, if a byte differs.
    """
    policy = AcquirePolicy.WAIT_COMPLETE
    with client.acquire(hashes, policy=policy, deadline_seconds=seconds) as lease:
        ready = lease.wait(lease.usable_blocks, seconds)
        copies = [bytes(lease.view(i)) for i in range(ready)]
        if ready:
            lease.require_valid()
    for block_hash, copy in zip(hashes, copies, strict=False):
        assert copy == payload_of(block_hash), f"wrong bytes in block {block_hash.hex()}"
    return ready
