"""The node's events as vLLM publishes an engine's: blocks by number, media CPU and STORAGE. Pure.

    message      [unix seconds, [event, ...], 0]      msgpack
    stored       {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., ...}
    removed      {"type": "BlockRemoved", "block_hashes": [...], "medium": ...}
    cleared      {"type": "AllBlocksCleared"}

A block is called by its index key, a number of 64 bits. What the daemon cannot know is empty: it
has hashes, not token ids. docs/kv-events.md says what a consumer can make of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, Keys
from emberkv_proto.hashing import index_key
from emberkv_proto.types import BlockHash, Tier
from store_daemon.block import Block
from store_daemon.catalog import BlockCatalog

MEDIA: Mapping[Tier, str] = {Tier.DRAM: "CPU", Tier.SSD: "STORAGE"}
MAX_HASHES_PER_EVENT = 4096
MAX_HASHES_PER_MESSAGE = 16384


@dataclass(frozen=True, slots=True, eq=False)
class StoredRun:
    """Blocks that came to a tier, each the parent of the next one."""

    tier: Tier
    keys: list[int]
    parent: int | None
    block_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """Blocks that came to a tier, in no order; of their chains nothing is known."""

    tier: Tier
    keys: Keys
    block_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RemovedBlocks:
    tier: Tier
    keys: list[int] | Keys


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Whatever the listener knows of this node is void."""


Record = StoredRun | StoredBlocks | RemovedBlocks | AllCleared


def records_of(
    event: Event, hashes: Sequence[BlockHash] | None, blocks: Mapping[BlockHash, Block]
) -> Iterator[Record]:
    """What to tell of an event, while its blocks are still in the catalog.

    Blocks without an object, of which nothing but the key is known, have no chain to tell.
    """
    match event:
        case BlocksRemoved(tier, keys):
            yield RemovedBlocks(tier, keys)
        case BlocksStored(tier) if hashes is not None:
            yield from _runs(tier, [blocks[h] for h in hashes if h in blocks])
        case _:
            return


def resident_records(catalog: BlockCatalog) -> Iterator[Record]:
    """All that is resident. Blocks of one chain come together if they lie so in the catalog."""
    for tier in MEDIA:
        yield from _runs(tier, catalog.resident(tier))
    if catalog.sleeping is not None:
        for namespace, keys in catalog.sleeping.keys_by_namespace():
            yield StoredBlocks(Tier.SSD, keys, namespace.namespace.block_tokens)


def _runs(tier: Tier, blocks: Iterable[Block]) -> Iterator[StoredRun]:
    run: list[Block] = []
    for block in blocks:
        if run and (block.parent != run[-1].hash or block.namespace is not run[-1].namespace):
            yield _run(tier, run)
            run = []
        run.append(block)
    if run:
        yield _run(tier, run)


def _run(tier: Tier, run: Sequence[Block]) -> StoredRun:
    first = run[0]
    return StoredRun(
        tier,
        [index_key(block.hash) for block in run],
        None if first.parent is None else index_key(first.parent),
        first.namespace.namespace.block_tokens,
    )


def cut(record: Record) -> Iterator[Record]:
    """The record in pieces that fit in an event."""
    if isinstance(record, AllCleared):
        yield record
        return
    for start in range(0, len(record.keys), MAX_HASHES_PER_EVENT):
        end = start + MAX_HASHES_PER_EVENT
        match record:
            case RemovedBlocks(tier, keys):
                yield RemovedBlocks(tier, keys[start:end])
            case StoredBlocks(tier, loose, block_tokens):
                yield StoredBlocks(tier, loose[start:end], block_tokens)
            case StoredRun(tier, chain, parent, block_tokens):
                before = chain[start - 1] if start else parent
                yield StoredRun(tier, chain[start:end], before, block_tokens)


def size_of(record: Record) -> int:
    """Its hashes; at least 1, so that what is counted by it is bounded."""
    return 1 if isinstance(record, AllCleared) else max(1, len(record.keys))


def encode_message(records: Sequence[Record], unix_seconds: float) -> bytes:
    return msgspec.msgpack.encode([unix_seconds, [_event(record) for record in records], 0])


def _event(record: Record) -> dict[str, Any]:
    match record:
        case StoredRun() | StoredBlocks():
            return {
                "type": "BlockStored",
                "block_hashes": _numbers(record.keys),
                "parent_block_hash": record.parent if isinstance(record, StoredRun) else None,
                "token_ids": [],
                "block_size": record.block_tokens,
                "lora_id": None,
                "medium": MEDIA[record.tier],
                "lora_name": None,
            }
        case RemovedBlocks():
            return {
                "type": "BlockRemoved",
                "block_hashes": _numbers(record.keys),
                "medium": MEDIA[record.tier],
            }
        case AllCleared():
            return {"type": "AllBlocksCleared"}


def _numbers(keys: list[int] | Keys) -> list[int]:
    found: list[int] = keys if isinstance(keys, list) else keys.tolist()
    return found
