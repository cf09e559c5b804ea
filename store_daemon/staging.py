"""Slots for the blocks of a run that a session is about to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from emberkv_proto.types import BlockHash, StageState
from store_daemon.block import Block, StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.sessions import StagedPart, stage_state
from store_daemon.tenants import Tenant
from store_daemon.tiers.slots import SizeClass, Slot

_AS_STAGED = partial(tuple.__new__, StagedPart)
"""`StagedPart._make` without a call of Python's, which is most of its cost."""


@dataclass(frozen=True, slots=True)
class Grants:
    """What each block of a run got: a StageState and, where it is GRANTED, a slot."""

    granted: dict[BlockHash, StagedPart]
    states: bytearray
    offsets: list[int]
    """0 where nothing was granted."""


def grant_slots(
    holdings: Holdings,
    namespace: StoredNamespace,
    part: int,
    hashes: Sequence[BlockHash],
    parent: BlockHash | None,
    tenant: Tenant | None,
) -> Grants:
    """Begin to write a part of each block that lacks it, as far as there is room. O(len(hashes)).

    What is there already was asked for by this: it becomes young.
    """
    catalog, size_class = holdings.catalog, namespace.size_classes[part]
    blocks = catalog.blocks
    catalog.wake(hashes if parent is None else (parent, *hashes))
    holdings.queue.next_access()
    # Slots for what is nowhere yet, as far as they are free: neighbours copy faster.
    absent = len(hashes)
    if not blocks.keys().isdisjoint(hashes):
        absent -= sum(map(blocks.__contains__, hashes))
    free = holdings.pool.take_run(size_class, absent) if tenant is None else []
    if len(free) == len(hashes):
        begun = catalog.begin_run(namespace, hashes, parent, part)
        parts = dict(zip(hashes, map(_AS_STAGED, zip(begun, free, strict=True)), strict=True))
        return Grants(parts, bytearray(len(hashes)), [slot.offset for slot in free])
    free.reverse()
    grants = Grants({}, bytearray(len(hashes)), [0] * len(hashes))
    known: list[Block] = []
    previous = catalog.find(namespace, parent) if parent is not None else None
    is_full = False
    for number, block_hash in enumerate(hashes):
        block = blocks.get(block_hash)
        state = StageState.GRANTED
        if block is not None:
            known.append(block)
            state = stage_state(block, namespace, part, 1 << part)
        if state is StageState.GRANTED:
            owner = tenant if block is None else block.tenant
            slot = free.pop() if free and owner is None else None
            if slot is None and not is_full:
                slot = _take_beside(holdings, previous, size_class, owner)
            if slot is None:
                is_full = True
                state = StageState.NO_SPACE
            else:
                block = catalog.begin_part(namespace, block_hash, parent, part, tenant)
                grants.granted[block_hash] = StagedPart(block, slot)
                grants.offsets[number] = slot.offset
        grants.states[number] = state
        parent, previous = block_hash, block
    assert not free, "a slot was taken for a block that was there"
    holdings.queue.touch(known)
    return grants


def _take_beside(
    holdings: Holdings, parent: Block | None, size_class: SizeClass, tenant: Tenant | None
) -> Slot | None:
    """A slot for a child of `parent`, which must not be evicted to make room for it."""
    if tenant is None:
        slot = holdings.pool.take(size_class)
        if slot is not None:
            return slot
    if parent is None:
        return holdings.take(size_class, tenant)
    holdings.catalog.pin(parent)
    slot = holdings.take(size_class, tenant)
    holdings.unpin([parent])
    return slot
